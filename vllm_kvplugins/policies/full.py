"""Keep everything: the control that every other policy is compared with."""

from __future__ import annotations

from typing import ClassVar

from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy


class FullKV(KVCachePolicy):
    """All tokens stay, read through the plugin's page tables.

    Tokens equal stock vLLM; use it to see what the plugin's own path costs.
    """

    name: ClassVar[str] = "full"
    summary: ClassVar[str] = "keep everything, through the plugin's own path"

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        return ResidencyPlan(geometry.block_size)
