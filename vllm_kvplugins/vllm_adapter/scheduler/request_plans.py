"""The residency plan of every request that the scheduler knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from vllm.logger import init_logger

from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.plan_cache import PlanCache
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.request_params import (
    requested_loop_ends,
    requested_turn_ends,
    shared_blocks,
)

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")


class RequestPlans:
    """Plans by request, or by request ID.

    Has weak references to requests: an entry disappears with its request.
    """

    def __init__(self, policy: KVCachePolicy, geometry: Geometry) -> None:
        self._policy = policy
        self._block_size = geometry.block_size
        self._plans = PlanCache(policy.plan_request, geometry)
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._lengths: WeakKeyDictionary[Any, Lengths] = WeakKeyDictionary()
        self._throttle = LogThrottle()

    def __len__(self) -> int:
        """Number of requests with a plan."""
        return len(self._lengths)

    def of(self, request: Any) -> ResidencyPlan:
        """The plan of a request."""
        return self._plans.get(self._lengths_of(request))

    def of_id(self, request_id: str) -> ResidencyPlan:
        """The plan of a request that has one already."""
        return self.of(self._requests[request_id])

    def request(self, request_id: str) -> Any | None:
        """The request with this ID; None if it has no plan."""
        return self._requests.get(request_id)

    def continuing(self, request: Any, compaction: Compaction | None) -> ResidencyPlan:
        """The plan of a request if it continued a session. Changes nothing.

        Args:
            compaction: last compaction of the session; None: no session, or one that
                was never compacted.
        """
        lengths = self._lengths_of(request)
        return self._plans.get(replace(lengths, restored=compaction))

    def restart(self, request: Any, compaction: Compaction | None) -> None:
        """Replace the plan of a request by that of ``continuing``."""
        lengths = self._lengths_of(request)
        self._lengths[request] = replace(lengths, restored=compaction)

    def _lengths_of(self, request: Any) -> Lengths:
        lengths = self._lengths.get(request)
        if lengths is None:
            prompt = request.prompt_token_ids or ()
            requested = requested_turn_ends(request.sampling_params)
            turns = self._policy.find_turn_ends(prompt, requested)
            requested = requested_loop_ends(request.sampling_params)
            loops = self._policy.find_tool_loops(prompt, turns, requested)
            prompt_tokens = request.num_prompt_tokens
            shared = shared_blocks(
                self._policy, request.sampling_params, prompt_tokens, self._block_size
            )
            lengths = Lengths(prompt_tokens, turns, None, shared, loops)
            self._lengths[request] = lengths
            self._requests[request.request_id] = request
            for note in self._plans.get(lengths).notes:
                if text := self._throttle.format(note):
                    logger.warning("request %s: %s", request.request_id, text)
        return lengths
