"""FlashAttention over the page heap, as vLLM brings it."""

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
)
from vllm_kvplugins.vllm_adapter.attention.gpu import GPUPolicyBackend, GPUPolicyBuilder


class FlashPolicyBackend(GPUPolicyBackend, FlashAttentionBackend):
    """FlashAttention with page lists per KV head."""

    @staticmethod
    def get_impl_cls() -> type[FlashPolicyImpl]:
        return FlashPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[FlashPolicyBuilder]:
        return FlashPolicyBuilder


@dataclass
class FlashPolicyMetadata:
    """One step. ``scopes`` has one entry, or one per layer."""

    num_actual_tokens: int
    flat_query_start: torch.Tensor  # int32 [rows * kv_heads + 1]
    order: torch.Tensor | None  # int64 [tokens * kv_heads]; None: already in order
    most_queries: int
    scopes: list[Scope]
    # most parts that sequences are cut into; 0 = the kernel decides
    splits: int


# Of a step that no graph holds: parts, and bytes of what all of them found, which vLLM
# does not see when it measures how much memory steps take.
_MOST_SPLITS = 32
_MOST_PART_BYTES = 256 << 20
# From so many tiles of queries on, all processors of a Hopper are busy (0.8 of 132).
_TILES_ENOUGH = 106
_TILE_ROWS = 128


def most_splits(impl: Any, tokens: int, most_queries: int) -> int:
    """Most parts that sequences of a step are cut into, if no graph holds it.

    Asked to decide by itself, FlashAttention 3 looks at one sequence of one KV head,
    which is all of a row elsewhere and here is one of many: it would cut into far more
    parts than it does for vLLM, with float32 memory for all queries in each.

    Args:
        impl: any layer.
        tokens: of the step.
        most_queries: new tokens of any row.

    Returns:
        1 where vLLM's call would not be cut, as one row's queries keep the GPU busy; 0
        (the kernel decides) for other versions, which do not let us say.
    """
    if impl.vllm_flash_attn_version != 3:
        return 0
    tiles = -(-most_queries * impl.num_queries_per_kv // _TILE_ROWS)
    if tiles * impl.num_kv_heads >= _TILES_ENOUGH:
        return 1
    part = 4 * max(tokens, 1) * impl.num_heads * impl.head_size
    return int(min(_MOST_SPLITS, max(1, _MOST_PART_BYTES // part)))


class FlashPolicyBuilder(
    GPUPolicyBuilder, AttentionMetadataBuilder[FlashPolicyMetadata]
):
    """Page lists for the kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # In a graph as many as in vLLM's graphs; other versions do not let us say.
        three = self.layers[0].impl.vllm_flash_attn_version == 3
        config = self.vllm_config.attention_config
        self._splits = config.flash_attn_max_num_splits_for_cuda_graph if three else 0
        if self.table is not None:
            sequences = self.table.shape.rows * self.table.shape.heads
            self._one_each = moved(
                torch.arange(sequences + 1, dtype=torch.int32), self.device
            )

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> FlashPolicyMetadata:
        pairs = zip(table.pages, table.lengths, strict=True)
        scopes = [Scope(pages, lengths) for pages, lengths in pairs]
        tokens = common.num_actual_tokens
        heads = self.runtime.geometry.num_kv_heads
        if one_each:
            # What is scheduled for which processor is left to the kernel, on the
            # device, as vLLM leaves it for models with several windows.
            start = self._one_each[: tokens * heads + 1]
            return FlashPolicyMetadata(tokens, start, None, 1, scopes, self._splits)
        query_start = common.query_start_loc_cpu[: common.num_reqs + 1]
        start, order = flat_queries(query_start, heads)
        return FlashPolicyMetadata(
            tokens,
            moved(start, self.device),
            None if order is None else moved(order, self.device),
            common.max_query_len,
            scopes,
            most_splits(self.layers[0].impl, tokens, common.max_query_len),
        )


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
        # One KV head; a stride of its own for it, as TMA wants multiples of 16 bytes.
        slots = pages.view(len(pages), block_size, 1, 2 * self.head_size)
        key_cache, value_cache = slots.split(self.head_size, dim=-1)
        fa_utils.flash_attn_varlen_func(
            q=queries,
            k=key_cache,
            v=value_cache,
            out=target,
            cu_seqlens_q=metadata.flat_query_start,
            max_seqlen_q=metadata.most_queries,
            seqused_k=scope.lengths,
            max_seqlen_k=scope.pages.shape[1] * block_size,
            softmax_scale=self.scale,
            causal=True,
            block_table=scope.pages,
            num_splits=metadata.splits,
            fa_version=self.vllm_flash_attn_version,
        )
        if metadata.order is not None:
            out[metadata.order] = target
