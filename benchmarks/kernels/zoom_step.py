"""CPU time of sekv's decode step per layer, without a model.

Requests with random clustered keys have finished prefill. Every step sends queries that
drift. Reports the total per layer and its parts:

    route        the policy's gates, and the choice of spans that fit
    fetch        waiting for factors, which another thread makes after prefill
    reconstruct  tokens of newly zoomed spans, into entries
    attend       pages, means and zoomed tokens in one softmax
    rest         Python and small torch calls

The decision and the reconstruction are one compiled call. The benchmark repeats it with
the same gates, which changes nothing: the second call's time counts as route, the
difference as reconstruct. The second call is not part of the total.

    OMP_NUM_THREADS=1 python benchmarks/kernels/zoom_step.py --requests 4 --tokens 4000
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import _path  # noqa: F401
import torch
import typer
from _engine import provenance
from _prepared_worker import GROUP, prepare
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.engine.spans import controller


def cpu_ms() -> float:
    """CPU time of this thread; excludes other processes and the decomposing thread."""
    return 1e3 * time.thread_time()


class Clocks:
    """Milliseconds spent in calls, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began, wall = cpu_ms(), time.perf_counter()
            result = call(*arguments)
            self.spent[name] += cpu_ms() - began
            self.spent[f"{name}, wall"] += 1e3 * (time.perf_counter() - wall)
            return result

        return timed

    def twice(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Time a call that does nothing the second time."""

        def timed(*arguments: Any) -> Any:
            began = cpu_ms()
            result = call(*arguments)
            between = cpu_ms()
            again = call(*arguments)
            second = cpu_ms() - between
            assert again[0] == 0, "made again"
            self.spent["route"] += second
            self.spent["reconstruct"] += between - began - second
            self.spent["not part of it"] += second
            self.spent["tokens made"] += result[0]
            return result

        return timed


class Losses:
    """A model that returns random surprisals."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)

    def states(self, first: int, count: int) -> torch.Tensor:
        return torch.empty(count, 0)

    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -3 * torch.rand(len(targets), generator=self._random).log()


def main(
    config: Annotated[str, typer.Option(help="JSON")] = '{"budget": 0.1}',
    requests: int = 4,
    tokens: int = 4000,
    layers: int = 6,
    heads: int = 3,
    dim: int = 64,
    steps: int = 60,
    drift: Annotated[
        float, typer.Option(help="share of a query that changes per step")
    ] = 0.3,
    json_out: Path | None = None,
) -> None:
    """Time ``steps`` decode steps."""
    console = Console()
    with console.status("prompts"):
        chosen = {"name": "sekv", **json.loads(config)}
        shape = requests, tokens, layers, heads, dim
        runtime, rows, lengths, table = prepare(chosen, *shape, Losses())
    (spans_controller,) = runtime.extensions
    assert isinstance(spans_controller, controller.SpanController)
    clocks, measured = Clocks(), defaultdict(list)
    gates = clocks.around("route", spans_controller.policy.gates)
    fetch = clocks.around("fetch", spans_controller._factors)
    attend = clocks.around("attend", controller.attend_mixed)
    zoom = clocks.twice(controller.zoom_spans)
    random = torch.Generator().manual_seed(1)
    shape = (layers, requests, heads * GROUP, dim)
    queries = torch.randn(shape, generator=random)
    with (
        mock.patch.object(type(spans_controller.policy), "gates", staticmethod(gates)),
        mock.patch.object(spans_controller, "_factors", fetch),
        mock.patch.object(controller, "attend_mixed", attend),
        mock.patch.object(controller, "zoom_spans", zoom),
    ):
        for _ in range(steps):
            fresh = torch.randn(shape, generator=random)
            queries = (1 - drift**2) ** 0.5 * queries + drift * fresh
            flat = runtime.begin_step(rows, lengths, table)
            clocks.spent.clear()
            asking = queries.bfloat16()
            output = torch.empty(requests, heads * GROUP * dim, dtype=torch.bfloat16)
            began = cpu_ms()
            for layer in range(layers):
                spans_controller.attend(
                    layer, asking[layer], flat.pages[0], flat.lengths[0], output
                )
            spent = {"all": cpu_ms() - began}
            spent["all"] -= clocks.spent.pop("not part of it")
            spent |= clocks.spent
            parts = ("route", "fetch", "reconstruct", "attend")
            spent["rest"] = spent["all"] - sum(spent[part] for part in parts)
            for name, value in spent.items():
                measured[name].append(value / layers)
            runtime.end_step()
    spans_controller.check_integrity()
    report(console, measured)
    console.print_json(data=provenance())
    if json_out is not None:
        record = {"per_layer": measured, **provenance()}
        json_out.write_text(json.dumps(record, indent=1))


def report(console: Console, measured: dict[str, list[float]]) -> None:
    """Print medians and spread; the first step, which zooms most spans, separately."""
    table = Table(
        "per layer", "first step", "median of others", "10th..90th percentile"
    )
    for name in ("all", "route", "fetch", "reconstruct", "attend", "rest"):
        values = measured[name][1:]
        tenths = statistics.quantiles(values, n=10)
        table.add_row(
            f"{name}, ms",
            f"{measured[name][0]:.3f}",
            f"{statistics.median(values):.3f}",
            f"{tenths[0]:.3f}..{tenths[-1]:.3f}",
        )
    tokens_made = measured["tokens made"]
    median = statistics.median(tokens_made[1:])
    table.add_row("tokens made", f"{tokens_made[0]:.0f}", f"{median:.1f}", "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
