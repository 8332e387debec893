"""Private parts of vLLM that we touch, all in one place, checked at start-up."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvplugins.residency.runtime import Row

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

KNOWN_VERSIONS = ("0.32", "0.33")


def vllm_version() -> str:
    """Version of the installed vLLM, such as ``0.32.0``."""
    import vllm

    return str(vllm.__version__)


def problems() -> list[str]:
    """Why this vLLM cannot be used, if so: unknown version, changed seams."""
    version = vllm_version()
    match = re.match(r"(\d+\.\d+)", version)
    if match is None or match[1] not in KNOWN_VERSIONS:
        return [
            f"vLLM {version} is not a version that this plugin was tested with; "
            f"install one of {', '.join(KNOWN_VERSIONS)}"
        ]
    return [
        f"vLLM {version}: {name} no longer takes {missing}; reinstall vLLM "
        f"({' or '.join(KNOWN_VERSIONS)}) or update vllm_kvplugins"
        for name, function, wanted in _seams()
        if (missing := _missing_parameters(function, wanted))
    ]


def _missing_parameters(function: Any, wanted: tuple[str, ...]) -> str:
    parameters = inspect.signature(function).parameters
    return ", ".join(name for name in wanted if name not in parameters)


def _seams() -> list[tuple[str, Any, tuple[str, ...]]]:
    """Methods that we override or call, with the parameters that we rely on."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    manager = SingleTypeKVCacheManager
    return [
        (
            "Scheduler._reserve_prefill_lookahead",
            Scheduler._reserve_prefill_lookahead,
            ("request", "num_computed_tokens", "num_new_tokens"),
        ),
        (
            "Scheduler._get_local_prefix_cache_hit",
            Scheduler._get_local_prefix_cache_hit,
            ("request",),
        ),
        (
            "SingleTypeKVCacheManager.remove_skipped_blocks",
            manager.remove_skipped_blocks,
            ("request_id", "processed_computed_tokens", "num_prompt_tokens"),
        ),
        (
            "SingleTypeKVCacheManager.cache_blocks",
            manager.cache_blocks,
            ("request", "num_tokens", "retention_interval"),
        ),
        (
            "SingleTypeKVCacheManager._remove_blocks_in_range",
            manager._remove_blocks_in_range,
            ("request_id", "first_block", "last_block"),
        ),
        (
            "KVCacheCoordinator.remove_skipped_blocks",
            KVCacheCoordinator.remove_skipped_blocks,
            ("num_prompt_tokens",),
        ),
        (
            "CPUAttentionBackendImpl.forward",
            CPUAttentionBackendImpl.forward,
            ("layer", "query", "kv_cache", "attn_metadata", "output"),
        ),
    ]


def clear_backend_cache() -> None:
    """Forget which attention backend was selected; the next model asks anew."""
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()


def kv_element_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of one cached element."""
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    name = vllm_config.cache_config.cache_dtype
    dtype = (
        vllm_config.model_config.dtype
        if name == "auto"
        else STR_DTYPE_TO_TORCH_DTYPE[name]
    )
    return int(torch.empty(0, dtype=dtype).element_size())


# -- model runners ---------------------------------------------------------------


class RunnerV1:
    """Rows of a step as model runner V1 keeps them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def rows(self, metadata: CommonAttentionMetadata) -> list[Row]:
        batch = self._runner.input_batch
        request_ids = batch.req_ids[: metadata.num_reqs]
        return _rows(metadata, request_ids, batch.num_prompt_tokens)


class RunnerV2:
    """Rows of a step as model runner V2 keeps them."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def rows(self, metadata: CommonAttentionMetadata) -> list[Row]:
        states = self._runner.req_states
        indices = metadata.req_idx
        if indices is None:  # a dummy batch has no requests
            return []
        live = [i for i in indices.tolist() if i in states.index_to_req_id]
        request_ids = [states.index_to_req_id[i] for i in live]
        return _rows(metadata, request_ids, states.prompt_len.np[live])


def _rows(
    metadata: CommonAttentionMetadata, request_ids: list[str], prompt_tokens: Any
) -> list[Row]:
    if len(request_ids) != metadata.num_reqs:  # a dummy batch: warm-up, profiling
        return []
    starts = metadata.query_start_loc_cpu.tolist()
    seq_lens = metadata.seq_lens.tolist()
    return [
        Row(
            request_id=request_id,
            prompt_tokens=int(prompt_tokens[i]),
            computed_tokens=seq_lens[i] - (starts[i + 1] - starts[i]),
            new_tokens=starts[i + 1] - starts[i],
            first_query=starts[i],
        )
        for i, request_id in enumerate(request_ids)
    ]


def runner_adapter(runner: Any) -> RunnerV1 | RunnerV2:
    """The adapter for this worker's model runner."""
    return RunnerV2(runner) if hasattr(runner, "req_states") else RunnerV1(runner)
