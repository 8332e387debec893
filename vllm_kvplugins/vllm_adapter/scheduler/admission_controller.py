"""Decides how requests start; ``admission`` describes the whole sequence."""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.capabilities import Trigger
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.scheduler.admission import Admission
from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager
from vllm_kvplugins.vllm_adapter.scheduler.sessions import SchedulerSessions


class AdmissionController:
    """Decides how requests start, and commits or releases what that takes.

    Args:
        manager: the engine's block manager; it keeps the decisions, because vLLM
            asks it about requests by id.
        host: host memory that requests have reserved.
        sessions: None = sessions are off.
    """

    def __init__(
        self,
        manager: ResidencyBlockManager,
        host: HostReservations,
        sessions: SchedulerSessions | None = None,
    ) -> None:
        self._manager = manager
        self._host = host
        self._sessions = sessions
        # A cached token has no query. A policy that observes every query of the
        # prompt must compute all of it, also if only a later request is compacted.
        self._needs_whole_prompt = _observes_prompt(manager.kv_cache_spec.policy)

    # -- before the request has blocks ------------------------------------------

    def admit(self, request: Any, hit_tokens: int) -> Admission:
        """Decide what a waiting request starts from, and remember it.

        Args:
            hit_tokens: tokens that vLLM found in its prefix cache.
        """
        admission = self._decide(request, hit_tokens)
        self._manager.starts.record(request, admission)
        return admission

    def _decide(self, request: Any, hit_tokens: int) -> Admission:
        cached = self.usable_hit(request, hit_tokens)
        if not self._make_host_room(request):
            return Admission(cached, waits_for="host memory")
        sessions = self._sessions
        match = sessions.match(request, more_than=cached) if sessions else None
        if match is None:
            return Admission(cached)
        assert sessions is not None
        if match.ready:
            return Admission(match=match)
        sessions.directory.fetch(match, request.request_id)
        return Admission(match=match, waits_for="session")

    def usable_hit(self, request: Any, hit_tokens: int) -> int:
        """How many tokens of a prefix-cache hit a request may use.

        Only blocks that no compaction rewrites: a longer hit would skip the queries
        that score the prompt, and the retained region would lie in blocks that other
        requests share. None at all if the policy observes the whole prompt.
        """
        blocks = self._manager.plans.continuing(request, None).exact_prefix_blocks
        if self._needs_whole_prompt and (blocks is not None or self._sessions):
            return 0
        if blocks is None:
            return hit_tokens
        return int(min(hit_tokens, blocks * self._manager.block_size))

    def _make_host_room(self, request: Any) -> bool:
        """Whether host memory has room for a request.

        Sessions give way to requests, the least recently used one first: they can be
        recomputed.
        """
        while not self._host.fits(request):
            if self._sessions is None or not self._sessions.directory.drop_oldest():
                return False
        return True

    # -- after that ---------------------------------------------------------------

    def start(self, request: Any) -> None:
        """Commit the decision: vLLM gave the request its blocks."""
        self._host.reserve(request)
        if self._sessions is not None:
            self._sessions.start(request, self._manager.starts.of(request))

    def finish(self, request: Any) -> None:
        """Release a request's host memory and keep its cache as a session."""
        self._host.release(request)
        if self._sessions is not None:
            self._sessions.finish(request, self._manager.starts.of(request))


def _observes_prompt(policy: KVCachePolicy) -> bool:
    observation = policy.observation
    return policy.spans is not None or (
        observation is not None and Trigger.PREFILL_CHUNK in observation.triggers
    )
