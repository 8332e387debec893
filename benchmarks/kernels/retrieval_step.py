"""Time of retrieval per layer of a decode step, without a model.

Requests with random clustered keys hold their tokens in a host tier, as after prefill.
Every step sends new queries. Reports, per layer, the total, the compiled parts (select,
fill), and the rest: Python and small torch calls. The rest should stay below 0.15 ms at
8 requests. Where whole pages are fetched, also what moving tokens to their pages takes,
which the first steps do.

    python benchmarks/kernels/retrieval_step.py --requests 8 --tokens 4000
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import _path  # noqa: F401
import torch
import typer
from _engine import provenance
from _prepared_worker import prepare
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.index import selection
from vllm_kvplugins.ops import hot_set


class Clock:
    """Milliseconds spent in compiled ops.

    Args:
        now: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.spent = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = self._now()
            result = call(*arguments)
            self.spent += 1e3 * (self._now() - began)
            return result

        return timed


def main(
    policy: str = "icecache",
    config: Annotated[str, typer.Option(help="JSON")] = '{"budget": 256}',
    requests: int = 8,
    tokens: int = 4000,
    layers: int = 6,
    heads: int = 3,
    dim: int = 64,
    steps: int = 40,
    cpu_time: Annotated[
        bool, typer.Option(help="of one thread, where other processes run too")
    ] = False,
    json_out: Path | None = None,
) -> None:
    """Time ``steps`` decode steps."""
    console = Console()
    chosen = {"name": policy, **json.loads(config)}
    with console.status("prompts"):
        runtime, rows, lengths, table = prepare(
            chosen, requests, tokens, layers, heads, dim
        )
    now = time.thread_time if cpu_time else time.perf_counter
    clocks = {"select": Clock(now), "fill": Clock(now)}
    moving = Clock(now)
    times: dict[str, list[float]] = {"all": [], "select": [], "fill": [], "rest": []}
    retrieving = layers - runtime.policy.skip_layers  # type: ignore[attr-defined]
    fill = clocks["fill"].around(hot_set.call_compiled)
    around = clocks["select"].around
    with ExitStack() as patches:
        for name in ("select_compiled", "select_pages_compiled"):
            timed = around(getattr(selection, name))
            patches.enter_context(mock.patch.object(selection, name, timed))
        patches.enter_context(mock.patch.object(hot_set, "call_compiled", fill))
        reorder = moving.around(HostTier.reorder)
        patches.enter_context(mock.patch.object(HostTier, "reorder", reorder))
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            queries = torch.randn(requests, heads * 3, dim, generator=generator)
            queries = queries.to(torch.bfloat16)
            runtime.begin_step(rows, lengths, table)
            for clock in clocks.values():
                clock.spent = 0.0
            began = now()
            for layer in range(layers):
                runtime.before_layer(layer, queries)
            spent = {"all": 1e3 * (now() - began)}
            spent |= {name: clock.spent for name, clock in clocks.items()}
            spent["rest"] = spent["all"] - spent["select"] - spent["fill"]
            for name, value in spent.items():
                times[name].append(value / retrieving)
    table_out = Table("per layer", "median ms", "10th..90th percentile")
    for name, values in times.items():
        tenths = statistics.quantiles(values, n=10)
        table_out.add_row(
            name,
            f"{statistics.median(values):.3f}",
            f"{tenths[0]:.3f}..{tenths[-1]:.3f}",
        )
    console.print(table_out)
    moved = runtime.extensions[0].moved_tokens  # type: ignore[attr-defined]
    if moved:
        console.print(
            f"moved {moved} tokens to their pages, {1e3 * moving.spent / moved:.3f} µs "
            "each"
        )
    console.print_json(data=provenance())
    if json_out is not None:
        json_out.write_text(
            json.dumps({"ms_per_layer": times, **provenance()}, indent=1)
        )


if __name__ == "__main__":
    typer.run(main)
