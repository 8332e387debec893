"""What backends for GPUs share: where vLLM finds them, the pages of its caches, and
decoding steps in CUDA graphs.

A graph is captured with so many rows and replayed for steps of as many or fewer; the
rows behind have length 0. Everything that changes from step to step lies in tensors
that stay where they are: the page lists (``FixedTable``), vLLM's own inputs. Numbers
that a kernel is launched with depend on the captured rows alone, so these steps have
one query per sequence, padding included, and page lists of the greatest width.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvplugins.engine.page_table import FlatTable
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.vllm_adapter.attention import graphs
from vllm_kvplugins.vllm_adapter.attention.flat import PolicyBuilder
from vllm_kvplugins.vllm_adapter.worker.context import context_of_layers


class GPUPolicyBackend:
    """Mixin of backends that stand in vLLM's place for custom ones."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class GPUPolicyBuilder(PolicyBuilder):
    """Mixin of metadata builders.

    Attributes:
        table: what graphs read; None = no graph holds attention.
    """

    device: torch.device

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
        """Why no graph may hold a decoding step."""
        return graphs.problems(vllm_config, runtime)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        why_not = self.graph_problems(self.vllm_config, self.runtime)
        self.table = graphs.fixed_table(
            self.vllm_config, self.runtime, self.device, why_not
        )
        if self.table is not None:
            self.context.runner.keep_out_of_graphs(self.runtime.requires_layers)

    def page_layout(self, block_size: int, head_dim: int) -> PageLayout:
        device = self.layers[0].kv_cache.device
        return PageLayout.interleaved(block_size, head_dim).to(device)

    def build(
        self, common_prefix_len: int, common: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return self._built(common, dummy=False)

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        assert self._is_for_graphs(common), "more than a graph may hold"
        return self._built(common, dummy=True)

    def _built(self, common: Any, dummy: bool) -> Any:
        for_graphs = self._is_for_graphs(common)
        table = self.begin_step(common, self.table if for_graphs else None, dummy)
        return self.metadata(common, table, for_graphs)

    def _is_for_graphs(self, common: Any) -> bool:
        """Whether a graph may hold the step. Then its metadata is what a graph reads,
        also when none is replayed: that is decided elsewhere."""
        return (
            self.table is not None
            and common.max_query_len == 1
            and common.num_actual_tokens == common.num_reqs <= self.table.shape.rows
        )

    @abstractmethod
    def metadata(self, common: Any, table: FlatTable, one_each: bool) -> Any:
        """Of a step, for the kernel.

        Args:
            one_each: every row asks with one token, padding included; what the kernel
                is launched with may depend on nothing but the number of rows.
        """
