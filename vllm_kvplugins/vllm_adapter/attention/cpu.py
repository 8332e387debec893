"""vLLM's CPU kernel over the page heap.

Each (request, KV head) is handed to the stock kernel as a sequence of its own
with one KV head, its own page list and its own length. Decoding rows already lie
in that order; rows with several new tokens are reordered to
(request, head, token) and back::

    query  [token, head, group, dim]  ->  [row, head, token of row, group, dim]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_kvplugins.errors import refuse
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.runtime import PolicyRuntime
from vllm_kvplugins.vllm_adapter import activation
from vllm_kvplugins.vllm_adapter.probing import ProbeMetadata, probe_model
from vllm_kvplugins.vllm_adapter.rotary import rotary_of
from vllm_kvplugins.vllm_adapter.spec import with_policy
from vllm_kvplugins.vllm_adapter.surprisal import ModelLosses
from vllm_kvplugins.vllm_adapter.validation import layer_problems, rotary_problems


class PagedPolicyBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN in processes where a policy is active."""

    @staticmethod
    def get_impl_cls() -> type[PagedPolicyImpl]:
        return PagedPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[PagedPolicyMetadataBuilder]:
        return PagedPolicyMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        spec = super().customize_spec(spec)
        runtime = activation.runtime()
        return with_policy(spec, runtime.policy, runtime.geometry)


@dataclass
class Scope:
    """Page table for the layers that share it, in the kernel's terms."""

    pages: torch.Tensor  # int32 [rows * kv_heads, most_pages]
    lengths: torch.Tensor  # int32 [rows * kv_heads]
    schedule: torch.Tensor  # the kernel's own plan


@dataclass
class PagedPolicyMetadata(CPUAttentionMetadata):
    """One step. ``scopes`` has one entry, or one per layer."""

    scopes: list[Scope] = field(default_factory=list)
    # int32 [rows * kv_heads + 1], query tokens per flat sequence, cumulated
    flat_query_start: torch.Tensor | None = None
    # int64 [tokens * kv_heads], flat order -> (token, head); None = the same
    order: torch.Tensor | None = None


