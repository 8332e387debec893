"""Scenarios of policies that fetch tokens from host memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY


def turns(
    model: str, policy: dict[str, Any], lengths: list[int], max_tokens: int
) -> dict[str, Any]:
    """Requests of which some wait for room in the host tier, and one that never
    fits.
    """
    from vllm.exceptions import VLLMValidationError

    driver = Driver(
        make_llm(
            model,
            policy,
            num_gpu_blocks_override=400,
            max_model_len=4096,
            disable_log_stats=False,
        )
    )
    refused = ""
    try:
        driver.add("giant", random_tokens(0, 3000, VOCABULARY), 900)
    except VLLMValidationError as error:
        refused = str(error)
    for index, length in enumerate(lengths):
        driver.add(str(index), random_tokens(index, length, VOCABULARY), max_tokens)
    most_at_once = most_held = 0
    while driver.busy:
        driver.step()
        most_at_once = max(most_at_once, len(driver.scheduler.running))
        most_held = max(most_held, int(_metric(driver, "held_requests")))
    driver.step()
    assert driver.check_policy_state() == 0
    host = driver.scheduler.connector.host
    return {
        "refused": refused,
        "finished": len(driver.finished),
        "most_at_once": most_at_once,
        "most_held": most_held,
        "reserved_after": host.reserved_bytes,
        "held_after": len(host.waiting),
    }


def _metric(driver: Driver, name: str) -> float:
    metrics = {metric.name: metric for metric in driver.llm.get_metrics()}
    return float(metrics[f"vllm:kv_policy_{name}"].value)


def held_while_generating(
    model: str, policy: dict[str, Any], prompt: int, max_tokens: int
) -> list[list[int]]:
    """(tokens computed, blocks held) after every step of one long answer."""
    driver = Driver(
        make_llm(model, policy, num_gpu_blocks_override=200, max_model_len=4096)
    )
    driver.add("long", random_tokens(1, prompt, VOCABULARY), max_tokens)
    steps = []
    while driver.busy:
        driver.step()
        driver.check_blocks()
        computed = [r.num_computed_tokens for r in driver.scheduler.running]
        if computed and computed[0] > prompt:
            steps.append([computed[0], len(driver.held_blocks())])
    driver.step()
    assert driver.check_policy_state() == 0
    return steps


def host_memory(
    model: str, policy: dict[str, Any], prompts: list[list[int]], max_tokens: int
) -> dict[str, Any]:
    """Answers of requests that run together, and the host memory that they need.

    ``reserved``: maximum of the metric; ``used``: bytes of the pages in the host tier.
    """
    llm = make_llm(model, policy, max_model_len=4096, disable_log_stats=False)
    driver = Driver(llm)
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt, max_tokens)
    reserved = used = 0
    while driver.busy:
        driver.step()
        reserved = max(reserved, int(_metric(driver, "host_bytes")))
        (tier,) = (extension.tier for extension in driver.runtime.extensions)
        used = max(used, (len(tier.pages) - tier.num_free) * tier.page_bytes)
    driver.step()
    assert driver.check_policy_state() == 0
    return {"tokens": driver.tokens, "reserved": reserved, "used": used}


def long_prompts(
    model: str,
    policy: dict[str, Any] | None,
    blocks: int,
    groups: list[list[int]],
    more: list[int],
) -> list[dict[str, Any]]:
    """Groups of prompts that run together, then a longer version of each.

    Args:
        blocks: of the pool, the null block included.
        more: lengths of the longer versions, which continue the first one's session.

    Returns:
        Per group and version: the log-probabilities of the first token, its best
        candidates' ids, blocks in use, and restored or cached tokens.
    """
    driver = Driver(make_llm(model, policy, num_gpu_blocks_override=blocks))
    rng_tokens = {
        length: random_tokens(length, length + sum(more) + 1, VOCABULARY)
        for group in groups
        for length in group
    }
    report = []
    for group in groups:
        for extra in (0, *more):
            names = [f"{length}+{extra}" for length in group]
            first: dict[str, Any] = {}
            for name, length in zip(names, group, strict=True):
                _add_with_logprobs(driver, name, rng_tokens[length][: length + extra])
            peak = 0
            while driver.busy:
                for output in driver.engine.step():
                    if output.outputs[0].logprobs:
                        best = output.outputs[0].logprobs[0]
                        first[output.request_id] = {
                            str(token): each.logprob for token, each in best.items()
                        }
                        driver.cached[output.request_id] = output.num_cached_tokens
                peak = max(peak, len(driver.held_blocks()))
            driver.step()
            report.append(
                {
                    "logprobs": [first[name] for name in names],
                    "cached": [driver.cached[name] for name in names],
                    "peak": peak,
                    "preemptions": driver.preemptions,
                }
            )
    if policy is not None:
        assert driver.check_policy_state() == 0
    return report


def _add_with_logprobs(driver: Driver, name: str, prompt: list[int]) -> None:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=5
    )
    driver.engine.add_request(name, {"prompt_token_ids": prompt}, params)


def pass_keys(
    model: str, policy: dict[str, Any], tokens: int, depths: int, **settings: Any
) -> int:
    """Pass keys that ``benchmarks/quality/needle.py`` finds in filler, in bfloat16."""
    sys.path.extend(map(str, (Path(__file__).parents[2] / "benchmarks").glob("*/")))
    from _pass_key import filler, plant
    from _talk import render
    from needle import MAX_TOKENS, says
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="bfloat16",
        enforce_eager=True,
        additional_config={"kv_policy": policy},
        **({"max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30} | settings),
    )
    tokenizer, lines = llm.get_tokenizer(), filler(tokens)
    made = [plant(lines, depth, depths) for depth in range(depths)]
    ids = [render(tokenizer, [{"role": "user", "content": text}]) for text, _ in made]
    outputs = llm.generate(
        [{"prompt_token_ids": each} for each in ids],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS),
        use_tqdm=False,
    )
    answers = [output.outputs[0].text for output in outputs]
    return sum(says(text, key) for text, (_, key) in zip(answers, made, strict=True))
