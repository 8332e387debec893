"""Policies that keep all tokens generate the same tokens as stock vLLM, in fp32.

Prompts of a real model, in chunks of at most 1024 tokens: all at once with six
running, so that chunks of several prompts share steps with decode rows, and then alone.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from harness import run_scenario

pytestmark = pytest.mark.engine

SEED = 5
_ALL = os.environ.get("KVP_TEST_TIER") == "all"
# The longest prompts take most of the time, so the default tier has one that is longer
# than a chunk.
LENGTHS = (50, 130, 300, 1100)
ALONE: tuple[int, ...] = (50,)
if _ALL:
    LENGTHS += (640, 90, 210, 1000, 1300, 1700, 2900)
    ALONE += (640, 1700)
ENOUGH = 3000  # a budget above every prompt
POLICIES: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    # This policy has separate page tables for every layer.
    "snapkv": {"name": "snapkv", "budget": ENOUGH, "allocator": "cross-layer"},
}


@functools.cache
def greedy(model: str, name: str, installed: bool = True) -> dict[str, Any]:
    print("seed", SEED)
    arguments = {
        "model": model,
        "policy": POLICIES.get(name),
        "seed": SEED,
        "lengths": LENGTHS,
        "one_by_one": ALONE,
        "max_tokens": 24 if _ALL else 16,
    }
    environment = {} if installed else {"VLLM_PLUGINS": ""}
    result: dict[str, Any] = run_scenario(
        "scenarios_model:greedy", arguments, environment, timeout=580
    )
    return result


@pytest.mark.proves(policy="name")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "full" else pytest.mark.slow)
        for name in POLICIES
    ],
)
def test_keeping_everything_is_stock(model_path, name):
    stock = greedy(model_path, "stock", installed=False)
    run = greedy(model_path, name)
    assert run["together"] == stock["together"]
    assert run["alone"] == stock["alone"]
    assert run["compactions"] == 0


def test_answers_depend_on_the_prompt(model_path):
    """Otherwise the tests above would prove little."""
    stock = greedy(model_path, "stock", installed=False)
    answers = {tuple(tokens) for tokens in stock["together"].values()}
    assert len(answers) == len(LENGTHS)
    assert all(len(set(answer)) > 8 for answer in answers)
