"""vLLM's CPU kernel over the page heap.

The kernel needs queries in flat order; see ``flat`` for rows with several new tokens.

The kernel takes one learned sink per query head of the call, the same for all
sequences. Flat sequences of different KV heads have different sinks, so layers with
sinks call the kernel once per KV head, with the sequences of this head in the order of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_kvplugins.engine.heap import FP8_DTYPES
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.vllm_adapter.attention.flat import (
    DraftBuilder,
    FlatBuilder,
    PolicyBuilder,
    PolicyImpl,
    Scope,
    flat_queries,
    in_flat_order,
)


class PagedPolicyBackend(CPUAttentionBackend):
    """Replaces CPU_ATTN in processes that serve with a policy.

    Attributes:
        stock_backend: for layers that the policy leaves to vLLM.
        draft_backend: for layers of a drafter.
    """

    stock_backend = CPUAttentionBackend
    draft_backend: type[CPUAttentionBackend]

    @staticmethod
    def get_impl_cls() -> type[PagedPolicyImpl]:
        return PagedPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[PagedPolicyMetadataBuilder]:
        return PagedPolicyMetadataBuilder


class PagedDraftBackend(PagedPolicyBackend):
    """The same for the layers of a drafter."""

    @staticmethod
    def get_builder_cls() -> type[PagedDraftMetadataBuilder]:
        return PagedDraftMetadataBuilder


PagedPolicyBackend.draft_backend = PagedDraftBackend


@dataclass
class PagedPolicyMetadata(CPUAttentionMetadata):
    """One step. ``scopes`` has one entry, or one per layer."""

    scopes: list[Scope] = field(default_factory=list)
    # int32 [rows * kv_heads + 1], cumulative query tokens of the flat sequences
    flat_query_start: torch.Tensor | None = None
    # int64 [tokens * kv_heads], see ``flat_order``; None = already in flat order
    order: torch.Tensor | None = None
    # int32 [rows + 1], cumulative query tokens of the rows
    row_query_start: torch.Tensor | None = None


class PagedMetadata(FlatBuilder):
    """Mixin of builders: adds the flat page tables to the stock metadata."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    isa: str
    kv_cache_dtype: str

    reorder_batch_threshold = None

    def page_layout(self, block_size: int, head_dim: int) -> PageLayout:
        cache = self.layers[0].kv_cache.dtype
        return detect_layout(
            block_size, head_dim, self.dtype, self.isa, cache, self.kv_cache_dtype
        )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> PagedPolicyMetadata:
        common = common_attn_metadata  # the drafter passes it by name
        stock = super().build(common_prefix_len, common, *args, **kwargs)  # type: ignore[misc]
        metadata = PagedPolicyMetadata(**vars(stock))
        table = self.begin_step(common)
        num_rows = common.num_reqs
        query_start = common.query_start_loc[: num_rows + 1]
        start, metadata.order = flat_queries(query_start, self.num_kv_heads)
        metadata.flat_query_start = start
        metadata.row_query_start = query_start
        metadata.scopes = [
            Scope(pages, lengths, self._schedules(lengths, start, query_start))
            for pages, lengths in zip(table.pages, table.lengths, strict=True)
        ]
        return metadata

    def _schedules(
        self, lengths: torch.Tensor, start: torch.Tensor, row_start: torch.Tensor
    ) -> Any:
        """The kernel's plan of all sequences; with sinks, one plan per KV head."""
        if self.layers[0].impl.sinks is None:
            return self._schedule(lengths, start)
        heads = range(self.num_kv_heads)
        return [self._schedule(_of_head(lengths, h, heads), row_start) for h in heads]

    def _schedule(self, lengths: torch.Tensor, query_start: torch.Tensor) -> Any:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=lengths.numel(),
            num_heads=self.num_heads // self.num_kv_heads,
            num_kv_heads=1,
            head_dim=self.head_dim,
            seq_lens=lengths,
            dtype=self.dtype,
            query_start_loc=query_start,
            causal=True,
            sliding_window_size=-1,
            isa=self.isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
            kv_cache_dtype=self.kv_cache_dtype,
        )


class PagedPolicyMetadataBuilder(
    PagedMetadata, PolicyBuilder, CPUAttentionMetadataBuilder
):
    """The builder of the layers that the policy manages."""


class PagedDraftMetadataBuilder(
    PagedMetadata, DraftBuilder, CPUAttentionMetadataBuilder
):
    """The builder of the layers of a drafter."""


