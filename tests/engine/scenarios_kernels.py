"""Every policy on a chosen attention kernel."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from scenarios_sessions import settle
from texts import random_tokens
from tiny_model import VOCABULARY
from torch._dynamo.utils import counters

# Below the budget, above it, and above it with a partial last block.
LENGTHS = {"short": 40, "long": 192, "odd": 211}
MAX_TOKENS = 7


def eager_and_compiled(
    model: str, policies: list[dict[str, Any]], compilation: dict[str, Any]
) -> list[list[Any]]:
    """Both in one process."""
    compiled = {"enforce_eager": False, "compilation_config": compilation}
    return [under_policies(model, policies, **how) for how in ({}, compiled)]


def under_policies(
    model: str, policies: list[dict[str, Any]], **settings: Any
) -> list[Any]:
    """Tokens of all prompts at once under each policy, and what ran.

    Args:
        settings: of the engines.
    """
    rows = []
    for policy in policies:
        graphs = counters["stats"]["unique_graphs"]
        defaults = {
            "enable_prefix_caching": False,
            "max_model_len": 1024,
            "skip_tokenizer_init": False,
            # engines of one process stay until it ends
            "num_gpu_blocks_override": 64,
        }
        llm = make_llm(model, policy, **(defaults | settings))
        driver = Driver(llm)
        worker = driver.core.model_executor.driver_worker.worker
        layers = worker.vllm_config.compilation_config.static_forward_context
        impls = [layer.impl for layer in layers.values() if hasattr(layer, "impl")]
        (backend,) = {type(impl).__name__ for impl in impls}
        prompts = {
            name: random_tokens(seed, length, VOCABULARY)
            for seed, (name, length) in enumerate(LENGTHS.items())
        }
        runs = worker.kv_policy_runtime.policy
        for name, prompt in prompts.items():
            # a history, and what is asked about it
            turns = [len(prompt) - 20] if runs.turns is not None else None
            driver.add(name, prompt, MAX_TOKENS, turn_ends=turns)
        driver.run()
        settle(driver)  # sessions are saved from blocks of ended requests
        rows.append(
            {
                "tokens": driver.tokens,
                "backend": backend,
                "runner": type(worker.model_runner).__module__,
                "graphs": counters["stats"]["unique_graphs"] - graphs,
                "compactions": driver.manager.compactions,
                "left": driver.total_blocks - driver.free_blocks,
            }
        )
    return rows