class PagedPolicyMetadataBuilder(CPUAttentionMetadataBuilder):
    """Adds the flat page tables to the stock metadata."""

    reorder_batch_threshold = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = activation.runtime()
        self.group = self.num_heads // self.num_kv_heads
        layers = get_layers_from_vllm_config(
            self.vllm_config, Attention, self.layer_names
        )
        self.layers = [layers[name] for name in self.layer_names]
        self.rotary = rotary_of(activation.runner().model)
        refuse(
            f"KV policy {self.runtime.policy.name!r} cannot run with this model",
            [
                *rotary_problems(self.runtime.policy, self.rotary),
                *(
                    problem
                    for name, layer in zip(self.layer_names, self.layers, strict=True)
                    for problem in layer_problems(name, layer.impl)
                ),
            ],
        )
        for index, layer in enumerate(self.layers):
            layer.impl.bind(self.runtime, index)
        activation.set_attach(self._attach)

    def build(
        self, common_prefix_len: int, common: Any, *args: Any, **kwargs: Any
    ) -> PagedPolicyMetadata:
        stock = super().build(common_prefix_len, common, *args, **kwargs)
        metadata = PagedPolicyMetadata(**vars(stock))
        activation.attach()
        num_rows = common.num_reqs
        query_start = common.query_start_loc[: num_rows + 1]
        seq_lens = common.seq_lens[:num_rows]
        rows = activation.runner().rows(common)
        table = self.runtime.begin_step(
            rows, seq_lens, common.block_table_tensor[:num_rows]
        )
        query_lens = query_start[1:] - query_start[:-1]
        flat_lens = query_lens.repeat_interleave(self.num_kv_heads)
        start = torch.zeros(flat_lens.numel() + 1, dtype=torch.int32)
        torch.cumsum(flat_lens, 0, out=start[1:])
        metadata.flat_query_start = start
        if int(query_start[-1]) != num_rows:
            metadata.order = flat_order(query_start.long(), self.num_kv_heads)
        metadata.scopes = [
            Scope(pages, lengths, self._schedule(lengths, start))
            for pages, lengths in zip(table.pages, table.lengths, strict=True)
        ]
        return metadata

    def _attach(self) -> None:
        """Give the runtime the heap; caches exist only from the first step on."""
        self.runtime.attach(
            build_heap(self.layers, self.isa),
            [layer.impl.scale for layer in self.layers],
            self.rotary,
            probe_model(self.vllm_config, activation.runner().model, self.layer_names),
            ModelLosses(activation.runner().model)
            if self.runtime.policy.needs_surprisal
            else None,
        )

    def _schedule(self, lengths: torch.Tensor, query_start: torch.Tensor) -> Any:
        return ops.cpu_attn_get_scheduler_metadata(
            num_reqs=lengths.numel(),
            num_heads=self.group,
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


def flat_order(query_start: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Permutation from (token, head) to (row, head, token of the row).

    Args:
        query_start: int64 [rows + 1].

    Returns:
        int64 [tokens * num_kv_heads]; entry i is the index ``token * heads +
        head`` of the query that stands at flat place i.
    """
    lens = query_start[1:] - query_start[:-1]
    row = torch.repeat_interleave(torch.arange(lens.numel()), lens)
    token = torch.arange(row.numel()) - query_start[row]
    head = torch.arange(num_kv_heads)
    base = query_start[row] * num_kv_heads + token
    place = base[:, None] + head * lens[row][:, None]
    order = torch.empty(place.numel(), dtype=torch.int64)
    order[place.reshape(-1)] = torch.arange(place.numel())
    return order


class PagedPolicyImpl(CPUAttentionBackendImpl):
    """Attention of one layer through the flat page tables."""

    def bind(self, runtime: PolicyRuntime, layer_index: int) -> None:
        """Called once by the metadata builder, which knows the layer's place."""
        self.runtime = runtime
        self.layer_index = layer_index

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if isinstance(attn_metadata, ProbeMetadata):
            prober = self.runtime.prober
            assert prober is not None
            output[:] = prober.attend(self.layer_index, query, key, value)
            return output
        if not isinstance(attn_metadata, PagedPolicyMetadata):
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                *args,
                **kwargs,
            )
        self.runtime.before_attention(self.layer_index, query)
        zooming = self.runtime.zooming
        if zooming is None or not zooming.takes_all:
            self._attend(query, kv_cache, attn_metadata, output)
        if zooming is not None and zooming.takes_any:
            (scope,) = attn_metadata.scopes
            zooming.attend(self.layer_index, query, scope.pages, scope.lengths, output)
        self.runtime.after_attention(self.layer_index, query)
        return output

    def _attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: PagedPolicyMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens, heads = metadata.num_actual_tokens, self.num_kv_heads
        flat_shape = (tokens * heads, self.num_queries_per_kv, self.head_size)
        queries = query[:tokens].reshape(flat_shape)
        out = output[:tokens].view(flat_shape)
        target = out
        if metadata.order is not None:
            queries = queries[metadata.order]
            target = torch.empty_like(queries)
        if len(metadata.scopes) == 1:
            scope, pages = metadata.scopes[0], kv_cache.flatten(0, 1)
        else:
            assert self.runtime.heap is not None
            scope, pages = metadata.scopes[self.layer_index], self.runtime.heap.pages
        block_size = kv_cache.shape[2]
        kv = pages.view(pages.shape[0], 1, 2 * block_size, self.head_size)
        key_cache, value_cache = kv.chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=queries,
            key_cache=key_cache,
            value_cache=value_cache,
            output=target,
            query_start_loc=metadata.flat_query_start,
            seq_lens=scope.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=scope.pages,
            softcap=0,
            scheduler_metadata=scope.schedule,
            s_aux=None,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if metadata.order is not None:
            out[metadata.order] = target


def build_heap(layers: list[Any], isa: str) -> Heap:
    """All layers' caches as one array of pages.

    Raises:
        KVPolicyError: the layers' caches are not one evenly spaced allocation.
    """
    caches = [layer.kv_cache for layer in layers]
    first = caches[0]
    num_blocks, num_kv_heads, block_size, content = first.shape
    page_elems = block_size * content
    layer_elems = num_blocks * num_kv_heads * page_elems
    even = all(
        cache.shape == first.shape
        and cache.is_contiguous()
        and cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and cache.storage_offset() == first.storage_offset() + i * layer_elems
        for i, cache in enumerate(caches)
    )
    refuse(
        "the page heap cannot be formed",
        []
        if even
        else [
            "the layers' KV caches are not slices of one allocation in layer order; "
            "run on vLLM 0.32 or 0.33 with one KV cache group"
        ],
    )
    pages = torch.as_strided(
        first,
        (len(caches) * num_blocks * num_kv_heads, page_elems),
        (page_elems, 1),
        first.storage_offset(),
    )
    layout = learn_layout(block_size, content // 2, first.dtype, isa)
    return Heap(pages, layout, len(caches), num_blocks, num_kv_heads)


def learn_layout(
    block_size: int, head_dim: int, dtype: torch.dtype, isa: str
) -> PageLayout:
    """Find out how the kernel packs a page by writing coded tokens into one.

    Each instruction set packs keys in its own order (transposed, or tiled for
    AMX). Writing numbers that spell each element's index, digit by digit in
    base 128 (exact in every dtype), shows where the element went.
    """
    elements = block_size * head_dim
    index = torch.arange(elements).view(block_size, 1, head_dim)
    page = torch.zeros(1, 1, 2 * block_size, head_dim, dtype=dtype)
    halves = page.chunk(2, dim=2)
    slots = torch.arange(block_size)
    spelled = [torch.zeros(elements, dtype=torch.int64) for _ in halves]
    for base in (1, 128, 128**2):
        digit = ((index // base) % 128).to(dtype)
        ops.cpu_attn_reshape_and_cache(digit, digit.clone(), *halves, slots, isa)
        for seen, half in zip(spelled, halves, strict=True):
            seen += half.reshape(-1).float().long() * base
    offsets = []
    for half_index, seen in enumerate(spelled):
        assert torch.equal(seen.sort().values, torch.arange(elements)), (
            f"pages of isa {isa!r} do not hold each element once"
        )
        place = torch.empty(elements, dtype=torch.int64)
        place[seen] = torch.arange(elements)
        offsets.append((place + half_index * elements).int())
    return PageLayout(block_size, head_dim, *offsets)
