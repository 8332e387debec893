"""Retrieval with ``prefill_block``: long prompts in a small pool, nothing lost."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from harness import run_scenario
from policy_settings import policies_that, retrieve

pytestmark = pytest.mark.engine

RETRIEVERS = policies_that(retrieve)
BLOCK, POOL = 32, 1024 // 32 + 1
SMALL = {"skip_layers": 0, "sinks": 16, "window": 32, "budget": 64}
# sinks, budget and window; the block; the partial block
BOUND = 4 + 256 // BLOCK + 1
GROUPS, MORE = [[7500], [2900, 3100, 1500]], [40, 500]


@functools.cache
def found(model: str, name: str | None) -> list[dict[str, Any]]:
    policy = None
    if name is not None:
        policy = {"name": name, **SMALL, "prefill_block": 256, "sessions": True}
    result: list[dict[str, Any]] = run_scenario(
        "scenarios_retrieval:long_prompts",
        {
            "model": model,
            "policy": policy,
            "blocks": POOL if policy else 700,
            "groups": GROUPS,
            "more": MORE,
        },
    )
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name == "icecache" else pytest.param(name, marks=pytest.mark.slow)
        for name in RETRIEVERS
    ],
)
def test_a_small_pool_gives_the_first_token_of_stock(tiny_model, name):
    """Prompts of 1,500 to 8,000 tokens, alone and together, and later turns of their
    sessions, in a pool of 1,024 tokens.
    """
    stock, small = found(tiny_model, None), found(tiny_model, name)
    assert [len(run["logprobs"]) for run in small] == [1, 1, 1, 3, 3, 3]
    for expected, run in zip(stock, small, strict=True):
        for exact, got in zip(expected["logprobs"], run["logprobs"], strict=True):
            assert exact.keys() == got.keys()
            assert all(abs(exact[token] - got[token]) < 2e-4 for token in exact)
    for run in small[:3]:
        assert run["peak"] <= BOUND
    assert max(run["peak"] for run in small) <= POOL - 1
    assert min(small[1]["cached"] + small[2]["cached"]) > 7000, "sessions were not used"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"name": "icecache", "index": "dci"},
        {"name": "icecache", "fetch": "pages", "max_visits": 0},
        {"name": "quest"},
    ],
    ids=str,
)
def test_random_traffic_leaks_nothing_and_changes_no_token(tiny_model, more):
    """Prompts move to the host in blocks of 64 tokens, among other requests. Those that
    are preempted differ by design: their answers are read again as prompts. Codes round
    keys, so the last bits of a key, which depend on the batch, may change what they
    find: without codes, none is rounded.
    """
    policy = {**SMALL, "budget": 32, "prefill_block": 64} | more
    arguments = {
        "model": tiny_model,
        "policy": policy,
        "seed": 20261125,
        "rounds": 300,
        "blocks": 32,
        "compares_preempted": False,
    }
    counts = run_scenario("scenarios_fuzz:fuzz", arguments, timeout=1700)
    print(counts)
    assert counts["compared"] > 30
    assert counts["compactions"] > 300
    assert counts["preempted_compacted"] > 3
    assert counts["differed"] == 0, counts


@pytest.mark.slow
def test_pass_keys_in_a_pool_of_a_quarter_of_the_prompt(model_path):
    """Prompts of 4,000 tokens; the pool holds 1,056. The tree finds 18 keys here, and
    all of them if it gets the keys at once.
    """
    policy = {"name": "icecache", "budget": 64, "prefill_block": 512, "index": "codes"}
    arguments = {"model": model_path, "policy": policy, "tokens": 3900, "depths": 20}
    settings = {"max_model_len": 4608, "num_gpu_blocks_override": POOL + 1}
    settings["block_size"] = BLOCK
    found = run_scenario(
        "scenarios_retrieval:pass_keys", arguments | settings, timeout=1800
    )
    assert found == 20
