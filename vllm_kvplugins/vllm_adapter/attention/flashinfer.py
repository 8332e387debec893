"""FlashInfer over the page heap; vLLM's Triton backend writes the cache.

Its wrappers are planned on the host, once per step and page table, from lengths that
the host knows, and then run by all layers that share the table. Steps in which every
row has one token go to the decode wrapper, others with all their rows to the prefill
wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
)

from vllm_kvplugins.engine.page_table import FlatTable, page_indices, page_runs
from vllm_kvplugins.errors import refuse
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.vllm_adapter.attention.flat import (
    PolicyImpl,
    Scope,
    flat_queries,
    in_flat_order,
)
from vllm_kvplugins.vllm_adapter.attention.gpu import GPUPolicyBackend, GPUPolicyBuilder

# What vLLM reserves for FlashInfer's parts of long sequences, per query element.
_WORKSPACE_BYTES_PER_ELEMENT = 16


class FlashInferPolicyBackend(GPUPolicyBackend, TritonAttentionBackend):
    """FlashInfer with page lists per KV head."""

    @staticmethod
    def get_impl_cls() -> type[FlashInferPolicyImpl]:
        return FlashInferPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferPolicyBuilder]:
        return FlashInferPolicyBuilder


@dataclass
class FlashInferPolicyMetadata:
    """One step. ``scopes`` has one entry, or one per layer, each with its wrapper."""

    num_actual_tokens: int
    order: torch.Tensor | None  # int64 [tokens * kv_heads]; None: already in order
    scopes: list[Scope]


class FlashInferPolicyBuilder(
    GPUPolicyBuilder, AttentionMetadataBuilder[FlashInferPolicyMetadata]
):
    """Plans for the wrappers."""

    @classmethod
    def graph_problems(cls, vllm_config: Any, runtime: Any) -> list[str]:
        found = super().graph_problems(vllm_config, runtime)
        if not runtime.policy.page_allocator().uniform:
            # 8 MiB of plans for each size that is captured, times layers
            found.append("FlashInfer would plan every layer for every captured size")
        return found

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scales = {layer.impl.scale for layer in self.layers}
        refuse(
            "FlashInfer cannot attend in this model",
            []
            if len(scales) == 1
            else [
                f"its layers scale scores differently ({sorted(scales)}); "
                "use kernel 'triton'"
            ],
        )
        (self._scale,) = scales
        # made when a step first needs them; of each kind one per page table, as their
        # plans are read while others are made
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[str, int], Any] = {}
        self._captured_rows: set[int] = set()
        self._room: list[torch.Tensor] = []  # of page lists, for graphs

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        self._captured_rows.add(common.num_reqs)
        return super().build_for_cudagraph_capture(common)

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> FlashInferPolicyMetadata:
        tables = self.runtime.tables
        assert tables is not None
        lengths = tables.lengths_on_host(table)
        tokens, heads = common.num_actual_tokens, tables.num_kv_heads
        scopes = [
            Scope(*parts) for parts in zip(table.pages, table.lengths, strict=True)
        ]
        if one_each:
            # Others are not replayed: steps are padded to what was captured.
            rows = (
                len(table.slot_indices)
                if len(table.slot_indices) in self._captured_rows
                else 0
            )
            self._plan(scopes, lengths, None, rows)
            return FlashInferPolicyMetadata(tokens, None, scopes)
        query_start = common.query_start_loc_cpu[: common.num_reqs + 1]
        start, order = flat_queries(query_start, heads)
        self._plan(scopes, lengths, None if order is None else start, 0)
        order = None if order is None else moved(order, self.device)
        return FlashInferPolicyMetadata(tokens, order, scopes)

    def _plan(
        self,
        scopes: list[Scope],
        lengths: torch.Tensor,
        query_start: torch.Tensor | None,
        captured_rows: int,
    ) -> None:
        """Give each page table its wrapper, planned.

        Args:
            lengths: int32 [scopes, sequences], on the host.
            query_start: int32 [sequences + 1], on the host; None = one query each.
            captured_rows: of the graph that may be replayed; 0 = none.
        """
        tables, impl = self.runtime.tables, self.layers[0].impl
        assert tables is not None
        size = tables.block_size
        dtype = self.vllm_config.model_config.dtype
        settings = {
            "num_qo_heads": impl.num_queries_per_kv,
            "num_kv_heads": 1,
            "page_size": size,
            "sm_scale": self._scale,
            "q_data_type": dtype,
            "kv_data_type": self.layers[0].kv_cache.dtype,
        }
        for index, (scope, lens) in enumerate(zip(scopes, lengths, strict=True)):
            start, last = self._pinned(*page_runs(lens, size))
            listed = page_indices(
                scope.pages, moved(start, self.device), int(start[-1])
            )
            if query_start is None:
                scope.schedule = self._decoding(index, captured_rows)
                scope.schedule.plan(
                    indptr=start,
                    indices=listed,
                    last_page_len=last,
                    head_dim=impl.head_size,
                    **settings,
                )
            else:
                scope.schedule = self._prefilling(index)
                scope.schedule.plan(
                    qo_indptr=query_start,
                    paged_kv_indptr=start,
                    paged_kv_indices=listed,
                    paged_kv_last_page_len=last,
                    head_dim_qk=impl.head_size,
                    causal=True,
                    **settings,
                )

    def _pinned(self, *host: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Memory from which copies do not make the host wait."""
        on_gpu = self.device.type == "cuda"
        return tuple(each.pin_memory() if on_gpu else each for each in host)

    def _memory(self) -> torch.Tensor:
        """For parts of sequences, one after the other by all wrappers."""
        if self._workspace is None:
            impl = self.layers[0].impl
            most = self.vllm_config.scheduler_config.max_num_batched_tokens
            elements = most * impl.num_heads * impl.head_size
            wanted = elements * _WORKSPACE_BYTES_PER_ELEMENT
            num_bytes = max(envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, wanted)
            self._workspace = torch.zeros(
                num_bytes, dtype=torch.uint8, device=self.device
            )
        return self._workspace

    def _decoding(self, scope: int, captured_rows: int) -> Any:
        if captured_rows:
            return self._captured(captured_rows)
        if ("decode", scope) not in self._wrappers:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper

            self._wrappers["decode", scope] = BatchDecodeWithPagedKVCacheWrapper(
                self._memory(), "NHD", use_tensor_cores=True
            )
        return self._wrappers["decode", scope]

    def _captured(self, rows: int) -> Any:
        """The wrapper whose plans a graph of so many rows reads, where they stay."""
        if ("captured", rows) not in self._wrappers:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper

            assert self.table is not None
            sequences = rows * self.table.shape.heads
            starts, listed, last = self._lists()
            self._wrappers["captured", rows] = BatchDecodeWithPagedKVCacheWrapper(
                self._memory(),
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=starts[: sequences + 1],
                paged_kv_indices_buffer=listed,
                paged_kv_last_page_len_buffer=last[:sequences],
            )
        return self._wrappers["captured", rows]

    def _lists(self) -> list[torch.Tensor]:
        """Where graphs of all sizes read page lists: each is planned, and so writes
        them, before it is replayed."""
        if not self._room:
            assert self.table is not None
            shape = self.table.shape
            sequences = shape.rows * shape.heads
            self._room = [
                torch.zeros(numbers, dtype=torch.int32, device=self.device)
                for numbers in (sequences + 1, sequences * shape.pages, sequences)
            ]
        return self._room

    def _prefilling(self, scope: int) -> Any:
        if ("prefill", scope) not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            self._wrappers["prefill", scope] = BatchPrefillWithPagedKVCacheWrapper(
                self._memory(), "NHD"
            )
        return self._wrappers["prefill", scope]


class FlashInferPolicyImpl(PolicyImpl, TritonAttentionImpl):
    """Attention of one layer through the flat page tables."""

    metadata_type = FlashInferPolicyMetadata

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashInferPolicyMetadata,
        output: torch.Tensor,
    ) -> None:
        tokens, heads = metadata.num_actual_tokens, self.num_kv_heads
        shape = (tokens * heads, self.num_queries_per_kv, self.head_size)
        out = output[:tokens].view(shape)
        queries, target = in_flat_order(query[:tokens], out, metadata.order)
        scope, pages = self.scope(kv_cache, metadata)
        block_size = kv_cache.shape[2]
        slots = pages.view(len(pages), block_size, 1, 2 * self.head_size)
        keys_and_values = tuple(slots.split(self.head_size, dim=-1))
        scope.schedule.run(queries, keys_and_values, out=target)
        if metadata.order is not None:
            out[metadata.order] = target
