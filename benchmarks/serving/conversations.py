"""Conversations in a small pool: a policy against stock vLLM, same prompts and pool.

All conversations arrive at once; each has a prompt and a long answer. The pool holds a
fraction of what they need together, so stock vLLM queues or preempts (recomputes) some
of them. Reports the time to finish all, the number that run at a time, and preemptions.

    python benchmarks/serving/conversations.py MODEL --policy icecache \\
        --config '{"budget": 64}'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import EngineProcess, provenance, synthetic_prompt
from rich.console import Console
from rich.table import Table

BLOCK = 32


def run(
    model: str,
    policy: dict[str, Any] | None,
    blocks: int,
    conversations: int,
    prompt_tokens: int,
    answer_tokens: int,
) -> dict[str, Any]:
    """Run all conversations on one engine, after a short warm-up request."""
    engine = EngineProcess(
        policy,
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=prompt_tokens + answer_tokens,
        max_num_seqs=conversations,
        num_gpu_blocks_override=blocks,
        block_size=BLOCK,
        enable_prefix_caching=False,
    )
    try:
        engine.ask("add", prompts=[synthetic_prompt(40000, 64, 99)], max_tokens=8)
        engine.ask("run")
        prompts = [
            synthetic_prompt(40000, prompt_tokens, i) for i in range(conversations)
        ]
        engine.ask("add", prompts=prompts, max_tokens=answer_tokens)
        result: dict[str, Any] = engine.ask("run")
    finally:
        engine.close()
    return {"engine": engine.name} | result


def main(
    model: str,
    policy: str = "icecache",
    config: Annotated[str, typer.Option(help="JSON")] = '{"budget": 64}',
    conversations: int = 8,
    prompt_tokens: int = 1024,
    answer_tokens: int = 3072,
    share: Annotated[float, typer.Option(help="pool / full need")] = 1 / 8,
    repeats: int = 1,
    json_out: Path | None = None,
) -> None:
    """Run stock and the policy in turns, ``repeats`` times."""
    console = Console()
    need = conversations * (prompt_tokens + answer_tokens)
    blocks = round(need * share / BLOCK) + 1  # one more for vLLM's null block
    console.print(
        f"{conversations} conversations of {prompt_tokens} + {answer_tokens} tokens "
        f"in a pool of {blocks - 1} blocks ({share:.3f} of {need} tokens)"
    )
    chosen = {"name": policy, **json.loads(config)}
    result = []
    for _ in range(repeats):
        for each in (None, chosen):
            result.append(
                run(model, each, blocks, conversations, prompt_tokens, answer_tokens)
            )
            console.print(
                {key: value for key, value in result[-1].items() if key != "finished_s"}
            )
    table = Table("engine", "s", "CPU s", "steps", "running", "most", "preemptions")
    for row in result:
        table.add_row(
            row["engine"],
            f"{row['wall_s']:.0f}",
            f"{row['cpu_s']:.0f}",
            str(row["steps"]),
            f"{row['mean_running']:.1f}",
            str(row["most_running"]),
            str(int(row["preemptions"])),
        )
    console.print(table)
    ratios = [
        a["wall_s"] / b["wall_s"] for a, b in zip(*[iter(result)] * 2, strict=True)
    ]
    console.print(f"stock / {policy}: {', '.join(f'{r:.2f}' for r in ratios)}")
    console.print_json(data=provenance())
    if json_out is not None:
        json_out.write_text(json.dumps({"runs": result, **provenance()}, indent=1))


if __name__ == "__main__":
    typer.run(main)
