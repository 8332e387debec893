"""Our Triton kernel over the page heap: for GPUs, and for tests without one.

The kernel reads queries in vLLM's order, so it needs no reordering.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
)

from vllm_kvplugins.engine.heap import FP8_DTYPES
from vllm_kvplugins.engine.page_table import FlatTable
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.triton.paged_attention import (
    Fp8Elements,
    NewTokens,
    attend_paged,
)
from vllm_kvplugins.scoring.logits import LogitRules
from vllm_kvplugins.vllm_adapter.attention.flat import (
    PolicyImpl,
    Scope,
    logit_rules,
    scopes_of,
)
from vllm_kvplugins.vllm_adapter.attention.gpu import (
    GPUBuilder,
    GPUDraftBuilder,
    GPUPolicyBackend,
    GPUPolicyBuilder,
)


class TritonPolicyBackend(GPUPolicyBackend, TritonAttentionBackend):
    """vLLM's Triton backend writes the cache, and our kernel reads it."""

    stock_backend = TritonAttentionBackend

    @staticmethod
    def get_impl_cls() -> type[TritonPolicyImpl]:
        return TritonPolicyImpl

    @staticmethod
    def get_builder_cls() -> type[TritonBuilder]:
        return TritonPolicyBuilder


class TritonDraftBackend(TritonPolicyBackend):
    """The same for the layers of a drafter."""

    @staticmethod
    def get_builder_cls() -> type[TritonBuilder]:
        return TritonDraftBuilder


TritonPolicyBackend.draft_backend = TritonDraftBackend


@dataclass
class TritonPolicyMetadata:
    """One step. ``scopes`` has one entry, or one per layer."""

    num_actual_tokens: int
    query_start: torch.Tensor | None  # int32 [rows + 1]; None = one token each
    max_per_row: int
    scopes: list[Scope]


class TritonBuilder(GPUBuilder, AttentionMetadataBuilder[TritonPolicyMetadata]):
    """Builds the metadata of a step for our kernel."""

    def metadata(
        self, common: Any, table: FlatTable, one_each: bool
    ) -> TritonPolicyMetadata:
        return TritonPolicyMetadata(
            common.num_actual_tokens,
            None if one_each else common.query_start_loc[: common.num_reqs + 1],
            common.max_query_len,
            scopes_of(table),
        )


class TritonPolicyBuilder(GPUPolicyBuilder, TritonBuilder):
    """The builder of the layers that the policy manages."""


class TritonDraftBuilder(GPUDraftBuilder, TritonBuilder):
    """The builder of the layers of a drafter."""


class TritonPolicyImpl(PolicyImpl, TritonAttentionImpl):
    """Attention of one layer through the flat page tables."""

    metadata_type = TritonPolicyMetadata
    attends_with_sinks = True
    attends_with_softcap = True
    fp8: Fp8Elements | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Scores of a policy need the queries, which vLLM would quantize before.
        self.supports_quant_query_input = False

    def bind(self, runtime: PolicyRuntime, layer_index: int | None, layer: Any) -> None:
        super().bind(runtime, layer_index, layer)
        if (dtype := FP8_DTYPES.get(layer.kv_cache_dtype)) is not None:
            scales = layer._k_scale_float, layer._v_scale_float
            self.fp8 = Fp8Elements(dtype, *scales)

    @functools.cached_property
    def rules(self) -> LogitRules:
        """What the layer does to logits; computed after its weights are loaded."""
        return logit_rules(self)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TritonPolicyMetadata,
        output: torch.Tensor,
    ) -> None:
        scope, pages = self.scope(kv_cache, metadata)
        tokens = metadata.num_actual_tokens
        if self.fp8 is not None:
            pages = pages.view(torch.uint8)
        attend_paged(
            NewTokens(query[:tokens], metadata.query_start, metadata.max_per_row),
            PagedKV(pages, self.heap.layout),
            scope.pages,
            scope.lengths,
            self.scale,
            rules=self.rules,
            fp8=self.fp8,
            out=output[:tokens].view(-1, self.num_heads, self.head_size),
        )
