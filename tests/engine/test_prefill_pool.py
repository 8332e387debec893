"""With ``prefill_block`` a prompt needs no more blocks than budget plus block."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import runners
from harness import run_scenario

pytestmark = pytest.mark.engine

BLOCK = 32
POLICY = {"name": "snapkv", "budget": 512, "prefill_block": 512}
POOL = 2048 // BLOCK + 1  # including the null block
BOUND = 1024 // BLOCK + 1  # budget, block, and the partial block
# The longest answer to 6144 tokens that fits: 512 of these stay, and 1536 of its own.
LONGEST = {False: 1537, True: 1505}
ALONE, LONGER, TOGETHER = range(3)


@functools.cache
def found(model: str, asynchronous: bool) -> dict[str, Any]:
    longest = LONGEST[asynchronous]
    result: dict[str, Any] = run_scenario(
        "scenarios_blocks:pools",
        {
            "model": model,
            "policy": POLICY,
            "small": POOL,
            "groups": [[6144], [7003], [5000, 4901, 4802]],
            "fits": (6144, longest) if asynchronous else None,
            "refused": (6144, longest + 1),
            "large": None if asynchronous else 700,
        },
        runners.environment(runners.CHOSEN, asynchronous),
    )
    kind = "KVPolicyAsyncScheduler" if asynchronous else "KVPolicyScheduler"
    assert result["scheduler"] == kind
    assert result["steps_in_flight"] == (2 if asynchronous else 1)
    return result


both = pytest.mark.parametrize(
    "asynchronous",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["sync", "async"],
)


@both
def test_no_moment_holds_more_than_budget_and_block(tiny_model, asynchronous):
    run = found(tiny_model, asynchronous)
    pools = ["small"] if asynchronous else ["small", "large"]
    for group in (ALONE, LONGER):
        for pool in pools:
            trace = run[pool][group]["in_use"]
            assert max(trace) <= BOUND, trace
            assert max(trace) >= BOUND - 1, "the bound was not reached"
    # 1024 tokens, then every 512: the last of 12 blocks ends with the prompt
    assert run["small"][ALONE]["compactions"] == 6144 // 512 - 1


@both
def test_a_prompt_of_7000_tokens_runs_in_a_pool_of_2048(tiny_model, asynchronous):
    small = found(tiny_model, asynchronous)["small"][LONGER]
    large = found(tiny_model, False)["large"][LONGER]
    assert small["tokens"] == large["tokens"]
    assert len(small["tokens"]["7003"]) == 40
    assert small["preemptions"] == 0


@both
def test_a_third_long_prompt_waits_for_one_of_two(tiny_model, asynchronous):
    """Three at once would preempt each other at every block."""
    small = found(tiny_model, asynchronous)["small"][TOGETHER]
    large = found(tiny_model, False)["large"][TOGETHER]
    assert small["tokens"] == large["tokens"]
    assert small["preemptions"] == 0
    assert max(small["in_use"]) <= POOL - 1
    assert max(small["in_use"]) > BOUND, "two requests ran at once"
    assert max(large["in_use"]) > 2 * BOUND, "a large pool takes all three"


@both
def test_what_just_fits_runs_and_one_token_more_is_refused(tiny_model, asynchronous):
    run = found(tiny_model, asynchronous)
    if asynchronous:  # the harder case: a step in flight still holds its pages
        assert len(run["full"]["tokens"]["6144"]) == LONGEST[asynchronous]
        assert run["full"]["preemptions"] == 0
    assert "max_tokens" in run["refusal"]
    assert f"the pool has {POOL - 1}" in run["refusal"]


@pytest.mark.slow
def test_the_front_end_knows_the_pool_of_another_process(tiny_model):
    run = run_scenario(
        "scenarios_blocks:refused_elsewhere",
        {"model": tiny_model, "policy": POLICY, "small": POOL},
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert run["client"] == "SyncMPClient"
    assert f"the pool has {POOL - 1}" in run["refusal"]
    assert run["generated"] == 8, "the engine goes on"
