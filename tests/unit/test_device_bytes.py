"""Device memory of a request outside vLLM's pool of blocks."""

from __future__ import annotations

import pytest
import torch
from fake_engine import HEAD_DIM, KV_HEADS, LAYERS, FakeEngine
from policy_settings import configure

BLOCK, PROMPT, BUDGET = 16, 400, 96


def compacted(name: str, **settings: object) -> FakeEngine:
    """An engine that has just compacted request ``r``."""
    policy = configure(name, {"budget": BUDGET} | settings)
    engine = FakeEngine(policy, BLOCK, blocks=64)
    engine.add("r", PROMPT, 4)
    assert engine.runtime.device_bytes("r") == 0
    engine.step({"r": PROMPT})
    return engine


def positions_of(engine: FakeEngine) -> torch.Tensor:
    resident = engine.runtime.request_state("r").resident
    assert resident is not None
    return resident.positions


@pytest.mark.parametrize(("allocator", "scopes"), [("uniform", 1), ("cross-layer", 3)])
def test_page_lists_and_positions_count(allocator, scopes):
    engine = compacted("snapkv", window=16, allocator=allocator)
    positions = positions_of(engine)
    pages_per_head = positions.shape[1] // BLOCK
    page_lists = scopes * KV_HEADS * (4 * pages_per_head + 8) + 8  # counts and tail
    expected = positions.numel() * 4 + page_lists
    # The lists have spare room for the next request.
    assert expected <= engine.runtime.device_bytes("r") <= 1.1 * expected
    engine.runtime.finish(["r"])
    assert engine.runtime.device_bytes("r") == 0


def test_means_of_spans_count_in_both_precisions():
    engine = compacted("sekv")
    state = engine.spans._requests["r"]
    row_bytes = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4  # a float32 key and value per head
    entries = state.segments.num_spans + state.room
    # Attention reads the means as entries; the policy also keeps them in float32.
    expected = (entries + state.segments.num_spans) * row_bytes
    assert engine.spans.device_bytes("r") >= expected
    engine.runtime.finish(["r"])
    assert engine.spans.device_bytes("r") == 0
