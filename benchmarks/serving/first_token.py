"""Time to first token in conversations: sessions, prefix caching, and neither.

Several users' conversations alternate: each request has the whole history of one, and
requests of others come before its next. All engines have the same pool, which holds
only part of all histories. Each engine continues with its own answers. The texts are
LoCoMo's dialogues (``locomo.json``), several messages per turn.

    python benchmarks/serving/first_token.py MODEL locomo.json
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import EngineProcess, provenance
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.episodes.histories import locomo_utterances

BLOCK = 32
ENGINES = ("stock, no prefix cache", "stock", "policy")


def turns_of(dialogue: dict[str, Any], turns: int, words: int) -> list[str]:
    """Messages of a dialogue, joined to ``turns`` texts of about ``words`` words."""
    texts, now = [], ""
    for lines in locomo_utterances(dialogue):
        now += f"{lines.speaker}: {lines.text}\n"
        if len(now.split()) >= words:
            texts.append(now)
            now = ""
    if len(texts) < turns:
        raise typer.BadParameter(f"a dialogue has {len(texts)} turns, not {turns}")
    return texts[:turns]


class Chat:
    """One conversation on one engine."""

    def __init__(self, engine: EngineProcess, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.history: list[int] = []
        self.ends: list[int] = []

    def say(self, text: str, max_tokens: int) -> dict[str, Any]:
        """Send the history and a message; append the answer to the history."""
        opened = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        new = self.tokenizer.encode(opened, add_special_tokens=False)
        self.history += new
        result: dict[str, Any] = self.engine.ask(
            "turn", prompt=self.history, turn_ends=self.ends, max_tokens=max_tokens
        )
        close = self.tokenizer.encode("<|im_end|>\n", add_special_tokens=False)
        prompt = len(self.history)
        self.history += result.pop("answer") + close
        self.ends.append(len(self.history))
        return result | {"new": len(new), "prompt": prompt}


def open_engines(
    model: str, policy: dict[str, Any], pool_tokens: int, max_model_len: int
) -> list[EngineProcess]:
    """One engine per name in ``ENGINES``, with the same pool."""
    return [
        EngineProcess(
            policy if name == "policy" else None,
            model=model,
            dtype="bfloat16",
            enforce_eager=True,
            block_size=BLOCK,
            max_model_len=max_model_len,
            num_gpu_blocks_override=pool_tokens // BLOCK,
            enable_prefix_caching=name != ENGINES[0],
        )
        for name in ENGINES
    ]


def main(
    model: str,
    locomo: Path,
    config: Annotated[str, typer.Option(help="JSON")] = '{"ratio": 0.3}',
    policy: str = "flowkv",
    users: int = 6,
    turns: int = 10,
    words: int = 150,
    answer_tokens: int = 24,
    pool_tokens: int = 8192,
    max_model_len: int = 6144,
    json_out: Path | None = None,
) -> None:
    """Run every turn on every engine."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    dialogues = json.loads(locomo.read_text(encoding="utf-8"))[:users]
    texts = [turns_of(dialogue, turns, words) for dialogue in dialogues]
    engines = open_engines(
        model, {"name": policy, **json.loads(config)}, pool_tokens, max_model_len
    )
    chats = [[Chat(engine, tokenizer) for engine in engines] for _ in texts]
    rows = []
    try:
        # warm up, so that the first turn does not include one-time work
        for engine in engines:
            engine.ask("turn", prompt=[1, 2, 3] * 20, turn_ends=[], max_tokens=2)
        for turn in range(turns):
            for user, (text, chat) in enumerate(zip(texts, chats, strict=True)):
                for name, each in zip(ENGINES, chat, strict=True):
                    result = each.say(text[turn], answer_tokens)
                    rows.append(
                        {"turn": turn + 1, "user": user, "engine": name} | result
                    )
    finally:
        for engine in engines:
            engine.close()
    report(rows, turns)
    about = provenance()
    Console().print_json(json.dumps(about))
    if json_out is not None:
        json_out.write_text(json.dumps({"rows": rows, "about": about}))


def report(rows: list[dict[str, Any]], turns: int) -> None:
    """Print medians over users per turn."""
    table = Table()
    for heading in ("turn", "prompt", "new"):
        table.add_column(heading)
    for name in ENGINES:
        table.add_column(f"{name}: ms (min..max), CPU ms, computed")
    for turn in range(1, turns + 1):
        turn_rows = [row for row in rows if row["turn"] == turn]
        cells = [str(turn)]
        cells += [
            str(round(median(r[key] for r in turn_rows))) for key in ("prompt", "new")
        ]
        for name in ENGINES:
            own_rows = [row for row in turn_rows if row["engine"] == name]
            wall = [row["first_ms"] for row in own_rows]
            cpu = median(row["first_cpu_ms"] for row in own_rows)
            computed = median(row["computed"] for row in own_rows)
            cells.append(
                f"{median(wall):.0f} ({min(wall):.0f}..{max(wall):.0f}), "
                f"{cpu:.0f}, {computed:.0f}"
            )
        table.add_row(*cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    typer.run(main)
