"""A request that generates 8000 tokens holds a constant number of blocks."""

from __future__ import annotations

import pytest
from fake_engine import KV_HEADS, LAYERS, FakeEngine

pytestmark = pytest.mark.slow  # minutes

BLOCK = 16
PROMPT, ANSWER = 70, 8000
KEEP, FOLD = 6, 2  # blocks


@pytest.mark.parametrize("name", ["tova", "keydiff", "streaming-llm"])
def test_held_blocks_stay_flat(name):
    policy = {
        "name": name,
        "budget": 64,
        "decode_budget": KEEP * BLOCK,
        "fold_blocks": FOLD,
        "allocator": "cross-layer",
    }
    # its maximum, and the null block
    engine = FakeEngine(policy, BLOCK, KEEP + FOLD + 1)
    engine.attend_every = 29
    request = engine.add("long", PROMPT, ANSWER)
    held = []
    while not request.done:
        engine.step({"long": PROMPT})
        held.append(len(request.held))
    first = (KEEP + FOLD) * BLOCK  # tokens at the first fold
    circle = FOLD * BLOCK
    assert held[first:-circle] == held[first + circle :]
    assert set(held[first:]) == set(range(KEEP, KEEP + FOLD + 1))
    assert len(request.kept) == (PROMPT + ANSWER - 1 - first) // circle + 1
    engine.remove("long")
    engine.check_idle()


@pytest.mark.parametrize("name", ["icecache", "quest"])
def test_retrieval_holds_sinks_budget_and_window(name):
    """4000 generated tokens, in a pool without a spare block."""
    sinks, budget, window = 8, 40, 16
    policy = {
        "name": name,
        "budget": budget,
        "sinks": sinks,
        "window": window,
        "skip_layers": 0,
    }
    keep = (sinks + budget + window) // BLOCK
    # the kept tokens, a tail of up to two blocks, and the null block
    engine = FakeEngine(policy, BLOCK, keep + 2 + 1)
    engine.attend_every = 10_000
    request = engine.add("long", 50, 4000)
    peak = 0
    while not request.done:
        engine.step({"long": 50})
        if request.computed > (keep + 2) * BLOCK:
            peak = max(peak, len(request.held))
    assert peak == keep + 1, "one page per head beyond sinks, budget and window"
    # the host holds the rest, for every layer and head
    tokens = request.computed - sinks - window
    tier = engine.retrieval.tier
    held_pages = (len(tier.pages) - tier.num_free) // (LAYERS * KV_HEADS)
    assert 0 <= held_pages * tier.page_tokens - tokens + BLOCK <= 2 * BLOCK
    engine.remove("long")
    engine.check_idle()
    assert tier.num_free == len(tier.pages)
