"""Admission: decides what a waiting request starts from, once per scheduling attempt.

vLLM calls several methods for a waiting request, in the order below. The first call
makes the decision; the others read it. If there are no free blocks, a later step makes
a new decision, because only the last call commits it::

    vLLM, Scheduler.schedule()            this package
    ------------------------------------  -------------------------------------------
    _get_local_prefix_cache_hit           AdmissionController.admit -> Admission
                                            1. how much of the cache hit is usable?
                                            2. does a session restore more?
                                            3. host memory for offloaded tokens?
    connector.get_num_new_matched_tokens  reads Admission.external_tokens;
                                          None: vLLM tries again in a later step
                                          With another KV connector, the longer of a
                                          session and its tokens (composed_connector)
    _reserve_prefill_lookahead            SessionStarts.clip_first_chunk
    allocate_slots
      get_num_blocks_to_allocate          no blocks for tokens the session dropped
      allocate_external_computed_blocks   SessionStarts.take_blocks
    connector.update_state_after_alloc    AdmissionController.start: reserve host
                                          memory, tell the workers to load the session

    ... the request runs, is preempted (then it is admitted again) or ends ...

    connector.request_finished_all_groups AdmissionController.finish: release host
                                          memory, save the session

Matching a session has no side effects. ``admit`` has four: it drops idle sessions to
make room in host memory, adds sessions that were found in a store of several replicas,
starts to read a session that is only in its files, and starts to copy one to the device
while others compute. They are harmless if the request does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.records import Match


@dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts from, if vLLM has free blocks for it.

    A request starts from a session, or from the prefix cache and what another KV
    connector loads after it. With a session, only its shared prefix comes from the
    prefix cache.

    Attributes:
        cached_tokens: usable tokens of the prefix-cache hit, whole blocks; of a request
            that continues a session, those of its shared prefix.
        match: the session to continue; None: no session.
        loaded_tokens: end of the tokens that count as computed because another KV
            connector loads them; 0: it loads none.
        offered_tokens: end of the tokens that it loads. The request computes those
            after ``loaded_tokens`` again, for their queries, but needs blocks for all.
        moves: the session leaves the directory, and the request takes it.
        waits_for: why the request cannot start in this step; None: it can.
    """

    cached_tokens: int = 0
    match: Match | None = None
    moves: bool = False
    loaded_tokens: int = 0
    offered_tokens: int = 0
    waits_for: Literal["host memory", "session"] | None = None

    @property
    def session(self) -> Session | None:
        """The session to continue, if any."""
        return self.match.session if self.match else None

    @property
    def external_tokens(self) -> int | None:
        """Tokens that a session restores behind ``cached_tokens``.

        None: try again in a later step.
        """
        if self.waits_for is not None:
            return None
        return self.match.tokens - self.cached_tokens if self.match else 0

    def awaits_load(self, request: Any) -> bool:
        """Whether no step has shown yet that the tokens to load are there."""
        processed = request.num_computed_tokens - request.num_in_flight_tokens
        return bool(0 < self.loaded_tokens >= processed)

    @property
    def first_block(self) -> int:
        """First resident logical block; the session dropped the earlier ones."""
        return self.match.session.first_block if self.match else 0

    @property
    def dropped_blocks(self) -> int:
        """Blocks that the session dropped and that the request does not hold."""
        return self.match.session.dropped_blocks if self.match else 0

    @property
    def first_query(self) -> int:
        """Position of the first token whose query the workers will have.

        The prefix cache and other connectors have no queries; a session has the queries
        of its newest tokens.
        """
        if self.match is None:
            return max(self.cached_tokens, self.loaded_tokens)
        return min(self.match.session.first_query, self.match.tokens)
