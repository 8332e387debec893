"""A request that generates 8000 tokens holds the same few blocks all the time."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

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
    # what it ever needs, and the null block
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
