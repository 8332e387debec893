"""Which decoding steps CUDA graphs may hold, and the page table that they read."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_kvplugins.engine.page_table import FixedTable, TableShape

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from vllm_kvplugins.engine.runtime import PolicyRuntime

logger = logging.getLogger("vllm.kv_policy")

# vLLM does not count it when it decides how much memory the cache gets.
MOST_TABLE_BYTES = 256 << 20


def table_shape(vllm_config: VllmConfig, runtime: PolicyRuntime) -> TableShape:
    """Of a table for any decoding step that vLLM captures or replays."""
    geometry = runtime.geometry
    uniform = runtime.policy.page_allocator().uniform
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    return TableShape(
        1 if uniform else geometry.num_layers,
        min(vllm_config.scheduler_config.max_num_seqs, captured),
        geometry.num_kv_heads,
        # no KV head has more tokens than the request
        -(-vllm_config.model_config.max_model_len // geometry.block_size),
    )


def problems(vllm_config: VllmConfig, runtime: PolicyRuntime) -> list[str]:
    """Why no graph may hold a decoding step."""
    if not runtime.observer.decode_needs_only_page_lists:
        return [f"{runtime.policy.name} works between the layers of decoding steps"]
    plan = runtime.plan(vllm_config.model_config.max_model_len)
    decoding = plan.decode_compaction
    size = runtime.geometry.block_size
    interval = decoding.interval_blocks * size if decoding else 0
    num_queries = runtime.policy.queries_needed
    if 0 < interval <= num_queries:
        return [
            f"{runtime.policy.name} compacts answers every {interval} tokens by the "
            f"last {num_queries} queries, so it needs those of every step"
        ]
    shape = table_shape(vllm_config, runtime)
    if shape.num_bytes > MOST_TABLE_BYTES:
        return [
            f"page lists of {shape.rows} requests with {shape.pages} pages for each of "
            f"{shape.heads} KV heads, {shape.scopes} times, take "
            f"{shape.num_bytes >> 20} MiB, more than {MOST_TABLE_BYTES >> 20}; lower "
            "--max-num-seqs or --max-model-len"
        ]
    return []


def fixed_table(
    vllm_config: VllmConfig,
    runtime: PolicyRuntime,
    device: torch.device,
    why_not: list[str],
) -> FixedTable | None:
    """The table that graphs read; None if there are no graphs with attention in them,
    which the log explains."""
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return None
    if why_not:
        logger.info("KV policy: attention stays outside of CUDA graphs: %s", why_not[0])
        return None
    return FixedTable(table_shape(vllm_config, runtime), device)
