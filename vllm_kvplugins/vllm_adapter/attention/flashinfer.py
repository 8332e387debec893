"""FlashInfer over the page heap; vLLM's Triton backend writes the cache.

The host plans a wrapper once per step and page table, from lengths that it knows. All
layers that share the page table run this wrapper. Steps in which every row has one new
token use a decode wrapper; other steps use a prefill wrapper for all their rows.
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
from vllm_kvplugins.errors import coded, refuse
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

# Workspace that vLLM reserves for FlashInfer's partial results, per query element.
_WORKSPACE_BYTES_PER_ELEMENT = 16


class FlashInferPolicyBackend(GPUPolicyBackend, TritonAttentionBackend):
    """FlashInfer with page lists per KV head."""

    stock_backend = TritonAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[FlashInferPolicyImpl]:
        return FlashInferPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[FlashInferBuilder]:
        return FlashInferPolicyBuilder


class FlashInferDraftBackend(FlashInferPolicyBackend):
    """The same for the layers of a drafter."""

    @staticmethod
    def get_builder_cls() -> type[FlashInferBuilder]:
        return FlashInferDraftBuilder


FlashInferPolicyBackend.draft_backend = FlashInferDraftBackend


@dataclass
class FlashInferPolicyMetadata:
    """One step. ``scopes`` has one entry, or one per layer, each with its wrapper."""

    num_actual_tokens: int
    order: torch.Tensor | None  # int64 [tokens * kv_heads]; None = in flat order
    scopes: list[Scope]


class FlashInferBuilder(GPUBuilder, AttentionMetadataBuilder[FlashInferPolicyMetadata]):
    """Plans the wrappers of a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scales = {layer.impl.scale for layer in self.layers}
        refuse(
            "FlashInfer cannot attend in this model",
            []
            if len(scales) == 1
            else [
                coded(
                    "KVP025",
                    "kernel 'flashinfer': the softmax scale differs between layers "
                    f"({sorted(scales)}); use kernel 'triton'",
                )
            ],
        )
        (self._scale,) = scales
        # Created when first needed. One wrapper per kind and page table, because the
        # GPU may still read one plan while the host makes the next.
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[str, int], Any] = {}

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> FlashInferPolicyMetadata:
        lengths = self.tables.lengths_on_host(table)
        query_start = common.query_start_loc_cpu[: common.num_reqs + 1]
        start, order = flat_queries(query_start, self.tables.num_kv_heads)
        scopes = scopes_of(table)
        self._plan(scopes, lengths, None if order is None else start)
        order = None if order is None else moved(order, self.device)
        return FlashInferPolicyMetadata(common.num_actual_tokens, order, scopes)

    def _plan(
        self,
        scopes: list[Scope],
        lengths: torch.Tensor,
        query_start: torch.Tensor | None,
        captured_rows: int = 0,
    ) -> None:
        """Plan a wrapper for each page table and store it as its schedule.

        Args:
            lengths: int32 [scopes, sequences], on the host.
            query_start: int32 [sequences + 1], on the host; None = one query each.
            captured_rows: rows of the CUDA graph that may be replayed; 0 = none.
        """
        impl, size = self.layers[0].impl, self.tables.block_size
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
            start, last = self._pin(*page_runs(lens, size))
            listed = page_indices(
                scope.pages, moved(start, self.device), int(start[-1])
            )
            if query_start is None:
                scope.schedule = self._decode_wrapper(index, captured_rows)
                scope.schedule.plan(
                    indptr=start,
                    indices=listed,
                    last_page_len=last,
                    head_dim=impl.head_size,
                    **settings,
                )
            else:
                scope.schedule = self._prefill_wrapper(index)
                scope.schedule.plan(
                    qo_indptr=query_start,
                    paged_kv_indptr=start,
                    paged_kv_indices=listed,
                    paged_kv_last_page_len=last,
                    head_dim_qk=impl.head_size,
                    causal=True,
                    **settings,
                )

    def _pin(self, *host: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies in pinned memory, if they go to a GPU: the host need not wait."""
        on_gpu = self.device.type == "cuda"
        return tuple(tensor.pin_memory() if on_gpu else tensor for tensor in host)

    def _shared_workspace(self) -> torch.Tensor:
        """Memory for partial results; all wrappers use it, one after the other."""
        if self._workspace is None:
            impl = self.layers[0].impl
            max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            elements = max_tokens * impl.num_heads * impl.head_size
            needed = elements * _WORKSPACE_BYTES_PER_ELEMENT
            num_bytes = max(envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, needed)
            self._workspace = torch.zeros(
                num_bytes, dtype=torch.uint8, device=self.device
            )
        return self._workspace

    def _decode_wrapper(self, scope: int, captured_rows: int) -> Any:
        """The wrapper of a page table; only graphs have captured rows."""
        if ("decode", scope) not in self._wrappers:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper

            self._wrappers["decode", scope] = BatchDecodeWithPagedKVCacheWrapper(
                self._shared_workspace(), "NHD", use_tensor_cores=True
            )
        return self._wrappers["decode", scope]

    def _prefill_wrapper(self, scope: int) -> Any:
        if ("prefill", scope) not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            self._wrappers["prefill", scope] = BatchPrefillWithPagedKVCacheWrapper(
                self._shared_workspace(), "NHD"
            )
        return self._wrappers["prefill", scope]


class FlashInferPolicyBuilder(GPUPolicyBuilder, FlashInferBuilder):
    """The builder of the layers that the policy manages."""

    @classmethod
    def graph_problems(cls, vllm_config: Any, runtime: Any) -> list[str]:
        problems = super().graph_problems(vllm_config, runtime)
        if not runtime.policy.page_allocator().uniform:
            # A plan takes 8 MiB per captured size and layer.
            problems.append(
                "heads have different budgets, so FlashInfer would need a plan for "
                "every layer and captured size"
            )
        return problems

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._captured_rows: set[int] = set()
        self._graph_lists: list[torch.Tensor] = []  # page lists that graphs read

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        self._captured_rows.add(common.num_reqs)
        return super().build_for_cudagraph_capture(common)

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> FlashInferPolicyMetadata:
        if not one_each:
            return super().metadata(common, table, one_each)
        lengths = self.tables.lengths_on_host(table)
        # Steps are padded to a captured size. No graph of another size runs.
        rows = len(table.slot_indices)
        captured = rows if rows in self._captured_rows else 0
        scopes = scopes_of(table)
        self._plan(scopes, lengths, None, captured)
        return FlashInferPolicyMetadata(common.num_actual_tokens, None, scopes)

    def _decode_wrapper(self, scope: int, captured_rows: int) -> Any:
        if captured_rows:
            return self._graph_wrapper(captured_rows)
        return super()._decode_wrapper(scope, captured_rows)

    def _graph_wrapper(self, rows: int) -> Any:
        """The wrapper for CUDA graphs of this size, with plans at fixed addresses."""
        if ("captured", rows) not in self._wrappers:
            from flashinfer import BatchDecodeWithPagedKVCacheWrapper

            assert self.table is not None
            sequences = rows * self.table.shape.heads
            starts, listed, last = self._graph_page_lists()
            self._wrappers["captured", rows] = BatchDecodeWithPagedKVCacheWrapper(
                self._shared_workspace(),
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=starts[: sequences + 1],
                paged_kv_indices_buffer=listed,
                paged_kv_last_page_len_buffer=last[:sequences],
            )
        return self._wrappers["captured", rows]

    def _graph_page_lists(self) -> list[torch.Tensor]:
        """Page lists at fixed addresses, for graphs of all sizes.

        Planning writes them, and precedes each replay.
        """
        if not self._graph_lists:
            assert self.table is not None
            shape = self.table.shape
            sequences = shape.rows * shape.heads
            self._graph_lists = [
                torch.zeros(numbers, dtype=torch.int32, device=self.device)
                for numbers in (sequences + 1, sequences * shape.pages, sequences)
            ]
        return self._graph_lists


class FlashInferDraftBuilder(GPUDraftBuilder, FlashInferBuilder):
    """The builder of the layers of a drafter."""


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
