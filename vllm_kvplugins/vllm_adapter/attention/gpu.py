"""What backends for GPUs share: where vLLM finds them, and the pages of its caches."""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.vllm_adapter.attention.flat import PolicyBackend, PolicyBuilder


class GPUPolicyBackend(PolicyBackend):
    """Mixin of backends that stand in vLLM's place for custom ones."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class GPUPolicyBuilder(PolicyBuilder):
    """Mixin of metadata builders; layers call Python, so no graph holds them."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def page_layout(self, block_size: int, head_dim: int) -> PageLayout:
        device = self.layers[0].kv_cache.device
        return PageLayout.interleaved(block_size, head_dim).to(device)
