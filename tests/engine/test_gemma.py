"""Gemma-3-270m, whose 3 full-attention layers of 18 a policy manages.

Its weights are no part of this repository: set ``KVP_GEMMA_MODEL`` to its folder.
"""

from __future__ import annotations

import os

import pytest
from harness import run_scenario
from kept_positions import agreement

MODEL = os.environ.get("KVP_GEMMA_MODEL", "")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not MODEL, reason="KVP_GEMMA_MODEL names no folder"),
]
SEED = 17
WINDOW = 64  # SnapKV's queries
SCORED = {
    "snapkv": {"name": "snapkv", "budget": 256, "window": WINDOW},
    "keydiff": {"name": "keydiff", "budget": 256},
    "knorm": {"name": "knorm", "budget": 256},
}
# The five systems, each with less than the prompt. IceCache's default keeps two whole
# layers, of three.
SYSTEMS = {
    "stock": None,
    "icecache": {"name": "icecache", "budget": 64, "skip_layers": 0},
    "sekv": {"name": "sekv", "budget": 256},
    "protokv": {"name": "protokv", "budget": 256},
    "flowkv": {"name": "flowkv", "ratio": 0.5, "sessions": False},
    "epicache": {
        "name": "epicache",
        "budget": 128,
        "prefill_block": 128,
        "sessions": False,
    },
}
LENGTHS = [600, 1200]  # stock finds the key in both


def test_keeping_everything_is_stock():
    """Alone, together, after prefix hits and after preemptions."""
    arguments = {"model": MODEL, "policy": {"name": "full"}}
    run = run_scenario("scenarios_hybrids:traffic", arguments, timeout=1700)
    off: dict[str, str | None] = {"VLLM_PLUGINS": ""}
    arguments["policy"] = None
    stock = run_scenario("scenarios_hybrids:traffic", arguments, off, timeout=1700)
    assert run["preemptions"] == stock["preemptions"] == 4
    for what in ("alone", "together", "hits", "misses", "preempted", "cached"):
        assert run[what] == stock[what], what
    assert run["left_behind"] == {"tracked": 0, "held": 0, "missing": 0}


@pytest.mark.parametrize("name", ["snapkv", "icecache"])
def test_random_traffic_leaks_nothing_and_changes_no_token(name):
    budgets = {"snapkv": {"budget": 96}, "icecache": {"budget": 32, "skip_layers": 0}}
    counts = run_scenario(
        "scenarios_fuzz:fuzz",
        {
            "model": MODEL,
            "policy": {"name": name, **budgets[name]},
            "seed": SEED,
            "rounds": 200,
            # 25 blocks of the longest request, and 21 in each of five windows
            "blocks": 150,
            "compares_preempted": name != "icecache",
        },
        timeout=3500,
    )
    print(counts)
    for event in ("requests", "hits", "compared", "compactions"):
        assert counts[event] > 0, counts
    assert counts["differed"] == 0


@pytest.mark.parametrize("name", SCORED)
def test_kept_positions_are_those_of_transformers(name):
    print("seed", SEED)
    runs = run_scenario(
        "scenarios_gemma:kept_and_wanted",
        {"model": MODEL, "policy": SCORED[name], "seed": SEED, "lengths": [701, 1333]},
        timeout=900,
    )
    for length, run in runs.items():
        window = WINDOW if name == "snapkv" else 0
        agree = agreement(run["kept"], run["scores"], int(length), 0, window)
        print(name, length, f"agreement {agree:.4f}")
        assert len(run["kept"]) == 3
        assert agree >= 0.99


@pytest.mark.parametrize("name", SYSTEMS)
def test_pass_keys_are_found(name):
    run = run_scenario(
        "scenarios_gemma:pass_keys",
        {"model": MODEL, "policy": SYSTEMS[name], "lengths": LENGTHS, "depths": 5},
        timeout=900,
    )
    print(name, run)
    for length, result in run.items():
        # FlowKV compresses the text before it sees the question.
        expected = {"flowkv": 0, "protokv": 4, "epicache": 4}.get(name, 5)
        assert result["found"] >= expected
        assert (result["held"] < int(length) - 100) == (name != "stock")
