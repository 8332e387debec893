"""Validates single requests under a policy.

A rejected client gets HTTP 400; the engine keeps running.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.v1.engine.input_processor import InputProcessor

from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.errors import coded
from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.plan.geometry import Lengths
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.engine_config import (
    geometry_of,
    policy_of,
    request_of,
)
from vllm_kvplugins.vllm_adapter.config.host_memory import host_limit_problem
from vllm_kvplugins.vllm_adapter.config.layer_groups import other_blocks
from vllm_kvplugins.vllm_adapter.config.pool import blocks_per_engine, pool_problem
from vllm_kvplugins.vllm_adapter.config.request_params import (
    KV_REPORT,
    KV_SESSION,
    LOOP_ENDS,
    SHARED_PREFIX,
    TTL,
    kv_report_problem,
    kv_session_problem,
    loop_ends_problem,
    patched_prompt_problem,
    requested_loop_ends,
    requested_patched_prompt,
    requested_shared_prefix,
    requested_turn_ends,
    shared_blocks,
    shared_prefix_problem,
    shown,
    transfer_problem,
    ttl_problem,
    turn_ends_problem,
)
from vllm_kvplugins.vllm_adapter.frontend import (
    chat_episodes,
    chat_turns,
    shared_prefix,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kv_policy")

_INSTALLED = "_kvplugins_installed"
_throttle = LogThrottle()


def install() -> None:
    """Wrap the method in which vLLM validates requests; idempotent."""
    if getattr(InputProcessor, _INSTALLED, False):
        return
    setattr(InputProcessor, _INSTALLED, True)
    original = InputProcessor.process_inputs
    signature = inspect.signature(original)

    @functools.wraps(original)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        policy = policy_of(self.vllm_config)
        if policy is None:
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        if arguments.get("resumable"):
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
        prompt = arguments.get("prompt")
        if policy.turns is not None:
            chat_turns.add_parameters(policy, prompt, request.sampling_params)
        _check_shared_prefix(self.vllm_config, policy, request)
        shared_prefix.add_parameter(
            self.vllm_config, policy, prompt, request.sampling_params
        )
        _validate(self.vllm_config, policy, request)
        chat_episodes.save_clustering(prompt, request.sampling_params)
        return request

    InputProcessor.process_inputs = process_inputs


def _validate(vllm_config: VllmConfig, policy: KVCachePolicy, request: Any) -> None:
    """Check a request that vLLM accepts.

    Raises:
        VLLMValidationError: the first problem that was found.
    """
    problem = transfer_problem(request.sampling_params)
    if problem is not None:
        raise VLLMValidationError(problem, parameter="kv_transfer_params")
    problem = kv_report_problem(request.sampling_params)
    if problem is not None:
        raise VLLMValidationError(problem, parameter=KV_REPORT)
    _check_kv_session(vllm_config, request)
    if policy.host_storage is not None:
        _check_host_memory(vllm_config, policy, request)
    if policy.spans is not None:
        _check_tokens(policy, request)
    if policy.turns is not None:
        _check_turn_ends(request)
    _check_patched_prompt(vllm_config, policy, request)
    _check_pool(vllm_config, policy, request)


def _fit_answer(
    vllm_config: VllmConfig, request: Any, problem_of: Callable[[int], str | None]
) -> None:
    """Reject a request whose answer has no room, or shorten an answer without a limit.

    A client that names no ``max_tokens`` asks for all that the context leaves. vLLM has
    then written this number into the request, and it means as many as there are.

    Args:
        problem_of: why an answer of so many tokens has no room; None if it has. A
            longer answer needs at least as much.

    Raises:
        VLLMValidationError: there is no room.
    """
    params = request.sampling_params
    max_tokens = params.max_tokens or 0
    problem = problem_of(max_tokens)
    if problem is None:
        return
    left = vllm_config.model_config.max_model_len - _prompt_tokens(request)
    fitting = 0
    if max_tokens >= left:
        answers = range(1, max_tokens + 1)
        fitting = bisect_left(answers, True, key=lambda n: problem_of(n) is not None)
    if fitting < max(params.min_tokens, 1):
        raise VLLMValidationError(problem, parameter="max_tokens", value=max_tokens)
    params.max_tokens = fitting
    text = _throttle.format(
        f"an answer without max_tokens is limited to {fitting} instead of {left} "
        "tokens, because no more fit under the KV policy"
    )
    if text is not None:
        logger.info("%s", text)


def _prompt_tokens(request: Any) -> int:
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    return len(ids if ids is not None else embeds)


def _check_host_memory(
    vllm_config: VllmConfig, policy: KVCachePolicy, request: Any
) -> None:
    if request.sampling_params is None:
        return
    geometry, prompt_tokens = geometry_of(vllm_config), _prompt_tokens(request)
    _fit_answer(
        vllm_config,
        request,
        lambda answer: host_limit_problem(policy, geometry, prompt_tokens + answer),
    )


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
        value = shown(requested_turn_ends(request.sampling_params))
        raise VLLMValidationError(problem, parameter="turn_ends", value=value)
    problem = loop_ends_problem(request.sampling_params, tokens)
    if problem is not None:
        value = shown(requested_loop_ends(request.sampling_params))
        raise VLLMValidationError(problem, parameter=LOOP_ENDS, value=value)


def _check_kv_session(vllm_config: VllmConfig, request: Any) -> None:
    params = request.sampling_params
    extra_args = getattr(params, "extra_args", None) or {}
    if KV_SESSION not in extra_args and TTL not in extra_args:
        return
    sessions_on = bool(parse_sessions(request_of(vllm_config)).sessions)
    problem = kv_session_problem(params, sessions_on)
    if problem is not None:
        raise VLLMValidationError(problem, parameter=KV_SESSION)
    problem = ttl_problem(params, sessions_on)
    if problem is not None:
        raise VLLMValidationError(problem, parameter=TTL)


def _check_shared_prefix(
    vllm_config: VllmConfig, policy: KVCachePolicy, request: Any
) -> None:
    params = request.sampling_params
    are_shared = shared_prefix.settings_of(vllm_config, policy) is not None
    problem = shared_prefix_problem(params, are_shared)
    if problem is not None:
        value = shown(requested_shared_prefix(params))
        raise VLLMValidationError(problem, parameter=SHARED_PREFIX, value=value)


def _check_patched_prompt(
    vllm_config: VllmConfig, policy: KVCachePolicy, request: Any
) -> None:
    vocab_size = vllm_config.model_config.get_vocab_size()
    problem = patched_prompt_problem(request.sampling_params, policy, vocab_size)
    if problem is not None:
        value = shown(requested_patched_prompt(request.sampling_params))
        raise VLLMValidationError(problem, parameter="patched_prompt", value=value)


def _check_pool(vllm_config: VllmConfig, policy: KVCachePolicy, request: Any) -> None:
    """Reject requests that can never run, although vLLM's own check admits them.

    vLLM checks at start-up that a prompt of ``max_model_len`` tokens fits into the
    pool. A policy that bounds the blocks of a prompt needs fewer blocks for that than
    some answers need.
    """
    geometry = geometry_of(vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    is_bounded = policy.max_prompt_blocks(max_model_len, geometry) is not None
    if request.sampling_params is None or not is_bounded:
        return
    prompt_tokens = _prompt_tokens(request)
    blocks = blocks_per_engine(vllm_config)
    assert blocks is not None, "requests arrive after the engine has started"
    pool_blocks = blocks
    prompt = request.prompt_token_ids or ()
    requested = requested_turn_ends(request.sampling_params)
    turn_ends = policy.find_turn_ends(prompt, requested)
    requested = requested_loop_ends(request.sampling_params)
    loops = policy.find_tool_loops(prompt, turn_ends, requested)
    runs_ahead = bool(vllm_config.scheduler_config.async_scheduling)

    def problem_of(answer_tokens: int, shared: int) -> str | None:
        lengths = Lengths(prompt_tokens, turn_ends, None, shared, loops)
        return pool_problem(
            policy,
            policy.plan_request(lengths, geometry),
            prompt_tokens,
            answer_tokens,
            pool_blocks,
            runs_ahead,
            other_blocks(vllm_config, prompt_tokens + answer_tokens),
            vllm_config.num_lookahead_tokens,
            max_model_len,
        )

    shared = _fitting_prefix(vllm_config, policy, request, problem_of)
    _fit_answer(vllm_config, request, lambda answer: problem_of(answer, shared))


def _fitting_prefix(
    vllm_config: VllmConfig,
    policy: KVCachePolicy,
    request: Any,
    problem_of: Callable[[int, int], str | None],
) -> int:
    """Blocks of the request's shared prefix; makes it shorter if it does not fit.

    The bound of a policy on the blocks of prompts counts the tokens behind the prefix.
    A request that fits without a prefix is therefore never rejected because of it.

    Args:
        problem_of: why an answer of so many tokens does not fit behind a prefix of so
            many blocks; None if it does. A longer prefix needs more.
    """
    params = request.sampling_params
    size, prompt_tokens = geometry_of(vllm_config).block_size, _prompt_tokens(request)
    shared = shared_blocks(policy, params, prompt_tokens, size)
    if not shared:
        return 0
    is_limited = (params.max_tokens or 0) < (
        vllm_config.model_config.max_model_len - prompt_tokens
    )
    # An answer without a limit takes what is left.
    answer = params.max_tokens if is_limited else max(params.min_tokens, 1)
    longer = range(1, shared + 1)
    fitting = bisect_left(longer, True, key=lambda n: problem_of(answer, n) is not None)
    if fitting < shared:
        params.extra_args = params.extra_args | {SHARED_PREFIX: fitting * size}
    return fitting
