"""Sessions in a real engine: restored equals resident."""

from __future__ import annotations

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine

FLOW = {"name": "flowkv", "ratio": 0.3, "base_config": {"window": 16}}
QUESTIONS = [300, 90, 400, 60, 33]


def talks(model, policy, **arguments):
    arguments = {"questions": QUESTIONS} | arguments
    return run_scenario(
        "scenarios_sessions:talks", {"model": model, "policy": policy} | arguments
    )


def test_a_conversation_goes_on_as_if_all_were_one_request(tiny_model):
    kept = talks(tiny_model, FLOW, number=6)
    anew = talks(tiny_model, FLOW | {"sessions": False}, number=6)
    assert kept["answers"] == anew["answers"]
    assert kept["counts"]["hits"] == 6 * (len(QUESTIONS) - 1)
    # nothing is computed again but the last answer's window
    new = [
        prompt - cached
        for prompts, hits in zip(kept["prompts"][1:], kept["cached"][1:], strict=True)
        for prompt, cached in zip(prompts, hits, strict=True)
    ]
    asked = [tokens for tokens in QUESTIONS[1:] for _ in range(6)]
    assert all(n <= a + 32 for n, a in zip(new, asked, strict=True)), new
    assert all(hit == 0 for hits in anew["cached"] for hit in hits)
    assert kept["tracked"] == 0
