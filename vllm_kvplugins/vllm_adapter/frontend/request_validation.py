"""Validates single requests under a policy. A rejected client gets HTTP 400."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvplugins.errors import coded
from vllm_kvplugins.plan.geometry import Lengths
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of, policy_of
from vllm_kvplugins.vllm_adapter.config.host_memory import too_long
from vllm_kvplugins.vllm_adapter.config.pool import blocks_per_engine, too_large
from vllm_kvplugins.vllm_adapter.config.turns import (
    asked_patched_prompt,
    asked_turn_ends,
    patched_prompt_problem,
    turn_ends_problem,
)
from vllm_kvplugins.vllm_adapter.frontend import chat_turns

_INSTALLED = "_kvplugins_installed"


def install() -> None:
    """Wrap the function in which vLLM validates requests; idempotent."""
    if getattr(InputProcessor, _INSTALLED, False):
        return
    setattr(InputProcessor, _INSTALLED, True)
    original = InputProcessor.process_inputs
    signature = inspect.signature(original)

    @functools.wraps(original)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        asked = signature.bind(self, *args, **kwargs).arguments
        policy = policy_of(self.vllm_config)
        if policy is not None and asked.get("resumable"):
            raise VLLMValidationError(
                coded(
                    "KVP500",
                    f"streaming input is not supported with KV policy {policy.name!r}; "
                    "send the whole prompt in one request",
                ),
                parameter="resumable",
                value=True,
            )
        request = original(self, *args, **kwargs)
        if policy is not None and policy.host_storage is not None:
            _check_host_memory(self.vllm_config, policy, request)
        if policy is not None and policy.spans is not None:
            _check_tokens(policy, request)
        if policy is not None and policy.turns is not None:
            chat_turns.pass_on(policy, asked.get("prompt"), request.sampling_params)
            _check_turn_ends(request)
        if policy is not None:
            _check_patched_prompt(self.vllm_config, policy, request)
            _check_pool(self.vllm_config, policy, request)
        return request

    InputProcessor.process_inputs = process_inputs


def _check_host_memory(vllm_config: Any, policy: KVCachePolicy, request: Any) -> None:
    if request.sampling_params is None:
        return
    answer = request.sampling_params.max_tokens or 0
    tokens = len(request.prompt_token_ids or ()) + answer
    problem = too_long(policy, geometry_of(vllm_config), tokens)
    if problem is not None:
        raise VLLMValidationError(problem, parameter="max_tokens", value=answer)


def _check_tokens(policy: KVCachePolicy, request: Any) -> None:
    if request.prompt_token_ids is None:
        raise VLLMValidationError(
            coded(
                "KVP503",
                f"KV policy {policy.name!r} needs the surprisal of each prompt token, "
                "which embeddings do not have; send token IDs or text",
            ),
            parameter="prompt_embeds",
        )


def _check_turn_ends(request: Any) -> None:
    tokens = len(request.prompt_token_ids or ())
    problem = turn_ends_problem(request.sampling_params, tokens)
    if problem is not None:
        asked = asked_turn_ends(request.sampling_params)
        raise VLLMValidationError(problem, parameter="turn_ends", value=asked)


def _check_patched_prompt(
    vllm_config: Any, policy: KVCachePolicy, request: Any
) -> None:
    vocabulary = vllm_config.model_config.get_vocab_size()
    problem = patched_prompt_problem(request.sampling_params, policy, vocabulary)
    if problem is not None:
        asked = asked_patched_prompt(request.sampling_params)
        raise VLLMValidationError(problem, parameter="patched_prompt", value=asked)


def _check_pool(vllm_config: Any, policy: KVCachePolicy, request: Any) -> None:
    """Reject requests that never fit and that vLLM's start-up check admits."""
    geometry, longest = geometry_of(vllm_config), vllm_config.model_config.max_model_len
    bounded = policy.max_prompt_blocks(longest, geometry) is not None
    if request.sampling_params is None or not bounded:
        return
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    prompt = len(ids if ids is not None else embeds)
    answer = request.sampling_params.max_tokens or 0
    pool = blocks_per_engine(vllm_config)
    assert pool is not None, "a request before the engine's start-up"
    turns = policy.find_turn_ends(ids or (), asked_turn_ends(request.sampling_params))
    plan = policy.plan(Lengths(prompt, turns), geometry)
    ahead = bool(vllm_config.scheduler_config.async_scheduling)
    problem = too_large(policy, plan, prompt, answer, pool, ahead)
    if problem is not None:
        raise VLLMValidationError(problem, parameter="max_tokens", value=answer)
