"""vLLM's FlashAttention over the page heap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
)

from vllm_kvplugins.engine.page_table import FlatTable
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.vllm_adapter.attention.flat import (
    PolicyImpl,
    Scope,
    flat_queries,
    in_flat_order,
    scopes_of,
)
from vllm_kvplugins.vllm_adapter.attention.gpu import (
    GPUBuilder,
    GPUDraftBuilder,
    GPUPolicyBackend,
    GPUPolicyBuilder,
)


class FlashPolicyBackend(GPUPolicyBackend, FlashAttentionBackend):
    """FlashAttention with page lists per KV head."""

    stock_backend = FlashAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[FlashPolicyImpl]:
        return FlashPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[FlashBuilder]:
        return FlashPolicyBuilder


class FlashDraftBackend(FlashPolicyBackend):
    """The same for the layers of a drafter."""

    @staticmethod
    def get_builder_cls() -> type[FlashBuilder]:
        return FlashDraftBuilder


FlashPolicyBackend.draft_backend = FlashDraftBackend


@dataclass
class FlashPolicyMetadata:
    """One step. ``scopes`` has one entry, or one per layer."""

    num_actual_tokens: int
    flat_query_start: torch.Tensor  # int32 [rows * kv_heads + 1]
    order: torch.Tensor | None  # int64 [tokens * kv_heads]; None = in flat order
    max_queries: int  # per row
    scopes: list[Scope]
    max_splits: int  # per sequence; 0 = the kernel decides


# Limits of a step outside of CUDA graphs: splits per sequence, and bytes of their
# partial results, which vLLM does not include when it measures the memory of a step.
_MAX_SPLITS = 32
_MAX_PARTIAL_BYTES = 256 << 20
# Number of query tiles that keeps a Hopper GPU busy: 0.8 of its 132 multiprocessors.
_SATURATING_TILES = 106
_TILE_ROWS = 128


def max_splits(impl: Any, tokens: int, max_queries: int) -> int:
    """Maximum number of splits per sequence, for a step outside of CUDA graphs.

    FlashAttention 3 would choose a number from one sequence. In stock vLLM a sequence
    is a whole row; here it is one KV head of a row, one of many. FlashAttention 3 would
    therefore choose far more splits than in stock vLLM, each with float32 partial
    results of all queries.

    Args:
        impl: any layer.
        tokens: number of tokens of the step.
        max_queries: largest number of new tokens in a row.

    Returns:
        1 where stock vLLM would not split, because the queries of one row keep the GPU
        busy; 0 (the kernel decides) for other versions of FlashAttention, which ignore
        the limit.
    """
    if impl.vllm_flash_attn_version != 3:
        return 0
    tiles = -(-max_queries * impl.num_queries_per_kv // _TILE_ROWS)
    if tiles * impl.num_kv_heads >= _SATURATING_TILES:
        return 1
    split_bytes = 4 * max(tokens, 1) * impl.num_heads * impl.head_size
    return int(min(_MAX_SPLITS, max(1, _MAX_PARTIAL_BYTES // split_bytes)))


class FlashBuilder(GPUBuilder, AttentionMetadataBuilder[FlashPolicyMetadata]):
    """Builds the metadata of a step for FlashAttention."""

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> FlashPolicyMetadata:
        tokens, heads = common.num_actual_tokens, self.tables.num_kv_heads
        query_start = common.query_start_loc_cpu[: common.num_reqs + 1]
        start, order = flat_queries(query_start, heads)
        return FlashPolicyMetadata(
            tokens,
            moved(start, self.device),
            None if order is None else moved(order, self.device),
            common.max_query_len,
            scopes_of(table),
            max_splits(self.layers[0].impl, tokens, common.max_query_len),
        )


class FlashPolicyBuilder(GPUPolicyBuilder, FlashBuilder):
    """The builder of the layers that the policy manages."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # In CUDA graphs, the limit of vLLM's graphs. Only version 3 has a limit.
        version = self.layers[0].impl.vllm_flash_attn_version
        config = self.vllm_config.attention_config
        self._graph_splits = 0
        if version == 3:
            self._graph_splits = config.flash_attn_max_num_splits_for_cuda_graph
        if self.table is not None:
            sequences = self.table.shape.rows * self.table.shape.heads
            self._one_query_start = moved(
                torch.arange(sequences + 1, dtype=torch.int32), self.device
            )

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> FlashPolicyMetadata:
        if not one_each:
            return super().metadata(common, table, one_each)
        # No scheduler metadata: the kernel schedules on the device, as in vLLM for
        # models with several window sizes.
        tokens = common.num_actual_tokens
        start = self._one_query_start[: tokens * self.tables.num_kv_heads + 1]
        return FlashPolicyMetadata(
            tokens, start, None, 1, scopes_of(table), self._graph_splits
        )


class FlashDraftBuilder(GPUDraftBuilder, FlashBuilder):
    """The builder of the layers of a drafter."""


class FlashPolicyImpl(PolicyImpl, FlashAttentionImpl):
    """Attention of one layer through the flat page tables."""

    metadata_type = FlashPolicyMetadata

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashPolicyMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens, heads = metadata.num_actual_tokens, self.num_kv_heads
        shape = (tokens * heads, self.num_queries_per_kv, self.head_size)
        out = output[:tokens].view(shape)
        queries, target = in_flat_order(query[:tokens], out, metadata.order)
        scope, pages = self.scope(kv_cache, metadata)
        block_size = kv_cache.shape[2]
        # A separate dimension for the one KV head: TMA needs strides in multiples of
        # 16 bytes.
        slots = pages.view(len(pages), block_size, 1, 2 * self.head_size)
        key_cache, value_cache = slots.split(self.head_size, dim=-1)
        fa_utils.flash_attn_varlen_func(
            q=queries,
            k=key_cache,
            v=value_cache,
            out=target,
            cu_seqlens_q=metadata.flat_query_start,
            max_seqlen_q=metadata.max_queries,
            seqused_k=scope.lengths,
            max_seqlen_k=scope.pages.shape[1] * block_size,
            softmax_scale=self.scale,
            causal=True,
            block_table=scope.pages,
            num_splits=metadata.max_splits,
            fa_version=self.vllm_flash_attn_version,
        )
        if metadata.order is not None:
            out[metadata.order] = target
