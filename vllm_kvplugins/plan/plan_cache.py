"""A cache of residency plans, used by the scheduler and by the worker."""

from __future__ import annotations

from collections.abc import Callable

from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import ResidencyPlan


class PlanCache:
    """Computes each plan once. Discards all plans when 4096 are cached.

    Args:
        make_plan: a policy's ``plan``, a pure function.
        geometry: shape of the cache, the same for all plans.
    """

    _MAX_PLANS = 4096

    def __init__(
        self,
        make_plan: Callable[[Lengths, Geometry], ResidencyPlan],
        geometry: Geometry,
    ) -> None:
        self._make_plan = make_plan
        self._geometry = geometry
        self._plans: dict[Lengths, ResidencyPlan] = {}

    def get(self, lengths: Lengths) -> ResidencyPlan:
        """The plan for these token counts."""
        plan = self._plans.get(lengths)
        if plan is None:
            if len(self._plans) >= self._MAX_PLANS:
                self._plans.clear()
            plan = self._plans[lengths] = self._make_plan(lengths, self._geometry)
        return plan
