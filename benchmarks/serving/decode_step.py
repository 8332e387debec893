"""Decode step: a policy against stock vLLM, interleaved in one run.

Both engines hold the same prompts and alternate after a few decode steps. Reports the
median and spread of wall and CPU time per step, their ratio per turn, means over all
steps, what a compaction adds to a step, and the lower bound of a step: weights plus KV
bytes that it reads.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated

import _path  # noqa: F401
import typer
from _engine import EngineProcess, provenance, synthetic_prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table


def main(
    model: str,
    policy: str = "snapkv",
    config: Annotated[str, typer.Option(help="JSON")] = '{"budget": 512}',
    prompt_tokens: int = 6000,
    requests: int = 4,
    rounds: int = 9,
    steps: int = 8,
    dtype: str = "bfloat16",
    json_out: Path | None = None,
) -> None:
    """Run ``rounds`` turns of ``steps`` decode steps on each engine."""
    console = Console()
    engine = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": max(8192, prompt_tokens + rounds * steps + 64),
        "max_num_seqs": requests,
        "kv_cache_memory_bytes": 2 << 30,
        "enable_prefix_caching": False,
        "block_size": 32,
    }
    chosen = {"name": policy, **json.loads(config)}
    engines = [EngineProcess(None, **engine), EngineProcess(chosen, **engine)]
    try:
        pools = []
        for each in engines:
            prompts = [
                synthetic_prompt(40000, prompt_tokens, i) for i in range(requests)
            ]
            each.ask("add", prompts=prompts, max_tokens=rounds * steps + 64)
            with console.status(f"prefill {requests} x {prompt_tokens} on {each.name}"):
                each.ask("prefill")
            each.ask("steps", count=4)
            pools.append(each.ask("steps", count=1)["held_blocks"])
        turns: list[list[list[list[float]]]] = [[], []]
        for _ in track(range(rounds), "interleaved rounds", console=console):
            for i, each in enumerate(engines):
                turns[i].append(each.ask("steps", count=steps)["steps"])
        parts = [each.ask("profile", count=4) for each in engines]
    finally:
        for each in engines:
            each.close()
    report(console, engines, turns, pools, parts, model, json_out)


def report(console, engines, turns, pools, parts, model, json_out) -> None:  # type: ignore[no-untyped-def]
    """Print the table: medians over turns and ratios of paired turns."""
    medians = [
        [
            [statistics.median(step[k] for step in turn) for turn in engine_turns]
            for k in (0, 1)
        ]
        for engine_turns in turns
    ]
    table = Table("engine", "wall ms/step", "min..max", "CPU ms/step", "blocks held")
    for each, (wall, cpu), held in zip(engines, medians, pools, strict=True):
        table.add_row(
            each.name,
            f"{statistics.median(wall):.1f}",
            f"{min(wall):.1f}..{max(wall):.1f}",
            f"{statistics.median(cpu):.1f}",
            str(held),
        )
    console.print(table)
    ratios = {
        kind: sorted(a / b for a, b in zip(medians[0][k], medians[1][k], strict=True))
        for k, kind in enumerate(("wall", "cpu"))
    }
    for kind, values in ratios.items():
        console.print(
            f"stock / {engines[1].name}, {kind}: median "
            f"{statistics.median(values):.2f} ({values[0]:.2f}..{values[-1]:.2f})"
        )
    report_all_steps(console, engines, turns)
    split = Table("engine", *parts[-1], title="ms per step, by profiler")
    for each, spent in zip(engines, parts, strict=True):
        split.add_row(each.name, *(f"{spent.get(part, 0.0):.1f}" for part in parts[-1]))
    console.print(split)
    weights = sum(f.stat().st_size for f in Path(model).glob("*.safetensors"))
    console.print(
        f"weights read per step: {weights / 1e6:.0f} MB as stored; the step cannot "
        "be faster than reading them"
    )
    record = provenance() | {"turns": turns, "ratios": ratios, "held_blocks": pools}
    record["parts"] = parts
    console.print_json(data={k: record[k] for k in provenance()})
    if json_out:
        json_out.write_text(json.dumps(record, indent=1))


def report_all_steps(console, engines, turns) -> None:  # type: ignore[no-untyped-def]
    """Print means over all steps, and what compactions add; medians hide both."""
    means = []
    for each, engine_turns in zip(engines, turns, strict=True):
        steps = [step for turn in engine_turns for step in turn]
        wall, cpu = (statistics.mean(step[k] for step in steps) for k in (0, 1))
        means.append((wall, cpu))
        console.print(f"{each.name}, all steps: mean wall {wall:.1f}, CPU {cpu:.1f} ms")
        compacting = [step[0] for step in steps if step[2]]
        if compacting:
            others = statistics.median(step[0] for step in steps if not step[2])
            added = sorted(wall - others for wall in compacting)
            console.print(
                f"{each.name}: {len(added)} of {len(steps)} steps compact and take "
                f"{statistics.median(added):.1f} ms ({added[0]:.1f}..{added[-1]:.1f}) "
                "more than the median of the others"
            )
    (wall, cpu), (own_wall, own_cpu) = means
    console.print(
        f"stock / {engines[1].name}, means: wall {wall / own_wall:.2f}, "
        f"CPU {cpu / own_cpu:.2f}"
    )


if __name__ == "__main__":
    typer.run(main)
