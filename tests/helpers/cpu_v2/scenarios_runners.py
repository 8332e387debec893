"""Scenarios that run the same way on every model runner and scheduler."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

# One prompt below the budget, one above it, one with a partial last block.
LENGTHS = {"short": 40, "long": 320, "odd": 451}
BUDGET = {"name": "snapkv", "budget": 128, "window": 16}
MAX_TOKENS = 24
# Requests of the crowd: prompts of 10 blocks, 4 of them resident after compaction,
# answers of 4 more. Of 20 blocks, three answers cannot all be had at once.
CROWD, CROWD_PROMPT, CROWD_TOKENS, CROWD_POOL = 4, 320, 130, 21


def prompts() -> dict[str, list[int]]:
    return {
        name: random_tokens(seed, length, VOCABULARY)
        for seed, (name, length) in enumerate(LENGTHS.items())
    }


def _driver(model: str, policy: dict[str, Any] | None, **settings: Any) -> Driver:
    settings = {"enable_prefix_caching": False, "max_model_len": 2048} | settings
    encodes = policy is not None and policy["name"] == "kvzip"
    return Driver(make_llm(model, policy, skip_tokenizer_init=not encodes, **settings))


def _facts(driver: Driver) -> dict[str, Any]:
    import vllm

    worker = driver.core.model_executor.driver_worker.worker
    return {
        "vllm": vllm.__version__,
        "runner": type(worker.model_runner).__module__,
        "scheduler": type(driver.core.scheduler).__name__,
        "steps_in_flight": driver.core.batch_queue_size,
    }


def _settle(driver: Driver) -> int:
    """Run a step so that the worker learns of the ended requests; returns the blocks
    still held.
    """
    for _ in range(4):
        driver.step()
    assert driver.check_policy_state() == 0, "state of finished requests"
    driver.check_blocks()
    return driver.total_blocks - driver.free_blocks


def generate(model: str, policies: list[dict[str, Any] | None]) -> list[Any]:
    """All prompts at once under each policy, one engine after the other."""
    results = []
    for policy in policies:
        driver = _driver(model, policy)
        result: dict[str, Any] = {"facts": _facts(driver)}
        result["tokens"] = driver.generate(prompts(), MAX_TOKENS)
        if policy is not None:
            result["freed"] = driver.manager.freed_blocks
            result["compactions"] = driver.manager.compactions
            result["left"] = _settle(driver)
        results.append(result)
    return results


def _watch_frees(driver: Driver) -> list[int]:
    """Records, whenever blocks are freed, the prompt tokens still in flight."""
    early: list[int] = []
    manager, requests = driver.manager, driver.scheduler.requests
    remove = manager._remove_blocks_in_range

    def watched(request_id: str, *args: Any, **kwargs: Any) -> Any:
        request = requests[request_id]
        # Tokens of finished steps; placeholders are still in flight.
        back = request.num_computed_tokens - request.num_output_placeholders
        early.append(max(request.num_prompt_tokens - back, 0))
        return remove(request_id, *args, **kwargs)

    manager._remove_blocks_in_range = watched
    return early


def dummy_batches(model: str) -> dict[str, Any]:
    """Tokens with and without dummy batches between the steps of compacted requests."""
    # V2 assigns request indices from the top; it uses index 0, like a dummy batch, only
    # when
    # all others are taken.
    driver = _driver(model, BUDGET, max_num_seqs=len(LENGTHS))
    plain = driver.generate(prompts(), MAX_TOKENS)
    for name, prompt in prompts().items():
        driver.add(name, prompt, MAX_TOKENS)
    driver.step_until(lambda: driver.decoding() == len(LENGTHS))
    driver.step()
    residents = [driver.check_policy_state()]
    for _ in range(3):
        driver.llm.collective_rpc("execute_dummy_batch")
        driver.step()
    residents.append(driver.check_policy_state())
    driver.run()
    disturbed = {name: driver.tokens[name] for name in LENGTHS}
    return {"plain": plain, "disturbed": disturbed, "residents": residents}


def crowd(model: str) -> dict[str, Any]:
    """Four requests alone, then together in a pool too small for them, with an
    abort on the way."""
    names = [f"r{i}" for i in range(CROWD)]
    arguments = {
        name: random_tokens(100 + i, CROWD_PROMPT, VOCABULARY)
        for i, name in enumerate(names)
    }
    driver = _driver(
        model, BUDGET, num_gpu_blocks_override=CROWD_POOL, max_model_len=512
    )
    early = _watch_frees(driver)
    alone: dict[str, list[int]] = {}
    for name in names:
        alone |= driver.generate({name: arguments[name]}, CROWD_TOKENS)
    facts = _facts(driver)
    assert driver.preemptions == 0, "one request fits"

    victim = names[1]
    for name in names:
        driver.add(name, arguments[name], CROWD_TOKENS)
    driver.step_until(lambda: len(driver.tokens[victim]) >= 5)
    driver.abort([victim])
    driver.run()
    return {
        "facts": facts,
        "alone": alone,
        "together": {name: driver.tokens[name] for name in names},
        "victim": victim,
        "preemptions": driver.preemptions,
        "early_frees": early,
        "left": _settle(driver),
    }


def several(model: str, policies: list[Any], more: list[str]) -> dict[str, Any]:
    """``generate`` and other scenarios, one engine after the other."""
    report: dict[str, Any] = {"generate": generate(model, policies)}
    for name in more:
        report[name] = globals()[name](model)
    return report


def seams() -> dict[str, Any]:
    """Problems that the plugin reports with the vLLM that this process imports."""
    import vllm

    from vllm_kvplugins.vllm_adapter.config import compat

    return {
        "vllm": vllm.__version__,
        "problems": compat.problems(),
    }
