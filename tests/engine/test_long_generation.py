"""With a decode budget a request generates indefinitely in a fixed number of blocks.

8000 tokens, or 2000 where kernels are interpreted. Free blocks hold NaN, so that a read
of a freed token shows.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import INTERPRETED, run_scenario
from tiny_model import VOCABULARY

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, POOL = 32, 260  # vLLM requires room for one request of max_model_len
PROMPT, TOKENS = 150, 2000 if INTERPRETED else 8000
BUDGET, FOLD = 256, 4


def test_held_blocks_stay_flat_to_8k_tokens(tiny_model):
    """Other policies generate this long in ``tests/unit/test_long_requests.py``."""
    policy = {
        "name": "h2o",
        "budget": 512,
        "decode_budget": BUDGET,
        "fold_blocks": FOLD,
    }
    run: dict[str, Any] = run_scenario(
        "scenarios_contract:long_generation",
        {
            "model": tiny_model,
            "policy": policy,
            "prompt_tokens": PROMPT,
            "max_tokens": TOKENS,
            "blocks": POOL,
        },
    )
    held, tokens = run["held"], run["tokens"]
    assert len(tokens) == TOKENS
    assert all(0 <= token < VOCABULARY for token in tokens)
    assert len(set(tokens[-1000:])) > 10, "the same few tokens over and over"
    assert run["preemptions"] == run["tracked"] == 0
    # it grows to the first fold, and then goes round in one circle
    keep, circle = BUDGET // BLOCK, FOLD * BLOCK
    first = (keep + FOLD) * BLOCK - PROMPT + 2
    assert held[first:-circle] == held[first + circle :], "it grows, or shrinks"
    assert set(held[first:]) == set(range(keep + 1, keep + FOLD + 1))
    assert run["compactions"] == (PROMPT + TOKENS - 2) // circle - keep // FOLD
