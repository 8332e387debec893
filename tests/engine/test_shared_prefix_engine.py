"""Shared prefixes in a real engine: exact, held once, found in the prefix cache."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from harness import run_scenario
from tiers import tiered

pytestmark = pytest.mark.engine

BLOCK = 32
PREFIX = 5 * BLOCK + 9  # tokens
SHARED = PREFIX // BLOCK
LENGTHS = [230, 301, 190, 256, 222, 340]  # tokens behind the prefix
BUDGET = 96
SNAPKV: dict[str, Any] = {"name": "snapkv", "budget": BUDGET, "window": 16}
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": SNAPKV,
    "cross-layer": SNAPKV | {"allocator": "cross-layer"},
    "h2o": {"name": "h2o", "budget": BUDGET},
    "decode": SNAPKV | {"decode_budget": 64, "fold_blocks": 1},
    "blocks": SNAPKV | {"prefill_block": 64},
    "everything": SNAPKV | {"budget": 4096},
}
QUICK = ("cross-layer", "h2o", "blocks")


@functools.cache
def seen(model: str, name: str | None) -> dict[str, Any]:
    policy = POLICIES[name] | {"shared_prefix": PREFIX} if name else None
    arguments = {
        "model": model,
        "policy": policy,
        "prefix": PREFIX,
        "lengths": LENGTHS,
        "max_tokens": 40,
    }
    result: dict[str, Any] = run_scenario("scenarios_shared_prefix:traffic", arguments)
    return result


@pytest.mark.parametrize("name", tiered(POLICIES, QUICK))
def test_answers_do_not_depend_on_who_computed_the_prefix(tiny_model, name):
    run = seen(tiny_model, name)
    assert run["together"] == run["alone"]
    assert run["later"] == run["alone"]
    assert (run["compactions"] > 0) == (name != "everything")


def test_a_budget_for_everything_answers_like_stock(tiny_model):
    stock, ours = seen(tiny_model, None), seen(tiny_model, "everything")
    for way in ("alone", "together", "later"):
        assert ours[way] == stock[way]


@pytest.mark.parametrize(
    "name", tiered(["snapkv", "cross-layer", "h2o", "decode", "blocks"], QUICK)
)
def test_six_requests_hold_the_prefix_once(tiny_model, name):
    run = seen(tiny_model, name)
    held = list(run["held"].values())
    assert len(held) == len(LENGTHS)
    first = held[0][:SHARED]
    assert all(blocks[:SHARED] == first for blocks in held), "other blocks"
    rest = [len(blocks) - SHARED for blocks in held]
    assert run["in_use"] == SHARED + sum(rest)
    assert {n: len(blocks) for n, blocks in run["held"].items()} == run["planned"]
    # At most a block more than the budget, and the blocks of the answer.
    assert max(rest) <= BUDGET // BLOCK + 1 + -(-40 // BLOCK)
    stock = seen(tiny_model, None)
    assert run["in_use"] < stock["in_use"] - len(LENGTHS) * 3


@pytest.mark.parametrize(
    "name", tiered([n for n in POLICIES if n != "everything"], QUICK)
)
def test_later_requests_find_the_prefix_after_compactions(tiny_model, name):
    cached = seen(tiny_model, name)["cached"]
    assert min(cached.values()) >= SHARED * BLOCK, cached


def test_the_prefix_comes_from_the_request_or_its_chat(tiny_model):
    report = run_scenario(
        "scenarios_shared_prefix:named",
        {"model": tiny_model, "policy": SNAPKV, "tokens": PREFIX},
    )
    expected = {"neither": 0, "request": SHARED, "chat": SHARED, "both": 0}
    assert report["shared"] == report["at_worker"] == expected
    assert set(report["refused"]) == {"-1", "64", "True"}
    assert all("KVP513" in message for message in report["refused"].values())


# -- sessions -------------------------------------------------------------------------

FLOW: dict[str, Any] = {
    "name": "flowkv",
    "ratio": 0.3,
    "base_config": {"window": 16},
    "shared_prefix": PREFIX,
}
QUESTIONS = [300, 90, 200]


def talks(model: str, policy: dict[str, Any], **settings: Any) -> dict[str, Any]:
    arguments = {
        "model": model,
        "policy": policy,
        "questions": QUESTIONS,
        "number": 4,
        "prefix": PREFIX,
        "settings": settings,
    }
    result: dict[str, Any] = run_scenario("scenarios_sessions:talks", arguments)
    return result


@pytest.fixture(scope="module")
def recomputed(tiny_model):
    """Answers of requests that compute their whole history."""
    return talks(tiny_model, FLOW | {"sessions": False})["answers"]


def test_conversations_continue_behind_their_prefix(tiny_model, recomputed):
    kept = talks(tiny_model, FLOW)
    assert kept["answers"] == recomputed
    assert kept["counts"]["hits"] == 4 * (len(QUESTIONS) - 1)
    assert kept["counts"]["failures"] == kept["tracked"] == 0
    # Only the new question is computed: no token of the history, none of the prefix.
    for turn, question in enumerate(QUESTIONS):
        hits = zip(kept["prompts"][turn], kept["cached"][turn], strict=True)
        computed = [prompt - hit - question for prompt, hit in hits]
        assert turn == 0 or max(computed) <= 1


def test_conversations_in_a_small_pool_lose_their_prefix(
    tiny_model, recomputed, tmp_path
):
    """Requests are preempted, and the prefix leaves the prefix cache now and then: its
    sessions are recomputed then. No answer changes.
    """
    policy = FLOW | {"session_dir": str(tmp_path), "session_memory": "1MiB"}
    small = talks(
        tiny_model,
        policy,
        num_gpu_blocks_override=29,
        max_model_len=840,
        async_scheduling=False,
    )
    assert small["answers"] == recomputed
    assert small["preemptions"] > 0, "too large a pool for a test of it"
    assert small["counts"]["hits"] > 0
    assert small["counts"]["failures"] == small["tracked"] == 0
    print(small["counts"], small["preemptions"])
