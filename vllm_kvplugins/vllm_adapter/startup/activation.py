"""Switching a policy on in vLLM's configuration.

``prepared`` and ``finish_config`` point the configuration at our scheduler, worker and
connector. The worker then builds its model on our attention backend
(``worker.context``). ``deactivate`` undoes that when the same process builds an engine
without a policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.config import CONFIG_KEY, parse_policy
from vllm_kvplugins.errors import refuse
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config import (
    compat,
    host_memory,
    kernel_choice,
    kv_connectors,
    layer_budgets,
    layer_groups,
    speculation,
    validation,
)
from vllm_kvplugins.vllm_adapter.config.engine_config import (
    fingerprint_of,
    geometry_of,
    has_other_layers,
    is_on_several_nodes,
    layer_types_of,
    remember_measured,
)
from vllm_kvplugins.vllm_adapter.frontend import message_tokens
from vllm_kvplugins.vllm_adapter.scheduler import session_config
from vllm_kvplugins.vllm_adapter.worker import probing, surprisal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.kv_policy")

_PACKAGE = "vllm_kvplugins.vllm_adapter"
_CPU_WORKER = f"{_PACKAGE}.worker.cpu_worker.KVPolicyCPUWorker"
_GPU_WORKER = f"{_PACKAGE}.worker.gpu_worker.KVPolicyGPUWorker"
# On CPUs, smaller than vLLM's default of 128, because large pages waste a part of the
# budget. On GPUs, vLLM's default, but explicit: otherwise vLLM lets the backend choose.
_CPU_BLOCK_SIZE, _GPU_BLOCK_SIZE = 32, 16


# -- front end: the configuration ---------------------------------------------


def configured(
    args: EngineArgs, request: Any, build: Callable[[EngineArgs], VllmConfig]
) -> VllmConfig:
    """The configuration of an engine with a policy.

    Args:
        args: ``additional_config`` holds the request.
        request: what the user asked for, for ``parse_policy``.
        build: vLLM's ``create_engine_config``.

    Raises:
        KVPolicyError: the policy cannot run like this; lists all reasons.
    """
    policy = parse_policy(request)
    with prepared(args, policy):
        vllm_config = build(args)
    finish_config(args, vllm_config, policy)
    return vllm_config


def default_block_size() -> int:
    """Tokens per block with a policy, unless the user sets ``--block-size``."""
    from vllm.platforms import current_platform

    return _CPU_BLOCK_SIZE if current_platform.is_cpu() else _GPU_BLOCK_SIZE


@contextmanager
def prepared(args: EngineArgs, policy: KVCachePolicy) -> Iterator[None]:
    """Set our connector and block size while vLLM resolves its configuration.

    Restores the user's arguments on exit.

    Raises:
        KVPolicyError: some arguments contradict a policy; lists all of them.
    """
    # Before all other checks, which may fail to import on an unknown vLLM.
    refuse(f"KV policy {policy.name!r} cannot run on this vLLM", compat.problems())

    refuse(
        f"KV policy {policy.name!r} cannot run with these engine settings",
        validation.argument_problems(args),
    )
    saved = (args.kv_transfer_config, args.block_size)
    args.kv_transfer_config = kv_connectors.composed(args.kv_transfer_config)
    if args.block_size is None:
        args.block_size = default_block_size()
    try:
        with speculation.without_async_scheduling(args):
            yield
    finally:
        args.kv_transfer_config, args.block_size = saved


def finish_config(
    args: EngineArgs, vllm_config: VllmConfig, policy: KVCachePolicy
) -> None:
    """Check the resolved configuration and set our scheduler and worker classes.

    Also resolves settings that the user left open, so that all processes use the same
    values.

    Raises:
        KVPolicyError: the model or the engine cannot run with a policy; lists all
            reasons.
    """
    from vllm.platforms import current_platform

    config = vllm_config.additional_config
    request = config[CONFIG_KEY]
    if isinstance(request, str):
        request = {"name": request}
    probing.leave_positions(vllm_config, policy)
    layer_groups.align_block_size(vllm_config)
    refuse(
        f"KV policy {policy.name!r} cannot run with these engine settings",
        [
            *validation.config_problems(vllm_config),
            *_hybrid_problems(args, vllm_config, request, policy),
            *kernel_choice.problems(vllm_config, request),
            *validation.dtype_problems(
                policy,
                vllm_config.model_config,
                vllm_config.cache_config.cache_dtype,
            ),
            *validation.fp8_problems(vllm_config, policy),
            *session_config.fp8_problems(request, vllm_config.cache_config.cache_dtype),
            *session_config.store_problems(request, policy),
            *validation.softcap_problems(policy, vllm_config.model_config),
            *_shape_problems(vllm_config, policy),
            *speculation.problems(vllm_config, policy, layer_types_of(vllm_config)),
            *kv_connectors.problems(vllm_config, policy, layer_types_of(vllm_config)),
            *probing.problems(vllm_config, policy),
            *surprisal.problems(vllm_config, policy),
            *validation.episode_problems(policy),
            *validation.prefix_problems(vllm_config, request),
            *host_memory.fetch_problems(policy),
        ],
    )
    _install_front_end(vllm_config, policy)
    for remark in policy.remarks:
        logger.info("KV policy %s: %s", policy.name, remark)
    request = layer_budgets.resolve_allocator(
        request,
        policy,
        lambda: fingerprint_of(vllm_config),
        one_machine=not is_on_several_nodes(args),
    )
    request = message_tokens.resolve_message_tokens(
        request, policy, lambda: _tokenizer(vllm_config)
    )
    request = session_config.resolve(request, policy)
    request = kernel_choice.resolve_kernel(request, vllm_config)
    vllm_config.additional_config = config | {CONFIG_KEY: request}
    measured = host_memory.measured(policy) | session_config.measured(request)
    remember_measured(vllm_config, measured)
    scheduler = vllm_config.scheduler_config
    if kv_connectors.is_composed(vllm_config):
        # As vLLM does for connectors that manage one group of layers; others are
        # refused.
        scheduler.disable_hybrid_kv_cache_manager = True
    kind = (
        "KVPolicyAsyncScheduler" if scheduler.async_scheduling else "KVPolicyScheduler"
    )
    scheduler.scheduler_cls = f"{_PACKAGE}.scheduler.scheduler.{kind}"
    on_cpu = current_platform.is_cpu()
    vllm_config.parallel_config.worker_cls = _CPU_WORKER if on_cpu else _GPU_WORKER


def _install_front_end(vllm_config: VllmConfig, policy: KVCachePolicy) -> None:
    """Wrap the methods of vLLM that the front end needs for this policy.

    Runs in every front-end process, because each one builds its own configuration, also
    with ``--api-server-count`` (vLLM's ``build_async_engine_client_from_engine_args``).
    Never runs in a process of a stock server.
    """
    from vllm_kvplugins.vllm_adapter.frontend import (
        request_validation,
        shared_prefix,
        stream_reports,
    )

    request_validation.install()
    stream_reports.install()
    finds_prefix = shared_prefix.are_found_in_chats(vllm_config, policy)
    if policy.turns is not None or finds_prefix:
        from vllm_kvplugins.vllm_adapter.frontend import chat_turns

        chat_turns.install()
    if policy.episode_routing is not None:
        from vllm_kvplugins.vllm_adapter.frontend import (
            encoder_start,
            episode_builds,
            session_choice,
        )

        episode_builds.install()
        encoder_start.install()
        session_choice.install()


def _tokenizer(vllm_config: VllmConfig) -> Any:
    """The model's tokenizer, or None if the engine has none."""
    if vllm_config.model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def _hybrid_problems(
    args: EngineArgs,
    vllm_config: VllmConfig,
    request: dict[str, Any],
    policy: KVCachePolicy,
) -> list[str]:
    """Why the policy cannot run with other layers than full attention, if any.

    Turns on vLLM's hybrid KV cache manager where vLLM, not the user, turned it off: it
    does so for chunked attention, because of its latency.
    """
    if not has_other_layers(vllm_config):
        return []
    scheduler = vllm_config.scheduler_config
    turned_off = scheduler.disable_hybrid_kv_cache_manager
    if turned_off and not args.disable_hybrid_kv_cache_manager:
        scheduler.disable_hybrid_kv_cache_manager = False
        logger.info(
            "KV policy %s: the hybrid KV cache manager is on, because the policy "
            "manages the full-attention layers only",
            policy.name,
        )
    return [
        *validation.hybrid_manager_problems(vllm_config),
        *validation.prefix_unit_problems(vllm_config.cache_config),
        *validation.hybrid_problems(
            layer_types_of(vllm_config), policy, vllm_config.model_config
        ),
        *session_config.hybrid_problems(request, policy),
    ]


def _shape_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Why the policy cannot run with the model's layers, heads or weights."""
    geometry = geometry_of(vllm_config)
    allocator = policy.page_allocator()
    return [
        *allocator.problems(geometry.num_layers, geometry.num_kv_heads),
        *allocator.model_problems(lambda: fingerprint_of(vllm_config)),
        *policy.model_problems(lambda: fingerprint_of(vllm_config)),
    ]


def deactivate() -> None:
    """Restore the stock backend for an engine without a policy in this process."""
    from vllm_kvplugins.vllm_adapter.worker.context import restore_stock_backend

    restore_stock_backend()
