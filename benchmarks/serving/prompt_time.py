"""Time to the first and to the second token: a policy against stock vLLM.

Both engines get the same prompts in turns, one request at a time. A policy's work at
the prompt's end can delay the first or the second token. For policies that decompose
spans, also reports the CPU time of the thread that does so during decoding.

    python benchmarks/serving/prompt_time.py MODEL --policy sekv --tokens 4000
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import EngineProcess, provenance, synthetic_prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table


def main(
    model: str,
    policy: str = "sekv",
    config: Annotated[str, typer.Option(help="JSON")] = '{"budget": 0.1}',
    tokens: int = 4000,
    chunk: Annotated[int, typer.Option(help="maximum tokens per step")] = 2048,
    answer_tokens: int = 8,
    rounds: int = 7,
    dtype: str = "bfloat16",
    pool_tokens: Annotated[
        int, typer.Option(help="pool of the policy's engine; 0: the same as stock's")
    ] = 0,
    json_out: Path | None = None,
) -> None:
    """Send ``rounds`` prompts to each engine."""
    console = Console(width=120)
    engine = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": tokens + answer_tokens + 64,
        "max_num_batched_tokens": chunk,
        "kv_cache_memory_bytes": 1 << 30,
        "enable_prefix_caching": False,
        "block_size": 32,
    }
    chosen = {"name": policy, **json.loads(config)}
    small = {}
    if pool_tokens:
        small = {"num_gpu_blocks_override": pool_tokens // engine["block_size"] + 1}
    engines = [EngineProcess(None, **engine), EngineProcess(chosen, **engine, **small)]
    rows: list[list[dict[str, Any]]] = [[], []]
    try:
        for number in track(range(rounds + 1), "rounds", console=console):
            prompt = synthetic_prompt(40000, tokens, number)
            for each, times in zip(engines, rows, strict=True):
                times.append(
                    each.ask(
                        "turn", prompt=prompt, turn_ends=[], max_tokens=answer_tokens
                    )
                )
    finally:
        for each in engines:
            each.close()
    rows = [times[1:] for times in rows]  # the first round warms up
    report(console, [each.name for each in engines], rows)
    console.print_json(data=provenance())
    if json_out is not None:
        json_out.write_text(json.dumps({"rows": rows, **provenance()}, indent=1))


def spread(values: list[float], digits: int = 0) -> str:
    """Median and range."""
    low, mid, high = min(values), median(values), max(values)
    return f"{mid:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def report(
    console: Console, names: list[str], rows: list[list[dict[str, Any]]]
) -> None:
    """Print token times, and ratios of paired prompts."""
    table = Table("", *names, f"{names[1]} / {names[0]}, pairs")
    for kind, key in (("wall", "token_ms"), ("CPU", "token_cpu_ms")):
        for number, label in enumerate(("first", "second")):
            columns = [[row[key][number] for row in times] for times in rows]
            ratios = [b / a for a, b in zip(*columns, strict=True)]
            table.add_row(
                f"{label} token, {kind} ms",
                *map(spread, columns),
                spread(ratios, 2),
            )
    prefill = [row["token_cpu_ms"][0] for row in rows[0]]
    decomposed = [row["decompose_cpu_ms"] for row in rows[1]]
    shares = [100 * d / p for d, p in zip(decomposed, prefill, strict=True)]
    table.add_row("decomposing, CPU ms", "", spread(decomposed), "")
    table.add_row(f"as a share of {names[0]}'s first token, %", "", spread(shares), "")
    same = [a["answer"][0] == b["answer"][0] for a, b in zip(*rows, strict=True)]
    table.add_row("same first token, prompts", "", f"{sum(same)} of {len(same)}", "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
