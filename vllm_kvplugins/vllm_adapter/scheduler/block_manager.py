"""The scheduler's side of a plan: freeing blocks of running requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from vllm.logger import init_logger
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.plan.geometry import Lengths
from vllm_kvplugins.plan.plan_cache import PlanCache
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.policies.capabilities import Trigger
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.directory import Match
from vllm_kvplugins.vllm_adapter.config.turns import asked_turn_ends
from vllm_kvplugins.vllm_adapter.scheduler.device_sessions import DeviceSessions

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")


class ResidencyBlockManager(FullAttentionManager):
    """Frees what the plan no longer holds, punching holes into block lists.

    ::

        before   [b0 b1 b2 b3 b4 b5 b6]      candidates [0, 6), zone [4, 6)
        after    [ 0  0  0  0 b4 b5 b6]      b0..b3 back in the pool

    vLLM calls ``remove_skipped_blocks`` with the count of tokens that are fully
    processed, so no step in flight still reads what is freed. Freed blocks keep
    their contents and hashes; rewritten ones are never hashed.

    Attributes:
        freed_blocks: blocks given back by plans since the start.
        compactions: compactions whose blocks were freed since the start.
        observes_prompt: whether the policy looks at every query of the prompt.
        parked: free blocks that still hold sessions.
    """

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        # the scheduler says whether workers are told which blocks are new
        kwargs["needs_kv_cache_zeroing"] = True
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.freed_blocks = 0
        self.compactions = 0
        # request -> how many of its plan's compactions have been freed
        self._freed_up_to: dict[str, int] = {}
        self._plans = PlanCache(kv_cache_spec.policy.plan, kv_cache_spec.geometry)
        # vLLM names requests only by id when it frees; both go with the request
        self._requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._lengths: WeakKeyDictionary[Any, Lengths] = WeakKeyDictionary()
        self._noted: WeakSet[Any] = WeakSet()
        self._notes = LogThrottle()
        # sessions that waiting and running requests start from; they go with them
        self._starts: WeakKeyDictionary[Any, Match] = WeakKeyDictionary()
        self.parked = DeviceSessions(self.block_pool)
        # requests that were given the blocks that their session was saved from
        self._in_place: set[str] = set()
        policy, geometry = kv_cache_spec.policy, kv_cache_spec.geometry
        observation = policy.observation
        self.observes_prompt = policy.spans is not None or (
            observation is not None and Trigger.PREFILL_CHUNK in observation.triggers
        )
        self._bounds_prompts = policy.max_prompt_blocks(1, geometry) is not None

    def plan(self, request: Any) -> ResidencyPlan:
        """The plan of a request."""
        lengths = self._lengths.get(request)
        if lengths is None:
            policy = self.kv_cache_spec.policy
            turns: tuple[int, ...] = ()
            if policy.turns is not None:
                asked = asked_turn_ends(request.sampling_params)
                turns = policy.turns.turn_ends(request.prompt_token_ids or (), asked)
            start = self._starts.get(request)
            restored = start.session.compaction if start else None
            lengths = Lengths(request.num_prompt_tokens, turns, restored)
            self._lengths[request] = lengths
            self._requests[request.request_id] = request
            if request not in self._noted:
                self._noted.add(request)
                for note in self._plans.get(lengths).notes:
                    if format := self._notes.format(note):
                        logger.warning("request %s: %s", request.request_id, format)
        return self._plans.get(lengths)

    def plan_from(self, request: Any, compaction: Compaction | None) -> ResidencyPlan:
        """The plan that a request would have if it continued a session."""
        self.plan(request)
        lengths = self._lengths[request]
        return self._plans.get(replace(lengths, restored=compaction))

    # -- sessions ---------------------------------------------------------------

    def start_from(self, request: Any, match: Match | None) -> None:
        """From which session a request starts, once it is given blocks."""
        if self._starts.get(request) is not match:
            self._lengths.pop(request, None)
        if match is None:
            self._starts.pop(request, None)
        else:
            self._starts[request] = match

    def start_of(self, request: Any) -> Match | None:
        """The session that a request starts from, if any."""
        return self._starts.get(request)

    def clip_start(self, request: Any, computed_tokens: int, new_tokens: int) -> int:
        """How many of its new tokens a request may compute in the step in which it
        starts from a session.

        What is due by then is compacted before that step, but vLLM gets the blocks
        back behind it; until then the request holds them beside the new ones.
        """
        match = self._starts.get(request)
        if match is None or request.request_id in self.req_to_blocks:
            return new_tokens
        done = self.plan(request).num_done(computed_tokens)
        if done == int(match.session.compaction is not None):
            return new_tokens
        spec, size = self.kv_cache_spec, self.block_size
        most = spec.policy.max_prompt_blocks(request.num_tokens, spec.geometry)
        most = self._pool_blocks if most is None else min(most, self._pool_blocks)
        stop = max(match.session.first_block + most, computed_tokens // size + 1)
        return int(min(new_tokens, stop * size - computed_tokens))

    def can_start(self, request: Any, session: Session, tokens: int) -> bool:
        """Whether the pool can ever hold a request that starts from so many tokens
        of a session, a block beside what is due; from scratch it may need less."""
        first = session.first_block
        peak = self.plan_from(request, session.compaction).peak_blocks(
            request.num_prompt_tokens, since=int(first > 0)
        )
        most: int = max(peak, tokens // self.block_size + 1 - first)
        return most <= self._pool_blocks

    @property
    def _pool_blocks(self) -> int:
        """Blocks of a pool that a request has for itself: all but vLLM's null block
        and one spare, which steps in flight may hold a little longer."""
        blocks: int = self.block_pool.num_gpu_blocks
        return blocks - 2

    def _first_block(self, request_id: str) -> int:
        """First block that a request holds when it starts from a session."""
        match = self._starts.get(self._requests.get(request_id))
        return match.session.first_block if match else 0

    def allocate_external_computed_blocks(
        self, request_id: str, *args: Any, **kwargs: Any
    ) -> None:
        """Blocks for what a session restores, its own if they are parked, and holes
        for what it has dropped."""
        match = self._starts.get(self._requests.get(request_id))
        if match is not None:
            first = match.session.first_block
            self.req_to_blocks[request_id].extend([self._null_block] * first)
            if first:
                self._freed_up_to[request_id] = 1
            count = -(-match.tokens // self.block_size) - first
            parked = self.parked.take(match.session.session_id, count)
            if parked:
                self.req_to_blocks[request_id].extend(parked)
                self._in_place.add(request_id)
        super().allocate_external_computed_blocks(request_id, *args, **kwargs)

    def takes_over(self, request_id: str) -> bool:
        """Whether a request that was just given blocks got those that its session
        was saved from."""
        return request_id in self._in_place

    def block_ids(self, request_id: str) -> set[int]:
        """Physical ids of the blocks that a request has, holes apart."""
        blocks = self.req_to_blocks.get(request_id, ())
        return {block.block_id for block in blocks if not block.is_null}

    def new_step_starts(self) -> None:
        self.parked.settle()
        super().new_step_starts()

    # -- blocks ---------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        *args: Any,
        apply_admission_cap: bool = False,
        **kwargs: Any,
    ) -> int:
        """Nothing for what a session has dropped; at admission what a request holds
        at most, not how long it is."""
        promised = holes = 0
        if request_id not in self.num_cached_block:
            holes = self._first_block(request_id)
        if apply_admission_cap:
            plan = self.plan(self._requests[request_id])
            peak = plan.peak_blocks(num_tokens, since=int(holes > 0))
            num_tokens = min(num_tokens, (peak + holes) * self.block_size)
            promised = self._promised_blocks()
        own: int = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            *args,
            apply_admission_cap=apply_admission_cap,
            **kwargs,
        )
        return max(own - holes, 0) + promised

    def _promised_blocks(self) -> int:
        """Blocks that prompts which are being read have freed and will take again.

        Without them every compaction would seem to make room for one more prompt,
        to be preempted when the block after it is read.
        """
        if not self._bounds_prompts:
            return 0
        promised = 0
        for request_id, blocks in self.req_to_blocks.items():
            request = self._requests.get(request_id)
            if request is None or not blocks:
                continue
            if request.num_computed_tokens < request.num_prompt_tokens:
                plan, freed = self.plan(request), self._freed_up_to.get(request_id, 0)
                first_held = plan.compaction(freed - 1).retained.start if freed else 0
                since = int(self._first_block(request_id) > 0)
                peak = plan.peak_blocks(request.num_tokens, since)
                promised += max(peak - (len(blocks) - first_held), 0)
        return promised

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free the blocks of every compaction that has run by now."""
        blocks = self.req_to_blocks.get(request_id)
        if not blocks:
            return
        plan = self.plan(self._requests[request_id])
        done = plan.num_done(processed_computed_tokens)
        freed_up_to = self._freed_up_to.get(request_id, 0)
        for index in range(freed_up_to, done):
            span = plan.compaction(index).freed
            held = sum(not block.is_null for block in blocks[span.start : span.stop])
            self._remove_blocks_in_range(request_id, span.start, span.stop)
            self.freed_blocks += held
            self.compactions += 1
        if done > freed_up_to:
            self._freed_up_to[request_id] = done

    def cache_blocks(
        self, request: Any, num_tokens: int, *args: Any, **kwargs: Any
    ) -> None:
        """Hash only blocks that no compaction rewrites."""
        if self._first_block(request.request_id):
            return  # what is left of its beginning is not exact
        exact = self.plan(request).exact_prefix_blocks
        if exact is not None:
            num_tokens = min(num_tokens, exact * self.block_size)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self._freed_up_to.pop(request_id, None)
        self._in_place.discard(request_id)
        blocks: list[Any] = super().pop_blocks_for_free(request_id)
        return blocks

    def check_integrity(self) -> None:
        """No request state without blocks, and none that are parked besides."""
        stray = {*self._freed_up_to, *self._in_place} - set(self.req_to_blocks)
        assert not stray, f"state of requests without blocks: {sorted(stray)}"
        self.parked.check_integrity()
