"""Plans that have been made, for both processes."""

from __future__ import annotations

from vllm_kvplugins.policies.base import Geometry, KVCachePolicy, Lengths
from vllm_kvplugins.residency.plan import ResidencyPlan


class Plans:
    """A policy's plans by what they depend on; the last few thousand are kept."""

    _MOST = 4096

    def __init__(self, policy: KVCachePolicy, geometry: Geometry) -> None:
        self._policy = policy
        self._geometry = geometry
        self._made: dict[Lengths, ResidencyPlan] = {}

    def get(self, lengths: Lengths) -> ResidencyPlan:
        """The plan of a request."""
        plan = self._made.get(lengths)
        if plan is None:
            if len(self._made) >= self._MOST:
                self._made.clear()
            plan = self._made[lengths] = self._policy.plan(lengths, self._geometry)
        return plan
