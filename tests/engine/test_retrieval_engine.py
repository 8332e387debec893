"""Retrieval in a real engine: tokens, memory, and leaks."""

from __future__ import annotations

import pytest
from harness import INTERPRETED, run_scenario
from policy_settings import policies_that, retrieve

pytestmark = pytest.mark.engine

RETRIEVERS = policies_that(retrieve)
SMALL = {"skip_layers": 1, "sinks": 16, "window": 32}
LENGTHS = [100, 700, 1500]
ROUNDS, SAMPLES = (20, 3) if INTERPRETED else (40, 6)


@pytest.mark.proves(policy="name")
@pytest.mark.parametrize("name", RETRIEVERS)
def test_fetching_everything_is_stock(tiny_model, name):
    """With a budget above the context, all tokens are offloaded and fetched again."""
    arguments = {"model": tiny_model, "lengths": LENGTHS, "max_tokens": 60}
    stock = run_scenario("scenarios_tiny:answers", arguments | {"policy": None})
    policy = {"name": name, **SMALL, "budget": 1600}
    whole = run_scenario("scenarios_tiny:answers", arguments | {"policy": policy})
    assert whole["tokens"] == stock["tokens"]


def test_resident_memory_stays_flat(tiny_model):
    """One of two layers keeps everything, so that half of the generated tokens stay."""
    policy = {"name": "icecache", **SMALL, "budget": 64}
    steps = run_scenario(
        "scenarios_retrieval:held_while_generating",
        {"model": tiny_model, "policy": policy, "prompt": 1000, "max_tokens": 1500},
    )
    pages = -(-(16 + 64 + 32) // 32)
    for tokens, held in steps:
        full = tokens // 32
        allowed = (pages + full) / 2 + 2  # the tail, a block that becomes old, rounding
        assert held <= allowed, (tokens, held)
    assert steps[-1][0] > 2400


def test_requests_take_turns_in_a_small_host_tier(tiny_model):
    run = run_scenario(
        "scenarios_retrieval:turns",
        {
            "model": tiny_model,
            # one layer of two, 512 bytes per token, for at most two requests
            "policy": {"name": "quest", **SMALL, "budget": 64, "host_memory": "1MiB"},
            "lengths": [700, 710, 720, 730, 740],
            "max_tokens": 40,
        },
    )
    assert run["most_at_once"] == 2
    assert run["most_held"] == 3
    assert run["finished"] == 5
    assert run["reserved_after"] == run["held_after"] == 0
    assert "lower max_tokens" in run["refused"]


def test_traffic_leaves_nothing_behind(tiny_model):
    report = run_scenario(
        "scenarios_contract:traffic",
        {
            "model": tiny_model,
            "policies": {
                name: {"name": name, **SMALL, "budget": 64} for name in RETRIEVERS
            },
            "seed": 3,
            "rounds": ROUNDS,
            "samples": SAMPLES,
            "blocks": 40,
        },
    )
    for name, counts in report.items():
        assert "error" not in counts, (name, counts["error"])
        assert counts["compactions"] > ROUNDS / 2
        assert counts["aborts"] > ROUNDS / 13
