"""The search for the highest rate at a service level."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import benchmark_serving
import pytest
from _serving_agents import AgentLoad
from _serving_bench import BenchLoad
from _serving_bytes import compared_bytes
from _serving_chat import ChatLoad
from _serving_metrics import Slo
from _serving_report import table_of_rates
from _serving_rows import Cell, Pool, cells_of, read_rows
from _serving_sweep import (
    LARGEST_FACTOR,
    Sweep,
    highest_passed,
    highest_rates,
    next_index,
    share_within_limits,
)
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

POOL = Pool("/m", 320, 32, 4096, "auto", True, True)
COMPARISON = benchmark_serving.Comparison(
    pool=POOL,
    chat=ChatLoad(3, 2, 0.01, 5, 3, 8),
    agents=AgentLoad(3, 2, 0.01, 5, 3, 8),
    random=BenchLoad(6, 8, 8),
    slo=Slo(1000.0, 1000.0),
    seed=7,
    request_timeout_s=20.0,
    start_timeout_s=20.0,
)
SNAPKV = {"name": "snapkv"}
SWEEP = Sweep(1.0, 0.9)


@given(limit=st.integers(-40, 40))
def test_the_search_ends_at_the_highest_rate_of_the_grid(limit):
    passed: dict[int, bool] = {}
    while (index := next_index(passed)) is not None:
        assert index not in passed
        passed[index] = index <= limit
    assert len(passed) <= 10
    if -22 <= limit <= 22:
        assert highest_passed(passed) == (limit, limit + 1)
    assert all(
        1 / LARGEST_FACTOR <= SWEEP.rate(index) <= LARGEST_FACTOR for index in passed
    )


def test_a_rate_above_a_failed_one_does_not_count():
    assert highest_passed({0: True, 4: False, 8: True}) == (0, 4)


def figures(rate: float, limit: float) -> dict[str, Any]:
    """20 requests in 10 s; half of them are too late above the limit."""
    good = 20 if rate <= limit else 10
    return {
        "completed": 20,
        "failed": 0,
        "duration_s": 10.0,
        "goodput_per_min": 6.0 * good,
        "p50_ttft_ms": 1.0,
        "output_throughput_tokens_per_s": 1.0,
    }


def test_failed_requests_are_outside_the_limits():
    row = figures(1.0, 2.0) | {"failed": 20}
    assert share_within_limits(row) == pytest.approx(0.5)


def test_each_policy_is_searched_once(tmp_path, monkeypatch):
    limits = {"stock": 1.5, "snapkv": 4.0}
    started: list[list[str]] = []
    measured: list[Cell] = []

    @contextmanager
    def serving(arguments, timeout_s, env):
        started.append(arguments)
        yield SimpleNamespace(url="", start_s=1.0)

    def measure(server, comparison, cell, keep):
        measured.append(cell)
        return {"figures": figures(cell.rate, limits[cell.label])}

    monkeypatch.setattr(benchmark_serving, "serving", serving)
    monkeypatch.setattr(benchmark_serving, "warm_up", lambda *_: None)
    monkeypatch.setattr(benchmark_serving, "measure", measure)
    servers = cells_of([{}, SNAPKV], ["random"], [SWEEP.start], 2)
    out, lines = tmp_path / "rows.jsonl", list[str]()
    arguments = (COMPARISON, servers, out, lines.append, SWEEP)
    assert benchmark_serving.run_all(*arguments) == []
    assert len(started) == 4
    rows = list(read_rows(out).values())
    assert len(rows) == len(measured)

    stock, snapkv = highest_rates(rows, SWEEP.share)
    # Rates of the grid: 1, 1.19, 1.41, 1.68, 2, …
    assert stock["rates_per_s"] == [pytest.approx(2**0.5, abs=1e-6)] * 2
    assert snapkv["rates_per_s"] == [4.0, 4.0]
    assert not stock["is_bound"]
    assert not snapkv["is_bound"]
    assert snapkv["vs_stock"] == pytest.approx([4 / 2**0.5] * 2, rel=1e-5)
    console = Console(width=120, record=True)
    console.print(table_of_rates([stock, snapkv], compared_bytes(rows)))
    assert "×2.83 (2.83..2.83)" in console.export_text()

    lines_of_file = out.read_text().splitlines(keepends=True)
    out.write_text("".join(lines_of_file[:-1]))
    count = len(measured)
    benchmark_serving.run_all(*arguments)
    assert len(started) == 5, "only the last search goes on"
    assert len(measured) == count + 1


def test_rates_stand_next_to_the_answers_of_the_same_runs():
    rows = [
        {
            "policy": policy,
            "workload": "dataset",
            "rate": rate,
            "repetition": 0,
            "settings": {},
            "figures": figures(rate, 1.5) | {"answered_share": share},
        }
        for policy, shares in (({}, (1.0, 0.8)), (SNAPKV, (0.5, 0.4)))
        for rate, share in zip((1.0, 2.0), shares, strict=True)
    ]
    stock, snapkv = highest_rates(rows, 0.9)
    assert stock["answered_share"] == pytest.approx(0.9)
    assert snapkv["answers"] == 40
    assert snapkv["answered_vs_stock"] == pytest.approx(0.5)


def test_rates_that_all_pass_are_a_bound():
    rows = [
        {
            "policy": {},
            "workload": "random",
            "rate": rate,
            "repetition": 0,
            "settings": {},
            "figures": figures(rate, 9.0),
        }
        for rate in (1.0, 2.0)
    ]
    (record,) = highest_rates(rows, 0.9)
    assert record["is_bound"]
    assert record["median"] == 2.0
    assert record["vs_stock"] == [1.0]
