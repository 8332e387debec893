"""Prompts whose spans are means, some of them zoomed to tokens."""

from __future__ import annotations

from typing import Any

import scenarios_model
import torch
from driver import Driver, make_llm
from texts import random_tokens
from tiny_model import VOCABULARY

from vllm_kvplugins.policies.sekv import SeKV


def everything_zoomed(model: str, policy: dict[str, Any], **settings: Any) -> Any:
    """``scenarios_model.greedy`` with room to zoom into all spans."""
    SeKV.zoom_tokens = lambda self, prompt_tokens, geometry: prompt_tokens
    return scenarios_model.greedy(model, policy, **settings)


def surprisal(model: str, policy: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """The surprisal that the policy receives per prompt, with chunked prefill."""
    recorded: dict[int, list[float]] = {}
    segment = SeKV.segment

    def recording(self: SeKV, surprisal: torch.Tensor, *args: Any) -> Any:
        recorded[surprisal.numel()] = surprisal.tolist()
        return segment(self, surprisal, *args)

    SeKV.segment = recording
    driver = Driver(make_llm(model, policy, max_num_batched_tokens=128))
    driver.generate({str(n): random_tokens(n, n, VOCABULARY) for n in lengths}, 2)
    return {"surprisal": recorded}


def prompt_logprobs(model: str, lengths: list[int]) -> dict[str, Any]:
    """The surprisal of the same prompts from stock vLLM."""
    from vllm import SamplingParams

    llm = make_llm(model, None)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    report = {}
    for n in lengths:
        tokens = random_tokens(n, n, VOCABULARY)
        (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        steps = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        report[n] = [0.0] + [-step[token].logprob for token, step in steps]
    return {"surprisal": report}


def answers(
    model: str, policy: dict[str, Any], lengths: list[int], max_tokens: int
) -> dict[str, Any]:
    """The same prompts together, in small chunks, and each alone without chunks.

    Returns:
        ``together`` and ``alone`` [length] tokens, ``held`` the most blocks that each
        held after its prompt, and entries that it had beside them, per KV head.
    """
    prompts = {str(n): random_tokens(n, n, VOCABULARY) for n in lengths}
    driver = Driver(make_llm(model, policy, max_num_batched_tokens=192))
    for name, prompt in prompts.items():
        driver.add(name, prompt, max_tokens)
    held, entries = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
    while driver.busy:
        driver.step()
        for request in driver.scheduler.running:
            name = request.request_id.split("-")[0]
            # with steps in flight, the counts run ahead of the freed blocks
            if request.num_computed_tokens <= request.num_prompt_tokens + 3:
                continue
            blocks = driver.manager.req_to_blocks[request.request_id]
            held[name] = max(held[name], sum(not block.is_null for block in blocks))
            state = driver.runtime.extensions[0]._requests.get(request.request_id)
            if state is not None:
                entries[name] = state.entries_per_head
    driver.runtime.check_integrity()
    together = {name: driver.tokens[name] for name in prompts}
    alone = {}
    for name, prompt in prompts.items():
        driver.generate({f"{name}-alone": prompt}, max_tokens)
        alone[name] = driver.tokens[f"{name}-alone"]
    driver.step()  # a step so that the worker learns of the ended requests
    driver.check_blocks()
    tracked = driver.check_policy_state()
    return {
        "together": together,
        "alone": alone,
        "held": held,
        "entries": entries,
        "tracked": tracked,
    }


def trace(
    model: str, policy: dict[str, Any], length: int, max_tokens: int
) -> dict[str, Any]:
    """One long prompt.

    Returns:
        ``bytes_held`` on the device after each step of the answer, without what was
        generated and without page lists; ``token_bytes``, keys and values of a token;
        ``host_bytes`` and ``reserved_bytes`` on the host, and the bytes of
        ``tokens_on_host``.
    """
    driver = Driver(make_llm(model, policy, max_num_batched_tokens=1024))
    driver.add("a", random_tokens(length, length, VOCABULARY), max_tokens)
    held, report = [], {}
    while driver.busy:
        driver.step()
        for request in driver.scheduler.running:
            state = driver.runtime.extensions[0]._requests.get(request.request_id)
            if state is None or request.num_computed_tokens <= length:
                continue
            ids = driver.manager.req_to_blocks[request.request_id]
            blocks = sum(not block.is_null for block in ids)
            size = driver.runtime.geometry.block_size
            # the last block is full up to the token that was just computed
            slots = blocks * size - (-request.num_computed_tokens % size)
            generated = request.num_computed_tokens - length
            token_bytes = driver.runtime.geometry.kv_bytes_per_token
            outside = driver.runtime.device_bytes(request.request_id)
            outside -= driver.runtime.tables.request_bytes
            held.append((slots - generated) * token_bytes + outside)
            factors = [layer.factors.result() for layer in state.layers]
            policy, geometry = driver.runtime.policy, driver.runtime.geometry
            spanned = state.segments.positions.numel()
            report = {
                "token_bytes": token_bytes,
                "host_bytes": sum(factor.nbytes for factor in factors),
                "tokens_on_host": spanned * token_bytes,
                "reserved_bytes": policy.spans.host_bytes(length, geometry),
                "ranks": sorted({int(r) for factor in factors for r in factor.ranks}),
            }
    return {"bytes_held": held, **report}
