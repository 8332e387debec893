"""Requests that continue a session: their admission and their first blocks.

The block table of a request that restores ``n`` tokens of a session::

    block      [0 ... first)  [first ........ ceil(n / block_size))  [...
               null           kept by the session                    new
               dropped by     device-resident blocks, or new ones    allocated by
               the session    that the workers fill                  vLLM as usual

A shared prefix is in front of what the session dropped; its blocks come from vLLM's
prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.vllm_adapter.scheduler.admission import Admission
from vllm_kvplugins.vllm_adapter.scheduler.device_sessions import DeviceSessions
from vllm_kvplugins.vllm_adapter.scheduler.request_plans import RequestPlans

_EMPTY_CACHE = Admission()


class SessionStarts:
    """The admission of every waiting and running request.

    Args:
        pool: vLLM's block pool.
        block_tables: vLLM's lists of blocks, by request ID; waiting requests have none.
    """

    def __init__(
        self,
        policy: KVCachePolicy,
        geometry: Geometry,
        plans: RequestPlans,
        pool: Any,
        block_tables: Mapping[str, Sequence[Any]],
        device_sessions: DeviceSessions,
    ) -> None:
        self._policy = policy
        self._geometry = geometry
        self._plans = plans
        self._pool = pool
        self._block_tables = block_tables
        self._device_sessions = device_sessions
        # Weak references: an entry disappears with its request.
        self._admissions: WeakKeyDictionary[Any, Admission] = WeakKeyDictionary()
        # IDs of requests that have the blocks from which their session was saved.
        self._in_place: set[str] = set()

    def __len__(self) -> int:
        """Number of requests with an admission."""
        return len(self._admissions)

    # -- which session ------------------------------------------------------------

    def of(self, request: Any) -> Admission:
        """The last decision for a request; without one, an empty cache."""
        return self._admissions.get(request, _EMPTY_CACHE)

    def of_id(self, request_id: str) -> Admission:
        """The same by request ID."""
        request = self._plans.request(request_id)
        return _EMPTY_CACHE if request is None else self.of(request)

    def record(self, request: Any, admission: Admission) -> None:
        """Store a decision, and replan the request accordingly."""
        session = admission.session
        self._admissions[request] = admission
        self._plans.restart(request, session.compaction if session else None)

    # -- whether and how far it fits ------------------------------------------------

    def can_start(self, request: Any, session: Session, tokens: int) -> bool:
        """Whether the pool is large enough for a request that restores these tokens.

        If a compaction is due at once, the request holds its blocks and one more.
        Starting with an empty cache may take fewer blocks.
        """
        dropped = session.dropped_blocks
        peak = self._plans.continuing(request, session.compaction).peak_blocks(
            request.num_prompt_tokens, since=int(dropped > 0)
        )
        at_start = tokens // self._geometry.block_size + 1 - dropped
        return max(peak, at_start) <= self._max_request_blocks

    def clip_first_chunk(
        self, request: Any, computed_tokens: int, new_tokens: int
    ) -> int:
        """Number of new tokens that a request may compute in its first step.

        If a compaction is due at the start, it runs before the first step, but vLLM
        gets the freed blocks back after that step. Until then the request holds old and
        new blocks.

        Returns:
            ``new_tokens``, or fewer if the request continues a session and a compaction
            is due; at least the free slots of the last block.
        """
        session = self.of(request).session
        if session is None or request.request_id in self._block_tables:
            return new_tokens
        plan = self._plans.of(request)
        due = plan.num_done(computed_tokens)
        if due == int(session.compaction is not None):
            return new_tokens
        size, max_blocks = self._geometry.block_size, self._max_request_blocks
        bound = self._policy.max_prompt_blocks(request.num_tokens, self._geometry)
        if bound is not None:
            max_blocks = min(max_blocks, bound + plan.shared_blocks)
        stop = max(session.dropped_blocks + max_blocks, computed_tokens // size + 1)
        return min(new_tokens, stop * size - computed_tokens)

    @property
    def _max_request_blocks(self) -> int:
        """Number of blocks that a single request can hold.

        All blocks without vLLM's null block and one spare, which steps in flight may
        hold a little longer.
        """
        blocks: int = self._pool.num_gpu_blocks
        return blocks - 2

    # -- in which blocks ------------------------------------------------------------

    def take_blocks(self, request_id: str) -> list[Any]:
        """Entries of the block table of a starting request behind its cached blocks.

        Null blocks for what its session dropped, then the device-resident blocks of the
        session, if any. vLLM allocates the others.
        """
        admission = self.of_id(request_id)
        match = admission.match
        if match is None:
            return []
        session, own = match.session, []
        has_prefix = (
            session.shared_blocks * self._geometry.block_size == admission.cached_tokens
        )
        # Without it, the session stores a prefix that the request does not need.
        if has_prefix and not match.is_rewound:
            count = -(-match.tokens // self._geometry.block_size) - session.first_block
            own = self._device_sessions.take(session.session_id, count)
        if own:
            self._in_place.add(request_id)
        return [self._pool.null_block] * session.dropped_blocks + own

    def is_in_place(self, request_id: str) -> bool:
        """Whether a request has the blocks from which its session was saved."""
        return request_id in self._in_place

    def release(self, request_id: str) -> None:
        """Forget that a request continues in place; it returns its blocks."""
        self._in_place.discard(request_id)

    def check_integrity(self) -> None:
        """Only requests with blocks continue a session in place."""
        stray = self._in_place - set(self._block_tables)
        assert not stray, f"requests in place without blocks: {sorted(stray)}"
