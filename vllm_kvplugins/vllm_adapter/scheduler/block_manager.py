"""The block manager: returns blocks that a plan frees to vLLM's pool."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.vllm_adapter.scheduler.device_sessions import DeviceSessions
from vllm_kvplugins.vllm_adapter.scheduler.request_plans import RequestPlans
from vllm_kvplugins.vllm_adapter.scheduler.session_starts import SessionStarts


class ResidencyBlockManager(FullAttentionManager):
    """Frees blocks of running requests according to their plans.

    A compaction at token count ``p`` moves the kept tokens of its candidate blocks
    ``[first, stop)`` into the newest ``m`` of these blocks, the retained region. When
    ``p`` tokens are fully processed, this manager frees::

        freed = [first, stop - m)        first = start of the last retained region, or 0
                                         stop <= p // block_size

        block          0    1    2    3    4    5    6        m = 2, stop = 6
        before       [ b0   b1   b2   b3   b4   b5 | b6 ...
                       freed ----------->| retained| tail: not compacted
        after        [ 0    0    0    0    b4   b5 | b6 ...    0: vLLM's null block
        next time      first = 4: frees [4, stop - m), and so on

    With a shared prefix, ``first`` begins behind its blocks. The request holds them to
    its end, so that they stay in the prefix cache for others.

    vLLM reports only processed tokens, so no step in flight reads a freed block. Freed
    blocks keep their contents and hashes, so the prefix cache stays valid below the
    first retained region. Rewritten blocks are never hashed.

    Attributes:
        plans: the plan of each request.
        starts: the admission of each request.
        device_sessions: free blocks that still hold pages of sessions.
        freed_blocks: number of blocks that compactions have freed.
        compactions: number of compactions whose blocks are freed.
        freed_compactions: the same for each request with blocks; no entry for 0.
    """

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM's manager then collects the new blocks of each step. The scheduler
        # decides whether workers zero them.
        kwargs["needs_kv_cache_zeroing"] = True
        super().__init__(kv_cache_spec, *args, **kwargs)
        policy, geometry = kv_cache_spec.policy, kv_cache_spec.geometry
        self.plans = RequestPlans(policy, geometry)
        self.device_sessions = DeviceSessions(self.block_pool)
        self.starts = SessionStarts(
            policy,
            geometry,
            self.plans,
            self.block_pool,
            self.req_to_blocks,
            self.device_sessions,
        )
        self.freed_blocks = 0
        self.compactions = 0
        self.freed_compactions: dict[str, int] = {}
        self._bounds_prompts = policy.max_prompt_blocks(1, geometry) is not None

    # -- freeing ------------------------------------------------------------------

    def freeable(self, request_id: str, processed_tokens: int) -> list[Compaction]:
        """Compactions that have run but whose blocks are not freed yet, in order."""
        plan = self.plans.of_id(request_id)
        first = self.freed_compactions.get(request_id, 0)
        return [
            plan.compaction(i) for i in range(first, plan.num_done(processed_tokens))
        ]

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free the blocks of compactions that have run."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        compactions = self.freeable(request_id, processed_computed_tokens)
        for compaction in compactions:
            span = compaction.freed
            num_held = sum(
                not block.is_null for block in blocks[span.start : span.stop]
            )
            self._remove_blocks_in_range(request_id, span.start, span.stop)
            self.freed_blocks += num_held
        if compactions:
            self.compactions += len(compactions)
            before = self.freed_compactions.get(request_id, 0)
            self.freed_compactions[request_id] = before + len(compactions)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        """Return all blocks of a request that ends or is preempted."""
        self.freed_compactions.pop(request_id, None)
        self.starts.release(request_id)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks

    # -- allocating ---------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Number of blocks to allocate, without those that a session dropped.

        At admission (``apply_admission_cap``), counts the peak of the request instead
        of its whole length, plus the blocks that running prompts still need.
        """
        num_tokens = self._with_loaded(request_id, num_tokens)
        dropped = promised = 0
        if request_id not in self.num_cached_block:
            dropped = self.starts.of_id(request_id).dropped_blocks
        if apply_admission_cap:
            plan = self.plans.of_id(request_id)
            peak = plan.peak_blocks(num_tokens, since=int(dropped > 0))
            num_tokens = min(num_tokens, (peak + dropped) * self.block_size)
            promised = self._promised_blocks()
        count: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        return max(count - dropped, 0) + promised

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Allocate blocks, also for all tokens that another KV connector loads."""
        blocks: list[Any] = super().allocate_new_blocks(
            request_id, self._with_loaded(request_id, num_tokens), *args, **kwargs
        )
        return blocks

    def _with_loaded(self, request_id: str, num_tokens: int) -> int:
        return max(num_tokens, self.starts.of_id(request_id).offered_tokens)

    def _promised_blocks(self) -> int:
        """Free blocks that prompts in prefill will allocate again.

        Otherwise each compaction would seem to make room for one more prompt, and the
        next block of the running prompt would preempt it.
        """
        if not self._bounds_prompts:
            return 0
        return sum(map(self._promised_to, self.req_to_blocks))

    def _promised_to(self, request_id: str) -> int:
        blocks = self.req_to_blocks[request_id]
        request = self.plans.request(request_id)
        if request is None or not blocks:
            return 0
        if request.num_computed_tokens >= request.num_prompt_tokens:
            return 0
        plan, freed = self.plans.of(request), self.freed_compactions.get(request_id, 0)
        since = int(self.starts.of(request).first_block > 0)
        peak: int = plan.peak_blocks(request.num_tokens, since)
        return max(peak - (len(blocks) - plan.dropped_blocks(freed)), 0)

    def allocate_external_computed_blocks(
        self, request_id: str, *args: Any, **kwargs: Any
    ) -> None:
        """Start the block table of a request that continues a session."""
        blocks = self.starts.take_blocks(request_id)
        if blocks:
            self.req_to_blocks[request_id].extend(blocks)
        if self.starts.of_id(request_id).first_block:
            # The compaction of the session is the first one of the plan, and its blocks
            # are already free.
            self.freed_compactions[request_id] = 1
        super().allocate_external_computed_blocks(request_id, *args, **kwargs)

    def block_ids(self, request_id: str) -> set[int]:
        """Physical IDs of the blocks that a request holds."""
        blocks = self.req_to_blocks.get(request_id, ())
        return {block.block_id for block in blocks if not block.is_null}

    def new_step_starts(self) -> None:
        """Keep blocks of ended requests for their sessions, before others allocate."""
        self.device_sessions.keep_freed_blocks()
        super().new_step_starts()

    # -- prefix cache ---------------------------------------------------------------

    def num_exact_tokens(self, request: Any, num_tokens: int) -> int:
        """How many of the first ``num_tokens`` tokens are in blocks without changes.

        No compaction rewrites these blocks, so they may enter the prefix cache.
        """
        plan = self.plans.of(request)
        if self.starts.of(request).first_block:
            # The session dropped the tokens behind the shared prefix.
            return min(num_tokens, plan.shared_tokens)
        blocks = plan.exact_prefix_blocks
        return (
            num_tokens if blocks is None else min(num_tokens, blocks * self.block_size)
        )

    def cache_blocks(
        self, request: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Hash the blocks of ``num_exact_tokens``."""
        exact = self.num_exact_tokens(request, num_tokens)
        super().cache_blocks(request, exact, *args, **kwargs)

    def check_integrity(self) -> None:
        """Only requests with blocks have state; no request has blocks of sessions."""
        stray = set(self.freed_compactions) - set(self.req_to_blocks)
        assert not stray, f"state of requests without blocks: {sorted(stray)}"
        self.starts.check_integrity()
        self.device_sessions.check_integrity()
