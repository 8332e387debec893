"""Switching a policy on: in the configuration, and in each process.

Front end: ``prepared`` and ``finish_config`` point vLLM's configuration at our
scheduler, worker and connector. Worker: ``activate`` puts our attention backend
in the place of the stock one, for this process only. ``deactivate`` undoes that
when the same process goes on to build an engine without a policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.config import CONFIG_KEY, parse_sessions
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.errors import KVPolicyError, coded, refuse
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.sessions.store import SessionStore
from vllm_kvplugins.sessions.transfer import Transfer
from vllm_kvplugins.vllm_adapter.config import (
    compat,
    host_memory,
    kernel_choice,
    layer_budgets,
    validation,
)
from vllm_kvplugins.vllm_adapter.config.engine_config import (
    fingerprint_of,
    geometry_of,
    policy_of,
    remember_measured,
    request_of,
)
from vllm_kvplugins.vllm_adapter.frontend import turn_ends
from vllm_kvplugins.vllm_adapter.scheduler import session_config
from vllm_kvplugins.vllm_adapter.worker import probing, surprisal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.kv_policy")

_PACKAGE = "vllm_kvplugins.vllm_adapter"
CONNECTOR_NAME = "KVPolicyConnector"
CONNECTOR_MODULE = f"{_PACKAGE}.scheduler.connector"
_CPU_WORKER = f"{_PACKAGE}.worker.cpu_worker.KVPolicyCPUWorker"
_GPU_WORKER = f"{_PACKAGE}.worker.gpu_worker.KVPolicyGPUWorker"
# On CPUs, smaller than vLLM's default of 128, because large pages waste a part of the
# budget. On GPUs, vLLM's default, but explicit: otherwise vLLM lets the backend choose.
_CPU_BLOCK_SIZE, _GPU_BLOCK_SIZE = 32, 16


# -- front end: the configuration ---------------------------------------------


@contextmanager
def prepared(args: EngineArgs, policy: KVCachePolicy) -> Iterator[None]:
    """Set our connector and block size while vLLM resolves its configuration.

    Restores the user's arguments on exit.

    Raises:
        KVPolicyError: some arguments contradict a policy; lists all of them.
    """
    # Before all other checks, which may fail to import on an unknown vLLM.
    refuse(f"KV policy {policy.name!r} cannot run on this vLLM", compat.problems())

    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    refuse(
        f"KV policy {policy.name!r} cannot run with these engine settings",
        validation.argument_problems(args),
    )
    saved = (args.kv_transfer_config, args.block_size)
    args.kv_transfer_config = KVTransferConfig(
        kv_connector=CONNECTOR_NAME,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
    )
    if args.block_size is None:
        on_cpu = current_platform.is_cpu()
        args.block_size = _CPU_BLOCK_SIZE if on_cpu else _GPU_BLOCK_SIZE
    try:
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
    refuse(
        f"KV policy {policy.name!r} cannot run with these engine settings",
        [
            *validation.config_problems(vllm_config),
            *kernel_choice.problems(vllm_config, request),
            *validation.dtype_problems(policy, vllm_config.model_config),
            *_shape_problems(vllm_config, policy),
            *probing.problems(vllm_config, policy),
            *surprisal.problems(vllm_config, policy),
            *validation.episode_problems(policy),
            *host_memory.fetch_problems(policy),
        ],
    )
    _install_front_end(policy)
    for remark in policy.remarks:
        logger.info("KV policy %s: %s", policy.name, remark)
    request = layer_budgets.resolve_allocator(
        request, policy, lambda: fingerprint_of(vllm_config)
    )
    request = turn_ends.resolve_turn_end_token(
        request, policy, lambda: _tokenizer(vllm_config)
    )
    request = session_config.resolve(request, policy)
    request = kernel_choice.resolve_kernel(request, vllm_config)
    vllm_config.additional_config = config | {CONFIG_KEY: request}
    measured = host_memory.measured(policy) | session_config.measured(request)
    remember_measured(vllm_config, measured)
    scheduler = vllm_config.scheduler_config
    kind = (
        "KVPolicyAsyncScheduler" if scheduler.async_scheduling else "KVPolicyScheduler"
    )
    scheduler.scheduler_cls = f"{_PACKAGE}.scheduler.scheduler.{kind}"
    on_cpu = current_platform.is_cpu()
    vllm_config.parallel_config.worker_cls = _CPU_WORKER if on_cpu else _GPU_WORKER


def _install_front_end(policy: KVCachePolicy) -> None:
    """Wrap the methods of vLLM that the front end needs for this policy.

    Runs in every front-end process, because each one builds its own configuration, also
    with ``--api-server-count`` (vLLM's ``build_async_engine_client_from_engine_args``).
    Never runs in a process of a stock server.
    """
    from vllm_kvplugins.vllm_adapter.frontend import request_validation

    request_validation.install()
    if policy.turns is not None:
        from vllm_kvplugins.vllm_adapter.frontend import chat_turns

        chat_turns.install()
    if policy.episode_routing is not None:
        from vllm_kvplugins.vllm_adapter.frontend import episode_builds

        episode_builds.install()


def _tokenizer(vllm_config: VllmConfig) -> Any:
    """The model's tokenizer, or None if the engine has none."""
    if vllm_config.model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


def _shape_problems(vllm_config: VllmConfig, policy: KVCachePolicy) -> list[str]:
    """Why the policy cannot run with the model's layers, heads or weights."""
    geometry = geometry_of(vllm_config)
    allocator = policy.page_allocator()
    return [
        *allocator.problems(geometry.num_layers, geometry.num_kv_heads),
        *allocator.model_problems(lambda: fingerprint_of(vllm_config)),
        *policy.model_problems(lambda: fingerprint_of(vllm_config)),
    ]


# -- worker: this process ---------------------------------------------------------


@dataclass(slots=True)
class _Process:
    runtime: PolicyRuntime | None = None
    # sessions of this worker, if they are kept
    vault: SessionStore | None = None
    # gives the runtime its heap; set when the attention backend exists
    attach: Callable[[], None] | None = None
    # adapter around this process's model runner; set when the runner exists
    runner: Any = None
    # asks the model about its steps, if the policy wants to know
    losses: surprisal.LogitsSurprisal | None = None


_process = _Process()


def activate(vllm_config: VllmConfig) -> PolicyRuntime:
    """Make this process build its model on our attention backend."""
    policy = policy_of(vllm_config)
    if policy is None:
        raise KVPolicyError(
            coded(
                "KVP009",
                "the worker of vllm_kvplugins was started without a KV policy; use "
                "--kv-policy instead of --worker-cls",
            )
        )
    request = request_of(vllm_config)
    assert isinstance(request, dict), "not settled"
    kernel_choice.register(request)
    compat.forget_previous_engine()
    kept = parse_sessions(request).sessions
    _close_losses()
    _process.runtime = PolicyRuntime(policy, geometry_of(vllm_config), bool(kept))
    _process.runner = _process.attach = _process.vault = None
    if kept:
        files = session_config.session_folder(vllm_config)
        moves = policy.retrieval is not None
        _process.vault = SessionStore(
            Transfer(_process.runtime), files, vllm_config.parallel_config.rank, moves
        )
    return _process.runtime


def deactivate() -> None:
    """Restore the stock backend for whatever this process builds next."""
    if _process.runtime is None:
        return
    kernel_choice.unregister()
    compat.forget_previous_engine()
    _close_losses()
    _process.runtime = _process.runner = _process.attach = _process.vault = None


def runtime() -> PolicyRuntime:
    """The runtime of the engine that this process is building."""
    assert _process.runtime is not None, "no policy is active in this process"
    return _process.runtime


def vault() -> SessionStore | None:
    """The sessions of this worker, if they are kept."""
    return _process.vault


def set_attach(attach: Callable[[], None]) -> None:
    """Remember how the runtime gets its heap, and forget the one that it has: vLLM
    builds a small cache to measure graphs with, throws it away, and begins again."""
    runtime().detach()
    _close_losses()
    _process.attach = attach


def attach() -> None:
    """Give the runtime its heap, if it has none yet."""
    if runtime().heap is None:
        assert _process.attach is not None, "there is no attention backend yet"
        _process.attach()


def losses(model: Any) -> surprisal.LogitsSurprisal:
    """What asks the model about its steps, as long as the runtime has this heap."""
    _close_losses()
    _process.losses = surprisal.LogitsSurprisal(model)
    return _process.losses


def _close_losses() -> None:
    if _process.losses is not None:
        _process.losses.close()
    _process.losses = None


def set_runner(adapter: Any) -> None:
    """Remember the adapter around this process's model runner."""
    _process.runner = adapter


def runner() -> Any:
    """The model-runner adapter of this process."""
    assert _process.runner is not None, "the model runner does not exist yet"
    return _process.runner
