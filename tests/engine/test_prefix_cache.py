"""Prefix caching works under a policy, with exactly the allowed hits.

Blocks that a compaction freed remain in the prefix cache; blocks that it overwrote must
not. Every prompt first runs with an empty cache, for reference.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from harness import run_scenario
from tiers import tiered

pytestmark = pytest.mark.engine

BLOCK = 32
BUDGET = 256
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "snapkv": {"name": "snapkv", "budget": BUDGET},
    "snapkv-cross-layer": {
        "name": "snapkv",
        "budget": BUDGET,
        "allocator": "cross-layer",
    },
    "streaming-llm": {"name": "streaming-llm", "budget": BUDGET},
}
SHARED = 700  # tokens that "longer" and "shorter" share with "first"

policies = pytest.mark.parametrize(
    "name", tiered(POLICIES, ("snapkv-cross-layer", "streaming-llm"))
)


@functools.cache
def seen(model: str, name: str) -> dict[str, Any]:
    result: dict[str, Any] = run_scenario(
        "scenarios_tiny:observe_prefix", {"model": model, "policy": POLICIES[name]}
    )
    return result


def exact_blocks(name: str, prompt_tokens: int) -> int:
    """Leading blocks of a prompt that no compaction rewrites."""
    full = prompt_tokens // BLOCK
    if name == "full" or prompt_tokens <= BUDGET:
        return full
    return full - -(-(BUDGET - prompt_tokens % BLOCK) // BLOCK)


@policies
def test_tokens_do_not_depend_on_the_cache(tiny_model, name):
    run = seen(tiny_model, name)
    assert run["tokens"] == run["fresh"]
    assert run["together"] == run["fresh"], "while others run on the same blocks"
    assert len({tuple(tokens) for tokens in run["fresh"].values()}) == 4, (
        "different prompts answer differently; only two prompts are equal"
    )


@policies
def test_hits_are_the_whole_exact_prefix(tiny_model, name):
    run = seen(tiny_model, name)
    first = exact_blocks(name, run["lengths"]["first"])
    shared = SHARED // BLOCK
    expected = {
        "first": 0,
        "same": first,
        "longer": min(shared, first, exact_blocks(name, run["lengths"]["longer"])),
        "shorter": min(shared, first, exact_blocks(name, run["lengths"]["shorter"])),
        "short": exact_blocks(name, run["lengths"]["short"]),
    }
    actual = {prompt: tokens // BLOCK for prompt, tokens in run["cached"].items()}
    assert actual == expected
    assert all(tokens % BLOCK == 0 for tokens in run["cached"].values())
    assert all(actual[prompt] > 0 for prompt in actual if prompt != "first")


@policies
def test_answers_of_uncompressed_requests_are_cached_too(tiny_model, name):
    run = seen(tiny_model, name)
    answer = len(run["tokens"]["short"])
    computed = run["lengths"]["short"] + answer - 1
    assert run["cached_next_turn"] == computed // BLOCK * BLOCK
    assert run["cached_next_turn"] > run["lengths"]["short"]


@policies
def test_cached_blocks_are_never_written(tiny_model, name):
    run = seen(tiny_model, name)
    assert run["hashed_blocks"] == exact_blocks(name, run["lengths"]["first"])
    assert run["unchanged"]


@policies
def test_nothing_stays_behind(tiny_model, name):
    left_behind = seen(tiny_model, name)["left_behind"]
    assert left_behind["tracked"] == left_behind["held"] == 0
    assert left_behind["free"] == left_behind["total"]
