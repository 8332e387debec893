"""Decides how requests start; ``admission`` describes the sequence of calls."""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.sessions.records import Match
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.config.kv_connectors import observes_prompt
from vllm_kvplugins.vllm_adapter.config.request_params import wants_report
from vllm_kvplugins.vllm_adapter.scheduler.admission import Admission
from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager
from vllm_kvplugins.vllm_adapter.scheduler.request_report import report_of
from vllm_kvplugins.vllm_adapter.scheduler.sessions import SchedulerSessions


class AdmissionController:
    """Decides how requests start, and reserves and releases their resources.

    Args:
        manager: the engine's block manager. It stores the decisions, because vLLM calls
            it with request IDs.
        host: reservations of host memory.
        sessions: None: sessions are off.
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
        self._reports: dict[str, dict[str, Any]] = {}
        # Cached tokens have no queries. A policy that observes every query of the
        # prompt must compute the whole prompt, even if only a request that continues
        # the session is compacted.
        self._needs_whole_prompt = observes_prompt(manager.kv_cache_spec.policy)

    # -- before the request has blocks --------------------------------------------

    def admit(self, request: Any, hit_tokens: int) -> Admission:
        """Decide what a waiting request starts from, and record the decision.

        Args:
            hit_tokens: length of the hit in vLLM's prefix cache.
        """
        admission = self._decide(request, hit_tokens)
        self._manager.starts.record(request, admission)
        return admission

    def _decide(self, request: Any, hit_tokens: int) -> Admission:
        cached = self.usable_hit(request, hit_tokens)
        sessions = self._sessions
        if sessions is None:
            fits = self._host.fits(request)
            return Admission(cached, waits_for=None if fits else "host memory")
        if sessions.awaits_look_up(request):
            return Admission(cached, waits_for="session")
        match = sessions.match(request, more_than=cached)
        fits, taken = self._make_host_room(request, sessions, match)
        if not fits:
            return Admission(cached, waits_for="host memory")
        if match is None:
            return Admission(cached)
        shared = self._manager.plans.continuing(request, None).shared_tokens
        has_prefix = hit_tokens >= shared
        if match.session.shared_blocks and not has_prefix:
            return Admission(cached)  # the session does not store the prefix
        shared = shared if has_prefix else 0
        if match.ready:
            if sessions.awaits_copy(request, match, shared):
                return Admission(shared, match=match, waits_for="session")
            return Admission(shared, match=match, moves=taken is not None)
        if sessions.directory.fetch(match, request.request_id):
            return Admission(shared, match=match, waits_for="session")
        return Admission(cached)

    def usable_hit(self, request: Any, hit_tokens: int) -> int:
        """Number of tokens of a prefix-cache hit that a request may use.

        Only blocks that no compaction rewrites are usable. A longer hit would skip the
        queries that score the prompt, and the retained region would be in blocks that
        other requests share. If the policy observes the whole prompt, only the shared
        prefix is usable, whose tokens it does not observe.
        """
        plan = self._manager.plans.continuing(request, None)
        blocks = plan.exact_prefix_blocks
        if self._needs_whole_prompt and (blocks is not None or self._sessions):
            return min(hit_tokens, plan.shared_tokens)
        if blocks is None:
            return hit_tokens
        return int(min(hit_tokens, blocks * self._manager.block_size))

    def may_load(self, request: Any) -> bool:
        """Whether another KV connector may load tokens of a waiting request."""
        is_waiting = self._manager.starts.of(request).waits_for == "host memory"
        return not (is_waiting or request.skip_reading_prefix_cache)

    def load(self, request: Any, cached_tokens: int, offered_tokens: int) -> int:
        """Start from what another KV connector offers, if nothing restores more.

        The tokens are exact, so they may reach into blocks that the first compaction
        rewrites later. That compaction needs the newest queries, which are not loaded.

        Args:
            cached_tokens: tokens of the prefix cache.
            offered_tokens: end of the tokens that the connector can load.

        Returns:
            End of the tokens that count as computed; 0: the request starts otherwise.
        """
        manager, policy = self._manager, self._manager.kv_cache_spec.policy
        match = manager.starts.of(request).match
        tokens = min(offered_tokens, request.num_tokens - 1)
        counted: int = manager.plans.continuing(request, None).can_start_at(
            tokens,
            compacted_at=0,
            # At least one, so that the compaction runs at the end of a step.
            num_queries=max(policy.queries_needed, 1),
            first_query=tokens,
        )
        if counted <= max(cached_tokens, match.tokens if match else 0):
            return 0
        admission = Admission(
            cached_tokens, loaded_tokens=counted, offered_tokens=offered_tokens
        )
        manager.starts.record(request, admission)
        return counted

    def _make_host_room(
        self, request: Any, sessions: SchedulerSessions, match: Match | None
    ) -> tuple[bool, str | None]:
        """Make room for a request in host memory.

        Drops sessions, least recently used first: they can be recomputed. The session
        that the request continues is not dropped. It moves into the request instead,
        which then needs no more memory for its tokens.

        Returns:
            Whether there is room; the ID of the session if it moves.
        """
        own = taken = None
        if match is not None and self._manager.kv_cache_spec.policy.retrieval:
            own = match.session.session_id
            taken = None if sessions.is_branch(match) else own
        while not self._host.fits(request, taken):
            oldest = sessions.directory.oldest(besides=taken)
            if oldest is None:
                return False, None
            if oldest == own:
                taken = own
            else:
                sessions.directory.evict(oldest)
        return True, taken

    # -- when the request starts and ends -----------------------------------------

    def start(self, request: Any) -> None:
        """Commit the decision; vLLM has given the request its blocks."""
        self._host.reserve(request)
        if self._sessions is not None:
            self._sessions.start(request, self._manager.starts.of(request))

    def finish(self, request: Any) -> None:
        """Release the host memory of a request, and keep its cache as a session."""
        host_bytes, session_bytes = self._host.reserved_by(request), 0
        self._host.release(request)
        if self._sessions is not None:
            admission = self._manager.starts.of(request)
            session_bytes = self._sessions.finish(request, admission)
        if wants_report(request.sampling_params):
            self._reports[request.request_id] = report_of(
                request, self._manager, host_bytes, session_bytes
            )

    def take_report(self, request_id: str) -> dict[str, Any] | None:
        """What the policy did to a request that just ended, if it asked for that."""
        return self._reports.pop(request_id, None)
