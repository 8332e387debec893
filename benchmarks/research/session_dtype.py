"""Answers after sessions that are stored in 8 or 4 bits (``session_dtype``).

Sends the turns of conversations one request at a time, with prescribed answers, so that
every engine reads the same text. Each request continues the session of the one before
it, from host memory. The last question is the measurement:

- dialogues: the engine with exact sessions answers it; the others are led along its
  tokens. ``kl`` is the divergence of their distributions from the exact ones, per token
  in nats, ``top-1`` how often both prefer the same token;
- pass keys: the key is in the first message, the question in the second. Every engine
  answers freely.

``bytes`` is the metric vllm:kv_policy_session_bytes before the last questions.

    python benchmarks/research/session_dtype.py MODEL --json-out sessions.json
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _dialogue import dialogue
from _engine import child_rows, provenance
from _pass_key import QUESTION, filler, plant
from needle import MAX_TOKENS, says
from rich.console import Console
from rich.table import Table

DTYPES = ("auto", "int8", "int4")
POLICIES = (
    '{"name": "full"}',
    '{"name": "flowkv", "ratio": 0.7}',
    '{"name": "snapkv", "budget": 256}',
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all engines of a run share.

    Attributes:
        dialogues: conversations of about 600 tokens.
        keys: pass keys, in the same number of parts of a text.
        key_tokens: length of these texts.
        restores: sessions that are loaded one after the other in a conversation.
        answer_tokens: of the last question.
        logits: folder in which engines leave what they measured.
    """

    model: str
    dtype: str
    dialogues: int
    keys: int
    key_tokens: int
    restores: int
    answer_tokens: int
    logits: str

    def cases(self) -> dict[str, tuple[list[dict[str, str]], str]]:
        """Chat messages and the key, if there is one, by name."""
        found = {}
        for seed in range(self.dialogues):
            found[f"dialogue {seed}"] = dialogue(seed, 6, 2)[0].messages, ""
        for depth in range(self.keys):
            prompt, key = plant(filler(self.key_tokens), depth, self.keys)
            messages = [
                {"role": "user", "content": prompt.removesuffix(QUESTION)},
                {"role": "assistant", "content": "I have read all of it."},
                {"role": "user", "content": QUESTION.strip()},
            ]
            found[f"key {depth}"] = messages, key
        return found


def opening(tokenizer: Any, messages: list[dict[str, str]], asks: bool) -> list[int]:
    """Token IDs of messages.

    Args:
        asks: whether the start of the next answer follows.
    """
    template = tokenizer.apply_chat_template
    return list(template(messages, add_generation_prompt=asks, return_dict=False))


class Engine:
    """One engine, in this process."""

    def __init__(self, setting: Setting, policy: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from _talk import Recorded
        from vllm import LLM

        self._seen = Recorded.seen
        self._llm = LLM(
            setting.model,
            dtype=setting.dtype,
            enforce_eager=True,
            max_model_len=4096,
            kv_cache_memory_bytes=1 << 29,
            enable_prefix_caching=False,
            disable_log_stats=False,
            logits_processors=[Recorded],
            additional_config={"kv_policy": policy},
        )
        self.tokenizer = self._llm.get_tokenizer()

    def ask(
        self, prompt: list[int], max_tokens: int, ends: list[int], **extra: Any
    ) -> Any:
        """Answer greedily; records logits if ``recorded`` or ``prescribed``."""
        from vllm import SamplingParams

        del self._seen[:]
        goes_on = bool(extra.get("prescribed") or extra.get("recorded"))
        if ends:
            extra["kv_transfer_params"] = {"turn_ends": ends}
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=goes_on, extra_args=extra
        )
        request = [{"prompt_token_ids": prompt}]
        return self._llm.generate(request, params, use_tqdm=False)[0]

    @property
    def logits(self) -> torch.Tensor:
        """float32 [tokens, vocabulary], of the last request."""
        return torch.stack(self._seen)

    def metric(self, name: str) -> int:
        """The current value of a metric, after the last request was saved."""
        self.ask([1, 2, 3], 1, [], kv_session=False)
        metrics = {each.name: each for each in self._llm.get_metrics()}
        return int(metrics[f"vllm:kv_policy_{name}"].value)


