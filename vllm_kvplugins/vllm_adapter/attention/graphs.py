"""Which decode steps CUDA graphs can include, and the page table that they read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_kvplugins.engine.page_table import FixedTable, TableShape

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_kvplugins.engine.runtime import PolicyRuntime

logger = logging.getLogger("vllm.kv_policy")

# Limit of the page table. vLLM does not count it when it sizes the KV cache.
MAX_TABLE_BYTES = 256 << 20


def table_shape(vllm_config: VllmConfig, runtime: PolicyRuntime) -> TableShape:
    """Shape of a page table for every decode step that vLLM captures or replays."""
    geometry = runtime.geometry
    uniform = runtime.policy.page_allocator().uniform
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return TableShape(
        1 if uniform else geometry.num_layers,
        min(vllm_config.scheduler_config.max_num_seqs, captured),
        geometry.num_kv_heads,
        # A KV head has at most the tokens of the request.
        -(-vllm_config.model_config.max_model_len // geometry.block_size),
    )


def problems(vllm_config: VllmConfig, runtime: PolicyRuntime) -> list[str]:
    """Reasons why CUDA graphs cannot include decode steps."""
    if not runtime.observer.decode_needs_only_page_lists:
        return [f"{runtime.policy.name} runs host code between layers of decode steps"]
    plan = runtime.plan(vllm_config.model_config.max_model_len)
    decoding = plan.decode_compaction
    size = runtime.geometry.block_size
    interval = decoding.interval_blocks * size if decoding else 0
    num_queries = runtime.policy.queries_needed
    if 0 < interval <= num_queries:
        return [
            f"{runtime.policy.name} compacts answers every {interval} tokens with the "
            f"last {num_queries} queries, so it needs the queries of every step"
        ]
    shape = table_shape(vllm_config, runtime)
    if shape.num_bytes > MAX_TABLE_BYTES:
        return [
            f"page lists of {shape.scopes} x {shape.rows} requests x {shape.heads} KV "
            f"heads x {shape.pages} pages take {shape.num_bytes >> 20} MiB, more than "
            f"{MAX_TABLE_BYTES >> 20}; lower --max-num-seqs or --max-model-len"
        ]
    return []


def fixed_table(
    vllm_config: VllmConfig,
    runtime: PolicyRuntime,
    device: torch.device,
    problems: list[str],
) -> FixedTable | None:
    """The page table that graphs read; None if graphs do not include attention.

    Args:
        problems: reasons why graphs cannot include decode steps; the first is logged.
    """
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return None
    if problems:
        reason = problems[0]
        logger.info("KV policy: attention stays outside of CUDA graphs: %s", reason)
        return None
    shape = table_shape(vllm_config, runtime)
    runtime.graph_table_bytes = shape.num_bytes
    return FixedTable(shape, device)
