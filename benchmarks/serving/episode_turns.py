"""Memory and time of EpiCache turns, by length of the history.

The engine reads a LoCoMo dialogue up to a given length, in a pool for budget, block and
1K tokens: once per episode, or only for the first question's episode (``--read
asked``). Then it answers the dialogue's questions in one growing chat. Recorded are the
peak of held blocks, preemptions, and per turn the time to answer with its parts:
embedding and routing the question (front end), and restoring the episode's cache
(worker). Stock vLLM with prefix caching reads the dialogue once.

    python benchmarks/serving/episode_turns.py MODEL locomo.json --budget 1024
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import child_rows, provenance
from locomo import ASK, excerpt
from locomo import Setting as Dialogue
from rich.console import Console
from rich.table import Table

BLOCK_SIZE = 32
SPARE_TOKENS = 1024
PROBE_TOKENS = 256  # positions for patched prompts after the end of a sequence
EVERY, ASKED = "every", "asked"


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine and its input. ``budget`` 0: stock, with a pool for the whole
    history."""

    dialogue: Dialogue
    budget: int
    block: int
    answer_tokens: int
    read: str
    park: bool

    @property
    def pool_tokens(self) -> int:
        """Of the pool."""
        if not self.budget:
            return self.dialogue.history_tokens + 2 * SPARE_TOKENS
        return self.budget + self.block + SPARE_TOKENS


def run_engine(setting: Setting) -> None:
    """Child: read, ask, and print a JSON line per turn."""
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    from vllm_kvplugins import episodic

    model = AutoConfig.from_pretrained(setting.dialogue.model)
    length = setting.dialogue.history_tokens + SPARE_TOKENS
    policy = {"name": "epicache", "budget": setting.budget}
    policy |= {"prefill_block": setting.block, "session_memory": "3GiB"}
    policy |= {"session_keep_on_device": setting.park}
    config = {"additional_config": {"kv_policy": policy}} if setting.budget else {}
    llm = LLM(
        setting.dialogue.model,
        dtype=setting.dialogue.dtype,
        enforce_eager=True,
        max_model_len=min(length, model.max_position_embeddings - PROBE_TOKENS),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=setting.pool_tokens // BLOCK_SIZE + 1,
        **config,
    )
    tokenizer = llm.get_tokenizer()
    history, questions = excerpt(
        setting.dialogue, lambda text: len(tokenizer.encode(text))
    )
    parts: dict[str, float] = {}
    held, preempted = _watch_blocks(llm), _watch_preemptions(llm)
    if setting.budget:
        _watch_parts(parts)
    params = SamplingParams(
        temperature=0, max_tokens=setting.answer_tokens, ignore_eos=True
    )
    once = SamplingParams(max_tokens=1)
    read = functools.partial(episodic.build, llm, history)
    if not setting.budget:
        read = functools.partial(llm.chat, history, once, use_tqdm=False)
    elif setting.read == ASKED:
        asks = {"role": "user", "content": ASK.format(questions[0].text)}
        read = functools.partial(llm.chat, [*history, asks], once, use_tqdm=False)
    _, row = _measured(read, held)
    row["preemptions"] = len(preempted)
    print("RESULT " + json.dumps(row), flush=True)
    messages = list(history)
    for question in questions:
        messages.append({"role": "user", "content": ASK.format(question.text)})
        parts.clear()
        ask = functools.partial(llm.chat, messages, params, use_tqdm=False)
        (output,), row = _measured(ask, held)
        row["prompt_tokens"] = len(output.prompt_token_ids)
        row["restored_tokens"] = output.num_cached_tokens or 0
        row["preemptions"] = len(preempted)
        print("RESULT " + json.dumps(row | parts), flush=True)
        messages.append({"role": "assistant", "content": output.outputs[0].text})


def _measured(work: Callable[[], Any], held: list[int]) -> tuple[Any, dict[str, float]]:
    """Run ``work``; returns its result with times and the peak of held blocks."""
    held.clear()
    began, cpu = time.perf_counter(), time.process_time()
    done = work()
    return done, {
        "wall_ms": (time.perf_counter() - began) * 1e3,
        "cpu_ms": (time.process_time() - cpu) * 1e3,
        # empty if the history is too short to compress
        "held_blocks": max(held, default=0),
    }


