"""What compression adds to prefill, measured in the running engine.

Prefills the same prompts on one engine per policy, in turns. Reports the seconds that
the plugin spends on scoring, selecting and moving pages (its ``compression_seconds``
metric) as a share of prefill.
"""

from __future__ import annotations

import json
import statistics
from typing import Annotated

import _path  # noqa: F401
import typer
from _engine import EngineProcess, provenance, synthetic_prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table


def main(
    model: str,
    policies: Annotated[list[str], typer.Argument(help="names, or JSON objects")],
    prompt_tokens: int = 4096,
    rounds: int = 5,
    dtype: str = "bfloat16",
    budget: int = 512,
) -> None:
    """Prefill ``rounds`` prompts on each engine in turns."""
    console = Console()
    chosen = [
        json.loads(p) if p.startswith("{") else {"name": p, "budget": budget}
        for p in policies
    ]
    engines = [
        EngineProcess(
            policy,
            model=model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=8192,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
        )
        for policy in chosen
    ]
    shares: list[list[float]] = [[] for _ in engines]
    spent: list[list[float]] = [[] for _ in engines]
    try:
        for turn in track(range(rounds + 1), "interleaved prefills", console=console):
            for i, engine in enumerate(engines):
                prompt = synthetic_prompt(40000, prompt_tokens, turn)
                before = engine.ask("drain")["compression_s"]
                engine.ask("add", prompts=[prompt], max_tokens=2)
                steps = engine.ask("prefill")["steps"]
                seconds = engine.ask("drain")["compression_s"] - before
                prefill = sum(step[0] for step in steps) / 1e3
                if turn:  # the first round warms up
                    shares[i].append(100 * seconds / (prefill - seconds))
                    spent[i].append(1e3 * seconds)
    finally:
        for engine in engines:
            engine.close()
    table = Table("policy", "compression ms", "min..max", "% of prefill", "min..max")
    for policy, ms, share in zip(chosen, spent, shares, strict=True):
        table.add_row(
            policy["name"],
            f"{statistics.median(ms):.0f}",
            f"{min(ms):.0f}..{max(ms):.0f}",
            f"{statistics.median(share):.2f}",
            f"{min(share):.2f}..{max(share):.2f}",
        )
    console.print(table)
    console.print_json(data=provenance())


if __name__ == "__main__":
    typer.run(main)
