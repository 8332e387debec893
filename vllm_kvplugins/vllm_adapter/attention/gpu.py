"""Common parts of the backends for GPUs, among them decode steps in CUDA graphs.

A graph is captured for a number of rows and replayed for steps with at most as many;
the remaining rows are padding and have length 0. All values that change from step to
step are in tensors at fixed addresses: the page lists (``FixedTable``) and vLLM's own
inputs. The launch parameters of a kernel may depend only on the number of captured
rows. Steps in graphs therefore have one query per sequence, padding included, and page
lists of the maximum width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvplugins.engine.page_table import FlatTable, PageTables
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.vllm_adapter.attention import graphs
from vllm_kvplugins.vllm_adapter.attention.flat import (
    DraftBuilder,
    FlatBuilder,
    PolicyBuilder,
)
from vllm_kvplugins.vllm_adapter.worker.context import context_of_layers


class GPUPolicyBackend:
    """Mixin of backends that vLLM registers as CUSTOM.

    Attributes:
        stock_backend: for layers that the policy leaves to vLLM.
        draft_backend: for layers of a drafter.
    """

    stock_backend: type[Any]
    draft_backend: type[Any]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class GPUBuilder(FlatBuilder):
    """Mixin of metadata builders: the metadata of a step for the kernel."""

    device: torch.device

    def page_layout(self, block_size: int, head_dim: int) -> PageLayout:
        device = self.layers[0].kv_cache.device
        return PageLayout.interleaved(block_size, head_dim).to(device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        common = common_attn_metadata  # the drafter passes it by name
        return self.metadata(common, self.begin_step(common), one_each=False)

    @property
    @abstractmethod
    def tables(self) -> PageTables:
        """The page tables of the builder's layers."""

    @abstractmethod
    def metadata(self, common: Any, table: FlatTable, one_each: bool) -> Any:
        """The metadata of a step for the kernel.

        Args:
            one_each: every row has one new token, padding included. The launch
                parameters of the kernel may then depend only on the number of rows.
        """


class GPUDraftBuilder(GPUBuilder, DraftBuilder):
    """Mixin of metadata builders of a drafter's layers.

    Graphs do not include their attention. They would not anyway: vLLM verifies several
    tokens per request, and graphs of a policy have one.
    """

    @property
    def tables(self) -> PageTables:
        draft_layers = self.runtime.draft_layers
        assert draft_layers is not None, "no step has begun"
        return draft_layers.regions.tables


class GPUPolicyBuilder(GPUBuilder, PolicyBuilder):
    """Mixin of metadata builders of the layers that the policy manages.

    Attributes:
        table: the page table that graphs read; None = graphs do not include attention.
    """

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: Any, kv_cache_spec: Any
    ) -> AttentionCGSupport:
        layers = vllm_config.compilation_config.static_forward_context
        runtime = context_of_layers(layers.values()).runtime
        if cls.graph_problems(vllm_config, runtime):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def graph_problems(cls, vllm_config: Any, runtime: PolicyRuntime) -> list[str]:
        """Reasons why CUDA graphs cannot include decode steps."""
        return graphs.problems(vllm_config, runtime)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        problems = self.graph_problems(self.vllm_config, self.runtime)
        self.table = graphs.fixed_table(
            self.vllm_config, self.runtime, self.device, problems
        )
        if self.table is not None:
            self.context.runner.forbid_full_graphs(self.runtime.requires_layers)

    @property
    def tables(self) -> PageTables:
        tables = self.runtime.tables
        assert tables is not None, "no step has begun"
        return tables

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return self._build(common_attn_metadata, dummy=False)

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        assert self._fits_graph(common), "a graph cannot include this step"
        return self._build(common, dummy=True)

    def _build(self, common: Any, dummy: bool) -> Any:
        fits_graph = self._fits_graph(common)
        table = self.begin_step(common, self.table if fits_graph else None, dummy)
        return self.metadata(common, table, fits_graph)

    def _fits_graph(self, common: Any) -> bool:
        """Whether a graph can include the step.

        If so, the step writes the metadata that graphs read. vLLM decides later
        whether it replays one.
        """
        return (
            self.table is not None
            and common.max_query_len == 1
            and common.num_actual_tokens == common.num_reqs <= self.table.shape.rows
        )
