"""The metrics agree with the block pool, during a request and after it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine

BLOCK, PROMPT, BUDGET = 32, 2900, 512
POLICY = {"name": "snapkv", "budget": BUDGET}


@functools.cache
def reclaim(model: str) -> dict[str, Any]:
    result: dict[str, Any] = run_scenario(
        "scenarios_tiny:observe_reclaim", {"model": model, "policy": POLICY}
    )
    return result


def test_counters_tell_the_compaction_before_the_request_ends(tiny_model):
    run = reclaim(tiny_model)
    retained = -(-(BUDGET - PROMPT % BLOCK) // BLOCK)
    while_decoding = run["steps"][0]["metrics"]
    assert while_decoding["blocks_freed"] == PROMPT // BLOCK - retained
    assert while_decoding["compressions"] == 1
    assert while_decoding["compression_seconds"] >= 1, "observations, not seconds"


def test_gauges_follow_the_pool(tiny_model):
    run = reclaim(tiny_model)
    for step in run["steps"]:
        resident = step["held"] * BLOCK
        logical = -(-step["computed"] // BLOCK) * BLOCK
        assert step["metrics"]["resident_tokens"] == resident, step
        assert step["metrics"]["budget_ratio"] == pytest.approx(resident / logical)


def test_gauges_return_to_rest_and_counters_stay(tiny_model):
    run = reclaim(tiny_model)
    after, during = run["metrics_after"], run["steps"][-1]["metrics"]
    assert after["resident_tokens"] == 0
    assert after["budget_ratio"] == 1
    for name in ("blocks_freed", "compressions", "compression_seconds"):
        assert after[name] == during[name] > 0


def test_device_memory_outside_the_pool_is_reported(tiny_model):
    run = reclaim(tiny_model)
    values = [step["metrics"]["device_table_bytes"] for step in run["steps"]]
    assert all(value > 0 for value in values)
    assert run["steps"][-1]["metrics"]["host_bytes"] == 0, "nothing is on the host"