def run_engine(
    setting: Setting, config: str, session_dtype: str, answers: dict[str, list[int]]
) -> None:
    """Child: hold all conversations, then ask all last questions.

    Args:
        answers: token IDs along which to lead, by case; missing ones are free.
    """
    policy = json.loads(config) | {"sessions": True, "session_memory": "4GiB"}
    policy |= {"session_dtype": session_dtype, "session_keep_on_device": False}
    engine = Engine(setting, policy)
    by_turns = policy["name"] == "flowkv"
    cases, ends = setting.cases(), dict[str, list[int]]()
    for name, (messages, _) in cases.items():
        ends[name] = []
        replies = [n for n, each in enumerate(messages) if each["role"] == "assistant"]
        for reply in replies[-setting.restores :]:
            prompt = opening(engine.tokenizer, messages[:reply], True)
            whole = opening(engine.tokenizer, messages[: reply + 1], False)
            assert whole[: len(prompt)] == prompt, "the template changes messages"
            forced = whole[len(prompt) :]
            engine.ask(prompt, len(forced), ends[name], prescribed=forced)
            if by_turns:
                ends[name].append(len(whole))
    num_bytes = engine.metric("session_bytes")
    sessions = engine.metric("sessions")
    for name, (messages, key) in cases.items():
        prompt = opening(engine.tokenizer, messages, True)
        forced = answers.get(name, [])
        count = len(forced) or (MAX_TOKENS if key else setting.answer_tokens)
        output = engine.ask(
            prompt, count, ends[name], prescribed=forced, recorded=not key
        )
        if not key:
            torch.save(engine.logits.half(), _logits(setting, session_dtype, name))
        row = {
            "case": name,
            "tokens": list(output.outputs[0].token_ids),
            "found": bool(key) and says(output.outputs[0].text, key),
            "restored": output.num_cached_tokens,
            "prompt": len(prompt),
            "bytes": num_bytes,
            "sessions": sessions,
        }
        print("RESULT " + json.dumps(row), flush=True)


def _logits(setting: Setting, session_dtype: str, case: str) -> Path:
    return Path(setting.logits) / f"{session_dtype} {case}.pt"


def compared(setting: Setting, session_dtype: str, case: str) -> tuple[float, float]:
    """Mean divergence from exact sessions, in nats, and share of equal best tokens."""
    exact, other = (
        torch.load(_logits(setting, each, case)).float().log_softmax(-1)
        for each in ("auto", session_dtype)
    )
    other = other[: len(exact)]
    kl = (exact.exp() * (exact - other)).sum(-1)
    same = exact.argmax(-1) == other.argmax(-1)
    return float(kl.mean()), float(same.float().mean())


def measure(setting: Setting, config: str) -> list[dict[str, Any]]:
    """One row per ``session_dtype``."""
    rows, answers = [], dict[str, list[int]]()
    for session_dtype in DTYPES:
        request = json.dumps([asdict(setting), config, session_dtype, answers])
        label = f"{config} {session_dtype}"
        outcomes = list(child_rows(__file__, request, label))
        talks = [each for each in outcomes if each["case"].startswith("dialogue")]
        if not answers:
            answers = {each["case"]: each["tokens"] for each in talks}
        nearest = [compared(setting, session_dtype, each["case"]) for each in talks]
        rows.append(
            {
                "policy": config,
                "session_dtype": session_dtype,
                "bytes": outcomes[0]["bytes"],
                "sessions": outcomes[0]["sessions"],
                "restored": min(each["restored"] for each in outcomes),
                "tokens": sum(len(tokens) for tokens in answers.values()),
                "kl": _mean([kl for kl, _ in nearest]),
                "kl_max": max((kl for kl, _ in nearest), default=None),
                "top1": _mean([same for _, same in nearest]),
                "found": sum(each["found"] for each in outcomes),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def main(
    model: Annotated[str, typer.Argument()] = "",
    policy: Annotated[list[str] | None, typer.Option(help="as JSON")] = None,
    dialogues: int = 8,
    keys: int = 20,
    key_tokens: int = 300,
    restores: Annotated[int, typer.Option(help="loads per conversation")] = 1,
    answer_tokens: int = 32,
    dtype: Annotated[str, typer.Option(help="of model and cache")] = "bfloat16",
    json_out: Path | None = None,
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare answers after exact, int8 and int4 sessions."""
    if child:
        fields, *arguments = json.loads(child)
        run_engine(Setting(**fields), *arguments)
        return
    if not model:
        raise typer.BadParameter("give a MODEL")
    console, rows = Console(), []
    with tempfile.TemporaryDirectory() as folder:
        lengths = dialogues, keys, key_tokens, restores, answer_tokens
        setting = Setting(model, dtype, *lengths, folder)
        for config in policy or POLICIES:
            rows += measure(setting, config)
    table = Table(
        "policy", "session_dtype", "bytes", "kl", "kl, worst", "top-1", "keys"
    )
    for row in rows:
        name = json.loads(row["policy"])["name"]
        shown = [_shown(row[field]) for field in ("kl", "kl_max", "top1")]
        found = f"{row['found']} of {keys}"
        num_bytes = str(row["bytes"])
        table.add_row(name, row["session_dtype"], num_bytes, *shown, found)
    console.print(table)
    console.print_json(data=provenance())
    if json_out is not None:
        json_out.write_text(json.dumps({"rows": rows, **provenance()}, indent=1))


if __name__ == "__main__":
    typer.run(main)
