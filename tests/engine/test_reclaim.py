"""A compaction frees the expected blocks of a running request, to within one block.

Compares with the free blocks of vLLM's pool after every step.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import run_scenario
from policy_settings import write_heads, write_weights
from profiles import write_made
from tiers import tiered
from tiny_model import KV_HEADS, LAYERS, LLAMA

from vllm_kvplugins.budgets import ALLOCATORS

pytestmark = pytest.mark.engine

BLOCK = 32
QUICK = ("uniform", "cross-layer", "head-adaptive")
PROMPT = 2900  # tokens of the prompt in scenarios_tiny.reclaim
BUDGET = 512


@functools.cache
def seen(model: str, allocator: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        weights = write_weights(Path(folder, "weights.json"), LAYERS, KV_HEADS)
        profile = write_made(Path(folder, "profile.json"), [0.1, 0.3], config=LLAMA)
        expected_blocks = {
            "file": weights,
            "sensitivity": {"name": "sensitivity", "profile": profile},
            "head-split": write_heads(Path(folder, "heads.json"), Path(model)),
        }
        chosen = expected_blocks.get(allocator, allocator)
        policy = {"name": "snapkv", "budget": BUDGET, "allocator": chosen}
        result: dict[str, Any] = run_scenario(
            "scenarios_tiny:observe_reclaim", {"model": model, "policy": policy}
        )
    return result


@pytest.mark.parametrize("allocator", tiered(ALLOCATORS, QUICK))
def test_free_blocks_rise_with_the_first_decode_step(tiny_model, allocator):
    run = seen(tiny_model, allocator)
    held_for_prompt = run["free_before"] - run["free_at_prefill_end"]
    assert held_for_prompt == -(-PROMPT // BLOCK), "the whole prompt was resident"
    for step in run["steps"]:
        generated = step["computed"] - PROMPT
        implied = -(-(BUDGET + generated) // BLOCK)
        assert abs(step["held"] - implied) <= 1, step
    # 70 tokens cross two block boundaries; decoding allocates and frees nothing else
    assert len({step["held"] for step in run["steps"]}) == 3
    assert run["free_after"] == run["free_before"]


@pytest.mark.slow
def test_all_allocators_free_the_same(tiny_model):
    held = {a: [s["held"] for s in seen(tiny_model, a)["steps"]] for a in ALLOCATORS}
    assert all(counts == held["uniform"] for counts in held.values()), held


@pytest.mark.parametrize("allocator", tiered(ALLOCATORS, QUICK))
def test_pages_are_shared_as_the_allocator_says(tiny_model, allocator):
    """Allocators differ; otherwise the test above would compare a run with itself."""
    pages = seen(tiny_model, allocator)["seated_pages"]
    retained = -(-(BUDGET - PROMPT % BLOCK) // BLOCK)
    assert len(pages) == 2 * 2, "one entry per layer and KV head"
    assert sum(pages) == retained * len(pages)
    assert (len(set(pages)) > 1) == (allocator != "uniform"), pages


@pytest.mark.timeout(400)
def test_eight_times_as_many_conversations_decode_at_once(tiny_model):
    """2048-token conversations in one pool, with stock vLLM and with SnapKV."""
    arguments = {"model": tiny_model, "blocks": 270, "prompt_tokens": 2048}
    stock = run_scenario(
        "scenarios_tiny:capacity", {**arguments, "policy": None, "conversations": 8}
    )
    policy = {"name": "snapkv", "budget": 128}
    compressed = run_scenario(
        "scenarios_tiny:capacity",
        {**arguments, "policy": policy, "conversations": 33},
    )
    assert stock["most_decoding"] == (270 - 1) // (2048 // BLOCK + 1)
    assert compressed["most_decoding"] >= 8 * stock["most_decoding"], compressed
    assert compressed["preemptions"] == 0
    assert compressed["finished"] == 33