class PagedPolicyImpl(PolicyImpl, CPUAttentionBackendImpl):
    """Attention of one layer through the flat page tables."""

    metadata_type = PagedPolicyMetadata
    attends_with_sinks = True
    attends_with_softcap = True
    kv_scales = (1.0, 1.0)

    def bind(self, runtime: PolicyRuntime, layer_index: int | None, layer: Any) -> None:
        super().bind(runtime, layer_index, layer)
        self.kv_scales = layer._k_scale_float, layer._v_scale_float

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedPolicyMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens, heads = metadata.num_actual_tokens, self.num_kv_heads
        scope, pages = self.scope(kv_cache, metadata)
        block_size = kv_cache.shape[2]
        kv = pages.view(pages.shape[0], 1, 2 * block_size, self.head_size)
        if self.sinks is not None:
            self._attend_by_head(query[:tokens], kv, metadata, scope, output[:tokens])
            return
        shape = (tokens * heads, self.num_queries_per_kv, self.head_size)
        out = output[:tokens].view(shape)
        queries, target = in_flat_order(query[:tokens], out, metadata.order)
        self._kernel(queries, kv, target, metadata.flat_query_start, scope)
        if metadata.order is not None:
            out[metadata.order] = target

    def _attend_by_head(
        self,
        query: torch.Tensor,
        kv: torch.Tensor,
        metadata: PagedPolicyMetadata,
        scope: Scope,
        output: torch.Tensor,
    ) -> None:
        """Attend with learned sinks, one KV head after the other.

        Args:
            query: [tokens, num_q_heads, head_dim].
            output: of the same number of elements.
        """
        group, heads = self.num_queries_per_kv, range(self.num_kv_heads)
        out = output.view(query.shape)
        sinks = self.sinks.float()
        for head in heads:
            own = slice(head * group, (head + 1) * group)
            queries = query[:, own].contiguous()
            target = torch.empty_like(queries)
            sequences = Scope(
                _of_head(scope.pages, head, heads),
                _of_head(scope.lengths, head, heads),
                scope.schedule[head],
            )
            starts = metadata.row_query_start
            self._kernel(queries, kv, target, starts, sequences, sinks[own])
            out[:, own] = target

    def _kernel(
        self,
        queries: torch.Tensor,
        kv: torch.Tensor,
        target: torch.Tensor,
        query_start: torch.Tensor | None,
        sequences: Scope,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """vLLM's kernel over sequences with one KV head.

        Args:
            queries, target: [queries, group, head_dim].
            kv: [pages, 1, 2 * block size, head_dim].
            query_start: int32 [sequences + 1].
            sinks: float32 [group].
        """
        key_cache, value_cache = kv.chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_cache,
            value_cache=value_cache,
            output=target,
            query_start_loc=query_start,
            seq_lens=sequences.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=sequences.pages,
            softcap=self.logits_soft_cap,
            scheduler_metadata=sequences.schedule,
            s_aux=sinks,
            k_scale=self.kv_scales[0],
            v_scale=self.kv_scales[1],
            kv_cache_dtype=self.kv_cache_dtype,
        )


def _of_head(entries: torch.Tensor, head: int, heads: range) -> torch.Tensor:
    """Entries of the sequences of one KV head, of sequences ordered by (row, head)."""
    return entries[head :: len(heads)].contiguous()


def detect_layout(
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    isa: str,
    cache_dtype: torch.dtype | None = None,
    kv_cache_dtype: str = "auto",
) -> PageLayout:
    """Detect how the kernel packs a page, by writing numbered elements into one.

    Each instruction set packs keys in its own order (transposed, or tiled for AMX).
    Every element gets its index as the value, one digit per write. The page then shows
    where each element went. Digits are exact in every dtype: below 128, or below 8
    for fp8, whose e5m2 has three significant bits.

    Args:
        dtype: of new keys and values.
        cache_dtype: of the cache; None: ``dtype``.
        kv_cache_dtype: vLLM's name of it.
    """
    elements = block_size * head_dim
    index = torch.arange(elements).view(block_size, 1, head_dim)
    page = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=cache_dtype or dtype)
    halves = page.chunk(2, dim=2)
    slots = torch.arange(block_size)
    indices = [torch.zeros(elements, dtype=torch.int64) for _ in halves]
    fp8 = FP8_DTYPES.get(kv_cache_dtype)
    base, unit = (8 if fp8 else 128), 1
    while unit < elements:
        digit = ((index // unit) % base).to(dtype)
        ops.cpu_attn_reshape_and_cache(
            digit,
            digit.clone(),
            *halves,
            slots,
            isa,
            kv_cache_dtype=kv_cache_dtype,
        )
        for element_indices, half in zip(indices, halves, strict=True):
            written = half.reshape(-1)
            if fp8 is not None:
                written = written.view(fp8)
            element_indices += written.float().long() * unit
        unit *= base
    offsets = []
    for half_index, element_indices in enumerate(indices):
        assert torch.equal(element_indices.sort().values, torch.arange(elements)), (
            f"pages of isa {isa!r} do not hold each element once"
        )
        place = torch.empty(elements, dtype=torch.int64)
        place[element_indices] = torch.arange(elements)
        offsets.append((place + half_index * elements).int())
    return PageLayout(block_size, head_dim, *offsets)
