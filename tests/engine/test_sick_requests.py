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
PROCESSES = 2
PROMPT, HISTORY, ANSWER = 400, 300, 40
ALLOCATORS = ("cross-layer", "head-adaptive", "pyramid", "uniform")
# those that look at keys or queries alone, or at attention
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
def beside(model: str, names: tuple[str, ...]) -> dict[str, Any]:
    """What became of the requests under these policies, in one process."""
    sick = prompt(SEED + 1)
    sick[3] = SICK
    found: dict[str, Any] = run_scenario(
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
    return found


def settings(name: str) -> dict[str, Any]:
    """The allocators take turns; `file` and `sensitivity` would need files."""
    turn = available_policies().index(name) // PROCESSES % len(ALLOCATORS)
    chosen = SMALL_BUDGETS | {"skip_layers": 0, "allocator": ALLOCATORS[turn]}
    found = configure(name, chosen) | {"sessions": False}
    if name in policies_that(retrieve):
        found["host_memory"] = 1 << 26
    return found


@pytest.mark.parametrize("name", available_policies())
def test_who_is_beside_it_is_not_harmed(sick_model, name):
    print("seed", SEED)
    names = available_policies()
    together = names[names.index(name) % PROCESSES :: PROCESSES]
    found = beside(sick_model, tuple(together))[name]
    assert "error" not in found, found["error"]
    assert len(found["sick"]) == ANSWER
    assert any(found["alone"])  # an answer of NaN is token 0 throughout
    assert found["beside"] == found["alone"]
    assert found["after"] == found["alone"]
    assert found["unscored"] > 0 or name not in SCORING


def test_nothing_is_unscored_where_all_are_well(sick_model):
    """The count is of the sick one's compactions."""
    arguments = {
        "model": sick_model,
        "policies": {"snapkv": settings("snapkv")},
        "well": prompt(SEED),
        "sick": prompt(SEED + 1),
        "history": HISTORY,
        "max_tokens": 1,
    }
    found = run_scenario("scenarios_sick:beside", arguments)["snapkv"]
    assert found["unscored"] == 0