def _watch_blocks(llm: Any) -> list[int]:
    """Record the blocks in use after each step."""
    engine, held = llm.llm_engine, []
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    step = engine.step

    def watched(*args: Any, **kwargs: Any) -> Any:
        done = step(*args, **kwargs)
        held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        return done

    engine.step = watched
    return held


def _watch_preemptions(llm: Any) -> list[str]:
    """Record preempted requests."""
    scheduler, names = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = watched
    return names


def _watch_parts(parts: dict[str, Any]) -> None:
    """Record milliseconds of a turn's parts, and whether the episode changes."""
    from vllm_kvplugins.episodes.routing import EpisodeRouter
    from vllm_kvplugins.sessions.transfer import Transfer

    route, restore = EpisodeRouter.route, Transfer.restore

    def routed(self: Any, *args: Any) -> Any:
        values = route(self, *args)
        if values is not None:
            parts["encode_ms"], parts["match_ms"] = values.encode_ms, values.match_ms
            parts["switched"] = values.switched
        return values

    def restored(self: Any, *args: Any) -> None:
        with _timed(lambda took: parts.update(restore_ms=took)):
            restore(self, *args)

    EpisodeRouter.route, Transfer.restore = routed, restored  # type: ignore[method-assign]


@contextmanager
def _timed(say: Callable[[float], Any]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    say((time.perf_counter() - began) * 1e3)


# -- tables ----------------------------------------------------------------------------


def middle(rows: list[dict[str, Any]], name: str) -> str:
    """Median (min..max) of a column."""
    values = sorted(row[name] for row in rows if row.get(name) is not None)
    if not values:
        return ""
    return f"{median(values):.1f} ({values[0]:.1f}..{values[-1]:.1f})"


def lines_of(history_tokens: int, budget: int, rows: list[dict[str, Any]]) -> Iterator:
    """Table lines: reading, turns in the same episode, and turns that switch."""
    later = rows[1:]
    kinds = {
        "reads": rows[:1],
        "stays": [r for r in later if not r.get("switched")],
        "switches": [r for r in later if r.get("switched")],
    }
    for kind, values in kinds.items():
        if values:
            yield [
                str(history_tokens),
                str(budget or "full"),
                kind,
                str(len(values)),
                str(max(row["held_blocks"] for row in values)),
                str(values[-1]["preemptions"]),
                middle(values, "wall_ms"),
                middle(values, "cpu_ms"),
                *(middle(values, f"{p}_ms") for p in ("encode", "match", "restore")),
            ]


def main(
    model: Annotated[str, typer.Argument()] = "",
    path: Annotated[str, typer.Argument(help="a file of LoCoMo")] = "",
    dialogue: int = 0,
    history_tokens: Annotated[list[int] | None, typer.Option()] = None,
    budget: Annotated[list[int] | None, typer.Option(help="0: stock")] = None,
    block: int = 512,
    turns: int = 12,
    answer_tokens: int = 10,
    read: Annotated[
        str, typer.Option(help=f"{EVERY}: for all episodes; {ASKED}: for one")
    ] = EVERY,
    park: Annotated[
        bool, typer.Option(help="keep finished requests' blocks on the device")
    ] = True,
    dtype: str = "bfloat16",
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure one conversation per length and budget."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if child:
        child_fields, fields = json.loads(child)
        run_engine(Setting(Dialogue(**child_fields), **fields))
        return
    if not model or not path:
        raise typer.BadParameter("give a MODEL and a file of LoCoMo")
    if read not in (EVERY, ASKED):
        raise typer.BadParameter(f"--read {read}: give {EVERY} or {ASKED}")
    console = Console(width=200)
    table = Table("history", "M", "turns", "n", "blocks held at most")
    columns = (
        "preemptions",
        "wall ms",
        "CPU ms",
        "encode ms",
        "match ms",
        "restore ms",
    )
    for column in columns:
        table.add_column(column)
    for tokens in history_tokens or [2000, 4000, 6000]:
        for size in budget or [1024]:
            about = Dialogue(model, path, dialogue, tokens, turns, dtype)
            fields = {"budget": size, "block": block, "answer_tokens": answer_tokens}
            fields |= {"read": read, "park": park}
            request = json.dumps([asdict(about), fields])
            rows = list(child_rows(__file__, request, f"{tokens} tokens, M {size}"))
            for line in lines_of(tokens, size, rows):
                table.add_row(*line)
                console.print(*line)
    console.print(table)
    console.print_json(data=provenance())


if __name__ == "__main__":
    typer.run(main)
