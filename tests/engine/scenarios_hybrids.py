"""Scenarios on tiny models with windowed or recurrent layers.

Each function runs one engine.
"""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from policy_settings import has_turns, wants_history
from texts import random_tokens
from tiny_model import VOCABULARY

Policy = dict[str, Any] | None
_ANSWER = 24


def _driver(model: str, policy: Policy, **settings: Any) -> Driver:
    arguments: dict[str, Any] = {
        "num_gpu_blocks_override": 400,
        "max_num_batched_tokens": 256,  # a prompt takes several steps
        "disable_log_stats": False,
    }
    return Driver(make_llm(model, policy, **(arguments | settings)))


def _prompt(seed: int, count: int) -> list[int]:
    return random_tokens(seed, count, VOCABULARY)


def traffic(model: str, policy: Policy, **settings: Any) -> dict[str, Any]:
    """Tokens of requests alone, together, after prefix hits, and after preemptions."""
    driver = _driver(model, policy, **settings)
    prompts = {str(n): _prompt(n, n) for n in (50, 130, 333, 700)}
    alone = {}
    for name, prompt in prompts.items():
        driver.llm.reset_prefix_cache()
        alone |= driver.generate({f"alone-{name}": prompt}, _ANSWER, margins=True)
    driver.llm.reset_prefix_cache()
    together = driver.generate(
        {f"together-{name}": prompt for name, prompt in prompts.items()}, _ANSWER
    )
    # other requests that share 512 tokens with a prompt above, or all of it
    longest = prompts["700"]
    shared = {
        "same": longest,
        "longer": longest[:512] + _prompt(1, 300),
        "shorter": longest[:512] + _prompt(2, 20),
        "turn": [*longest, *together["together-700"], *_prompt(3, 30)],
    }
    hits: dict[str, list[int]] = {}
    for name, prompt in shared.items():
        hits |= driver.generate({f"hit-{name}": prompt}, _ANSWER)
    driver.llm.reset_prefix_cache()
    misses: dict[str, list[int]] = {}
    for name, prompt in shared.items():
        driver.llm.reset_prefix_cache()
        misses |= driver.generate({f"miss-{name}": prompt}, _ANSWER)

    before = driver.preemptions
    for name, prompt in prompts.items():
        driver.add(f"preempted-{name}", prompt, _ANSWER)
    driver.step_until(lambda: driver.decoding() == len(prompts))
    driver.llm.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    return {
        "alone": list(alone.values()),
        "margins": [driver.margins[name] for name in alone],
        "together": list(together.values()),
        "hits": list(hits.values()),
        "misses": list(misses.values()),
        "preempted": [driver.tokens[f"preempted-{name}"] for name in prompts],
        "cached": {name: driver.cached[f"hit-{name}"] for name in shared},
        "preemptions": driver.preemptions - before,
        "compactions": getattr(driver.manager, "compactions", 0),
        "left_behind": _left_behind(driver),
    }


def reclaim(model: str, policy: Policy, **settings: Any) -> dict[str, Any]:
    """Blocks that one request holds after every step, and what its plan says."""
    driver = _driver(model, policy, **settings)
    driver.add("long", _prompt(5, 1500), max_tokens=70)
    steps = []
    while driver.busy:
        driver.step()
        driver.check_blocks()
        if not driver.busy:
            break
        (request,) = driver.scheduler.running
        (metrics,) = _gauge(driver.llm, "vllm:kv_policy_resident_tokens")
        (usage,) = _gauge(driver.llm, "vllm:kv_cache_usage_perc")
        steps.append(
            {
                "computed": request.num_computed_tokens,
                "held": [_held(manager) for manager in driver.managers],
                "planned": driver.manager.plans.of(request).resident_blocks(
                    request.num_computed_tokens
                ),
                "resident_tokens": metrics,
                "used_share": usage,
            }
        )
    return {
        "managed": driver.managers.index(driver.manager),
        "block_size": driver.block_size,
        "blocks": driver.pool.num_gpu_blocks,
        "pool_bytes": _pool_bytes(driver),
        "steps": steps,
        "freed": driver.manager.freed_blocks,
        "left_behind": _left_behind(driver),
    }


def _held(manager: Any) -> int:
    blocks = {
        block.block_id
        for held in manager.req_to_blocks.values()
        for block in held
        if not block.is_null
    }
    return len(blocks)


def _gauge(llm: Any, name: str) -> list[float]:
    return [metric.value for metric in llm.get_metrics() if metric.name == name]


def _pool_bytes(driver: Driver) -> int:
    """Bytes of the memory that the worker's caches of all layers lie in."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(driver.engine.vllm_config, Attention)
    storages = {
        layer.kv_cache.untyped_storage().data_ptr(): layer.kv_cache.untyped_storage()
        for layer in layers.values()
    }
    return sum(storage.nbytes() for storage in storages.values())


def _left_behind(driver: Driver) -> dict[str, int]:
    driver.step()  # a step so that the worker learns of the ended requests
    driver.check_blocks()
    has_policy = hasattr(driver.manager, "plans")
    return {
        "tracked": driver.check_policy_state() if has_policy else 0,
        "held": len(driver.held_blocks()),
        "missing": driver.total_blocks - driver.free_blocks,
    }


def any_policy(model: str, policy: Policy) -> dict[str, Any]:
    """Tokens of two requests alone and together, each with a turn that has ended."""
    assert policy is not None
    driver = _driver(model, policy, skip_tokenizer_init=False, max_model_len=4096)
    history_only = wants_history(policy["name"])
    extra: dict[str, Any] = {}
    if history_only:
        extra["patched"] = _prompt(9, 40)

    def add(prefix: str, count: int) -> None:
        ends = [count - 45] if has_turns(policy["name"]) else None
        driver.add(
            f"{prefix}-{count}", _prompt(count, count), _ANSWER, turn_ends=ends, **extra
        )

    lengths = (333, 700)
    for count in lengths:
        driver.llm.reset_prefix_cache()
        add("alone", count)
        driver.run()
    driver.llm.reset_prefix_cache()
    for count in lengths:
        add("together", count)
    driver.run()
    return {
        "alone": [driver.tokens[f"alone-{count}"] for count in lengths],
        "together": [driver.tokens[f"together-{count}"] for count in lengths],
        "compactions": driver.manager.compactions,
        "freed": driver.manager.freed_blocks,
        "left_behind": _left_behind(driver),
    }
