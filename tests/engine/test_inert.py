"""Without a policy, vLLM with this plugin installed is vLLM."""

from __future__ import annotations

import pytest
from harness import run_scenario
from texts import random_tokens
from tiny_model import VOCABULARY

pytestmark = pytest.mark.engine

SEED = 31
PROMPTS = [random_tokens(SEED + size, size, VOCABULARY) for size in (20, 200, 900)]
POLICY = {"name": "snapkv", "budget": 128, "allocator": "cross-layer"}


def test_without_a_policy_tokens_and_configuration_are_stock(tiny_model):
    print("seed", SEED)
    arguments = {"model": tiny_model, "prompts": PROMPTS}
    scenario = "scenarios_config:stock_run"
    # an empty list of plugins keeps vLLM from loading any
    absent = run_scenario(scenario, arguments, {"VLLM_PLUGINS": ""})
    installed = run_scenario(scenario, arguments)
    assert installed == absent
    assert "kvplugins" not in str(installed)


def test_an_engine_after_one_with_a_policy_is_stock_again(tiny_model):
    print("seed", SEED)
    arguments = {"model": tiny_model, "prompts": PROMPTS}
    alone = run_scenario("scenarios_config:stock_run", arguments)
    seen = run_scenario(
        "scenarios_config:policy_then_stock", {**arguments, "policy": POLICY}
    )
    for part in ("scheduler", "manager", "worker", "connector", "backends", "impls"):
        assert "kvplugins" in str(seen["policy"][part]), part
        assert "kvplugins" not in str(seen["stock"][part]), part
    assert seen["stock"].pop("compactions") is None
    assert seen["stock"] == alone
    assert seen["policy"]["compactions"] == seen["again"]["compactions"] == 2
    assert seen["again"]["tokens"] == seen["policy"]["tokens"] != alone["tokens"]
