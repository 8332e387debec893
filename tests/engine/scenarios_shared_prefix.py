"""Requests with a common first part, under a policy, on the tiny random model."""

from __future__ import annotations

from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

Policy = dict[str, Any]


def _prompts(prefix: int, lengths: list[int]) -> dict[str, list[int]]:
    """Prompts of a common prefix and a rest of their own."""
    first = random_tokens(7, prefix, VOCABULARY)
    return {
        f"r{number}": first + random_tokens(100 + number, length, VOCABULARY)
        for number, length in enumerate(lengths)
    }


def _held(driver: Driver) -> dict[str, list[int]]:
    """Ids of the blocks of each request, without the request's suffix."""
    return {
        name.split("-")[0]: [b.block_id for b in blocks if not b.is_null]
        for name, blocks in driver.manager.req_to_blocks.items()
    }


def traffic(
    model: str,
    policy: Policy | None,
    prefix: int,
    lengths: list[int],
    max_tokens: int,
    **settings: Any,
) -> dict[str, Any]:
    """Each prompt alone with an empty cache, all together, and one after the other.

    Returns:
        Tokens per way and prompt. ``cached``: prompt tokens of the third way that came
        from the prefix cache. ``held``: blocks per request while all decode together;
        ``in_use``: blocks of the pool at that time.
    """
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400, **settings))
    prompts = _prompts(prefix, lengths)
    report: dict[str, Any] = {"alone": {}, "together": {}, "later": {}, "cached": {}}
    for name, prompt in prompts.items():
        driver.llm.reset_prefix_cache()
        driver.generate({f"{name}-alone": prompt}, max_tokens)
        report["alone"][name] = driver.tokens[f"{name}-alone"]
        assert driver.cached[f"{name}-alone"] == 0
    driver.llm.reset_prefix_cache()
    for name, prompt in prompts.items():
        driver.add(f"{name}-together", prompt, max_tokens)
    driver.step_until(lambda: driver.decoding() == len(prompts))
    driver.step()  # the last one's compaction has freed its blocks
    driver.step()
    report["held"] = _held(driver)
    report["in_use"] = driver.total_blocks - driver.free_blocks
    report["planned"] = (
        {
            request.request_id.split("-")[0]: driver.manager.plans.of(
                request
            ).resident_blocks(request.num_computed_tokens)
            for request in driver.scheduler.running
        }
        if policy
        else {}
    )
    driver.check_blocks()
    driver.run()
    for name in prompts:
        report["together"][name] = driver.tokens[f"{name}-together"]
    for name, prompt in prompts.items():
        driver.generate({f"{name}-later": prompt}, max_tokens)
        report["later"][name] = driver.tokens[f"{name}-later"]
        report["cached"][name] = driver.cached[f"{name}-later"]
    driver.step()
    driver.check_blocks()
    assert driver.free_blocks == driver.total_blocks, "blocks leaked"
    report["compactions"] = getattr(driver.manager, "compactions", 0)
    if policy:
        assert driver.check_policy_state() == 0, "requests leaked in the worker"
    return report


def named(model: str, policy: Policy, tokens: int) -> dict[str, Any]:
    """Blocks of the shared prefix, by where its length comes from.

    Returns:
        Also, per invalid length that a request names, the front end's message.
    """
    from vllm.exceptions import VLLMValidationError

    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=400))
    prompt = random_tokens(1, 600, VOCABULARY)
    rendered = {
        "type": "token",
        "prompt_token_ids": prompt,
        "kv_policy_shared_prefix": tokens,
    }
    driver.add("neither", prompt, 4)
    driver.add("request", prompt, 4, shared_prefix=tokens)
    driver.add("chat", rendered, 4)
    driver.add("both", rendered, 4, shared_prefix=0)
    refused = {}
    for value in (-1, "64", True):
        try:
            driver.add(f"refused {value}", prompt, 4, shared_prefix=value)
        except VLLMValidationError as error:
            refused[str(value)] = str(error)
    driver.step()
    plans = driver.manager.plans
    shared = {
        request.request_id.split("-")[0]: plans.of(request).shared_blocks
        for request in driver.scheduler.requests.values()
    }
    prompts = driver.runtime._prompts
    at_worker = {
        request_id.split("-")[0]: prompts.shared_blocks(request_id)
        for request_id in driver.scheduler.requests
    }
    driver.run()
    driver.step()
    driver.check_blocks()
    assert driver.check_policy_state() == 0
    return {"shared": shared, "at_worker": at_worker, "refused": refused}
