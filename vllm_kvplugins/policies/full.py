"""Full KV: keeps all tokens; the control for all other policies."""

from __future__ import annotations

from typing import ClassVar

from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy


class FullKV(KVCachePolicy):
    """Keep all tokens, and read them through the plugin's page tables.

    Generates the same tokens as stock vLLM. Use it to measure the plugin's overhead.
    """

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keeps all tokens; measures the plugin's overhead"

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        return ResidencyPlan(geometry.block_size)

    @property
    def scores_heads_separately(self) -> bool:
        return True
