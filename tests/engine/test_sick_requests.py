"""A request with NaN values does not affect other requests, under any policy.

One token's embedding is NaN, as after an overflow in float16. From this token on the
request has NaN keys, queries and scores.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import run_scenario
from policy_settings import SMALL_BUDGETS, configure, policies_that, retrieve
from safetensors.torch import load_file, save_file
from texts import random_tokens
from tiny_model import VOCABULARY, write_tiny_model

from vllm_kvplugins.policies.registry import available_policies

pytestmark = pytest.mark.engine

SEED = 20261123
SICK = 7
PROCESSES = 14
PROMPT, HISTORY, ANSWER = 400, 300, 40
ALLOCATORS = ("cross-layer", "head-adaptive", "pyramid", "uniform")
# Policies whose scores come from keys, queries or attention.
SCORING = ("expected-attention", "flowkv", "h2o", "keydiff", "knorm", "snapkv")


@pytest.fixture(scope="module")
def sick_model(tmp_path_factory) -> str:
    folder = write_tiny_model(tmp_path_factory.mktemp("sick"), SEED)
    weights = folder / "model.safetensors"
    state = load_file(weights)
    state["model.embed_tokens.weight"][SICK] = torch.nan
    save_file(state, weights, metadata={"format": "pt"})
    return str(folder)


def prompt(seed: int) -> list[int]:
    return [t if t != SICK else 8 for t in random_tokens(seed, PROMPT, VOCABULARY)]


@functools.cache
def run_pairs(model: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Answers of a healthy and a sick request per policy, in one process."""
    sick = prompt(SEED + 1)
    sick[3] = SICK
    results: dict[str, Any] = run_scenario(
        "scenarios_sick:beside",
        {
            "model": model,
            "policies": {name: settings(name) for name in names},
            "well": prompt(SEED),
            "sick": sick,
            "history": HISTORY,
            "max_tokens": ANSWER,
        },
    )
    return results


def settings(name: str) -> dict[str, Any]:
    """Settings of a policy, with alternating allocators.

    The allocators `file` and `sensitivity` would need files.
    """
    turn = available_policies().index(name) // PROCESSES % len(ALLOCATORS)
    options = SMALL_BUDGETS | {"skip_layers": 0, "allocator": ALLOCATORS[turn]}
    policy = configure(name, options) | {"sessions": False}
    if name in policies_that(retrieve):
        policy["host_memory"] = 1 << 26
    return policy


def group_of(name: str) -> int:
    """The process that runs a policy; the default tier runs the first one only."""
    return available_policies().index(name) % PROCESSES


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if group_of(name) else [])
        for name in available_policies()
    ],
)
def test_nan_in_one_request_changes_no_other_request(sick_model, name):
    print("seed", SEED)
    same_process = available_policies()[group_of(name) :: PROCESSES]
    result = run_pairs(sick_model, tuple(same_process))[name]
    assert "error" not in result, result["error"]
    assert len(result["sick"]) == ANSWER
    assert any(result["alone"])  # an answer from NaN logits consists of token 0
    assert result["beside"] == result["alone"]
    assert result["after"] == result["alone"]
    assert result["unscored"] > 0 or name not in SCORING


def test_healthy_requests_have_no_unscored_compactions(sick_model):
    arguments = {
        "model": sick_model,
        "policies": {"snapkv": settings("snapkv")},
        "well": prompt(SEED),
        "sick": prompt(SEED + 1),
        "history": HISTORY,
        "max_tokens": 1,
    }
    report = run_scenario("scenarios_sick:beside", arguments)["snapkv"]
    assert report["unscored"] == 0
