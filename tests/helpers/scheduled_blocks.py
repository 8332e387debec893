"""The calls of vLLM's scheduler to its KV cache manager, one request at a time.

There is no engine and no model: a stand-in for the worker records which block it would
write.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request, RequestStatus

from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.config.pool import pool_problem
from vllm_kvplugins.vllm_adapter.scheduler.admission_controller import (
    AdmissionController,
)
from vllm_kvplugins.vllm_adapter.scheduler.scheduler import (
    ResidencyScheduling,
    caches_states,
    residency_manager,
)
from vllm_kvplugins.vllm_adapter.scheduler.spec import with_policy

SIZE, BLOCKS, MODEL_LENGTH = 4, 24, 120  # tokens; with the null block; tokens
GEOMETRY = Geometry(SIZE, num_layers=4, num_kv_heads=2, kv_bytes_per_token=1024)


class Stock:
    """The part of vLLM's scheduler configuration that our manager reads; no drafts."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self.kv_cache_manager, self.block_size = kv_cache_manager, SIZE

    def _reserve_prefill_lookahead(self, request: Any, done: int, new: int) -> int:
        return new

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, ...]:
        return (*self.kv_cache_manager.get_computed_blocks(request), False)


class Scheduling(ResidencyScheduling, Stock):
    """Our block manager over vLLM's."""

    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        Stock.__init__(self, kv_cache_manager)
        self._residency_manager = residency_manager(kv_cache_manager)
        self._caches_states = caches_states(kv_cache_manager)
        self._drops_last_block = False


@dataclass(eq=False)
class Life:
    """A request, and the state that the test tracks for it.

    Attributes:
        plan: made by the policy itself.
        exact: what an untouched block holds, by its place: a hash of all tokens up to
            its end.
        flying: steps whose output is not in yet: tokens, whether one is sampled.
        slots: tokens that there are blocks for.
        holes: blocks that were freed.
        kept: blocks that compactions rewrote: at which token count, last.
    """

    request: Request
    plan: ResidencyPlan
    exact: list[int]
    flying: deque[tuple[int, bool]] = field(default_factory=deque)
    slots: int = 0
    holes: set[int] = field(default_factory=set)
    kept: dict[int, int] = field(default_factory=dict)

    def begin_anew(self) -> None:
        self.slots = 0
        self.holes, self.kept = set(), {}

    def compactions(self, tokens: int) -> list[Compaction]:
        """Requests that ran past compactions, by how many tokens."""
        compactions: list[Compaction] = []
        while self.plan.decode_compaction or len(compactions) < len(
            self.plan.compactions
        ):
            compaction = self.plan.compaction(len(compactions))
            if compaction.at_tokens > tokens:
                break
            compactions.append(compaction)
        return compactions

    def content(self, place: int) -> tuple[Any, ...]:
        """The contents that the worker must find in a block."""
        if place in self.kept:
            return "kept", self.request.request_id, self.kept[place]
        filled = min(self.request.num_computed_tokens - place * SIZE, SIZE)
        return "exact", self.exact[place], filled


class Schedule:
    """Requests that run and wait, and the blocks that they hold.

    Args:
        asynchronous: a step is scheduled while the one before it is in flight.
        reserve: a request starts only if there is room for all of its prompt.
        counts: what happened.

    Attributes:
        gone: requests that ended with steps in flight.
        wrote: what is in a block, by its id.
    """

    def __init__(
        self,
        policy: KVCachePolicy,
        asynchronous: bool,
        reserve: bool,
        counts: Counter[str],
    ) -> None:
        self.policy, self.counts = policy, counts
        self.asynchronous, self.reserve = asynchronous, reserve
        stock = FullAttentionSpec(
            block_size=SIZE, num_kv_heads=2, head_size=8, dtype=torch.float32
        )
        group = KVCacheGroupSpec(["layer"], with_policy(stock, policy, GEOMETRY))
        self.vllm = KVCacheManager(
            KVCacheConfig(BLOCKS, [], [group]), MODEL_LENGTH, SIZE, SIZE
        )
        self.ours = Scheduling(self.vllm)
        self.manager = residency_manager(self.vllm)
        host = HostReservations(policy, GEOMETRY)
        admission = AdmissionController(self.manager, host)
        self.ours.connector = SimpleNamespace(admission=admission)
        self.pool = self.vllm.block_pool
        self.hasher = get_request_block_hasher(SIZE, sha256)
        self.waiting: deque[Life] = deque()
        self.running: list[Life] = []
        self.gone: list[Life] = []
        self.wrote: dict[int, tuple[Any, ...]] = {}

    @property
    def all_requests(self) -> list[Life]:
        return [*self.running, *self.waiting, *self.gone]

    # -- what the scheduler does --------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int],
        answer: int,
        ends: list[int],
        shared_prefix: int = 0,
    ) -> None:
        """Add a request, unless the front end would refuse it.

        Args:
            shared_prefix: tokens of the prefix that it names.
        """
        answer = min(answer, MODEL_LENGTH - len(prompt))
        request = Request(
            name,
            prompt,
            SamplingParams(
                max_tokens=answer,
                extra_args={"turn_ends": ends, "shared_prefix": shared_prefix},
            ),
            None,
            arrival_time=0.0,
            block_hasher=self.hasher,
        )
        plan, pool = self.manager.plans.of(request), BLOCKS - 1
        if pool_problem(
            self.policy, plan, len(prompt), answer, pool, self.asynchronous
        ):
            self.counts["too large"] += 1
            return
        tokens = (*prompt, *[0] * answer)
        every = range(SIZE, len(tokens) + SIZE, SIZE)
        self.waiting.append(Life(request, plan, [hash(tokens[:at]) for at in every]))

    def admit(self, chunk: int) -> None:
        """Start the first waiting request if there is room for it."""
        life = self.waiting[0]
        request = life.request
        if request.num_stale_output_tokens and not request.drop_stale_output:
            self.waiting.rotate(-1)
            return
        blocks, hit, *_ = self.ours._get_local_prefix_cache_hit(request)
        new = min(request.num_tokens - hit, chunk)
        new = self.ours._reserve_prefill_lookahead(request, hit, new)
        if new == 0:
            return
        for place, block in enumerate(blocks.blocks[0]):
            assert self.wrote[block.block_id] == ("exact", life.exact[place], SIZE), (
                f"{request.request_id} takes a block that holds something else"
            )
        new_blocks = self.vllm.allocate_slots(
            request,
            new,
            num_new_computed_tokens=hit,
            new_computed_blocks=blocks,
            full_sequence_must_fit=self.reserve,
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            self.counts["refused"] += 1
            assert self.running, f"{request.request_id} has the pool for itself"
            return
        self.counts["admitted"] += 1
        shared = life.plan.shared_tokens
        self.counts["prefix hits"] += bool(shared) and hit >= shared
        self.counts["hits"] += hit > 0
        self.waiting.popleft()
        self.running.append(life)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        self.compute(life, new)

    def go_on(self, life: Life, chunk: int) -> None:
        """Schedule a running request as vLLM does."""
        request = life.request
        if len(life.flying) > int(self.asynchronous):
            return
        placeholders = request.num_output_placeholders
        enough = request.num_computed_tokens + 2 - placeholders
        if placeholders and enough >= request.num_prompt_tokens + request.max_tokens:
            return
        done = request.num_computed_tokens
        new = min(request.num_tokens + placeholders - done, chunk)
        new = min(new, MODEL_LENGTH - done - 1)
        new = self.ours._reserve_prefill_lookahead(request, done, max(new, 0))
        if new == 0:
            assert life.flying, f"{request.request_id} waits for nothing"
            return
        while True:
            self.free_due(life)
            if self.vllm.allocate_slots(request, new) is not None:
                self.compute(life, new)
                return
            if self.preempt() is life:
                return

    def free_due(self, life: Life) -> None:
        """Blocks that allocation frees, whether it succeeds or not."""
        request = life.request
        processed = request.num_computed_tokens - sum(n for n, _ in life.flying)
        for compaction in life.compactions(processed):
            life.holes.update(range(compaction.freed.start, compaction.freed.stop))

    def compute(self, life: Life, new: int) -> None:
        """The worker's part of a step: write tokens, and compact where it is due."""
        request = life.request
        name, before = request.request_id, request.num_computed_tokens
        after = before + new
        blocks = self.manager.req_to_blocks[name]
        for place in range(before // SIZE, -(-after // SIZE)):
            block = blocks[place]
            assert not block.is_null, f"{name} writes to no block"
            assert block.ref_cnt == 1, f"{name} writes to what others read"
            filled = min(after - place * SIZE, SIZE)
            self.wrote[block.block_id] = "exact", life.exact[place], filled
        request.num_computed_tokens = life.slots = after
        for compaction in life.compactions(after)[len(life.compactions(before)) :]:
            assert compaction.at_tokens == after, f"{name} ran past {compaction}"
            self.compact(life, compaction, blocks)
        request.num_in_flight_tokens += new
        sampled = after == request.num_tokens + request.num_output_placeholders
        life.flying.append((new, sampled))
        if self.asynchronous:
            request.num_output_placeholders += sampled
        else:
            self.process(life)

    def compact(self, life: Life, compaction: Compaction, blocks: list[Any]) -> None:
        """A compaction reads all candidate blocks and writes the retained region."""
        name = life.request.request_id
        for place in range(compaction.candidates.start, compaction.candidates.stop):
            assert not blocks[place].is_null, f"{name}: candidate {place} is gone"
        for place in range(compaction.retained.start, compaction.retained.stop):
            assert blocks[place].ref_cnt == 1, f"{name} rewrites what others read"
            assert place >= life.plan.shared_blocks, f"{name} rewrites its prefix"
            life.kept[place] = compaction.at_tokens
            self.wrote[blocks[place].block_id] = life.content(place)

    def process(self, life: Life) -> None:
        """Process the output of a request's oldest step."""
        request = life.request
        tokens, sampled = life.flying.popleft()
        request.num_in_flight_tokens -= tokens
        stale = request.num_stale_output_tokens > 0
        if stale:
            request.num_stale_output_tokens -= tokens
            assert request.num_stale_output_tokens >= 0
        if request.is_finished():
            if not life.flying:
                self.gone.remove(life)
            return
        if not sampled or (stale and request.drop_stale_output):
            return
        request.append_output_token_ids(0)
        if self.asynchronous:
            request.num_output_placeholders -= not stale
            if life in self.running:
                computed = request.num_computed_tokens
                self.vllm.cache_blocks(
                    request, computed - request.num_output_placeholders
                )
        if request.num_output_tokens >= request.max_tokens:
            self.counts["finished"] += 1
            self.end(life, RequestStatus.FINISHED_LENGTH_CAPPED)

    def preempt(self, drop: bool = False) -> Life:
        """Preempt the last request: it loses its blocks and waits in front."""
        life = self.running.pop()
        request = life.request
        self.counts["preempted"] += 1
        self.counts["preempted compacted"] += bool(life.holes)
        self.vllm.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.drop_stale_output = drop or (
            request.drop_stale_output and request.num_stale_output_tokens > 0
        )
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        life.begin_anew()
        self.waiting.appendleft(life)
        return life

    def end(self, life: Life, status: RequestStatus) -> None:
        if life in self.running:
            self.running.remove(life)
        else:
            self.waiting.remove(life)
        life.request.status = status
        self.vllm.free(life.request)
        if life.flying:
            self.gone.append(life)

    def reset(self) -> None:
        """Reset the prefix cache while no request runs."""
        assert self.vllm.reset_prefix_cache()
        self.wrote.clear()

    # -- what must be true at any time ------------------------------------------------

    def check(self) -> None:
        """Check each block: free, or held exactly as often as requests list it."""
        self.manager.check_integrity()
        lists = self.manager.req_to_blocks
        assert set(lists) == {life.request.request_id for life in self.running}
        holders = Counter(
            block.block_id
            for blocks in lists.values()
            for block in blocks
            if not block.is_null
        )
        free = self.pool.get_num_free_blocks()
        assert free + len(holders) == BLOCKS - 1, f"{free} free, held: {holders}"
        for block in self.pool.blocks[1:]:
            assert block.ref_cnt == holders[block.block_id], block
        for life in self.running:
            self.check_list(life, lists[life.request.request_id])

    def check_list(self, life: Life, blocks: list[Any]) -> None:
        """The blocks of one request match its plan."""
        request, name = life.request, life.request.request_id
        assert len(blocks) == -(-life.slots // SIZE), name
        holes = {place for place, block in enumerate(blocks) if block.is_null}
        assert holes == life.holes, f"{name}: holes {holes}, not {life.holes}"
        shared = set(range(life.plan.shared_blocks))
        assert not holes & shared, f"{name}: blocks of its prefix are free: {holes}"
        held = len(blocks) - len(holes)
        limit = life.plan.peak_blocks(life.slots)
        prompt = request.num_prompt_tokens
        if life.slots <= prompt:
            bound = self.policy.max_prompt_blocks(prompt, GEOMETRY)
            if bound is not None:
                limit = min(limit, bound + life.plan.shared_blocks)
        elif self.asynchronous:
            # Gets its block before the blocks that the step in flight frees are back
            limit += 1
        assert held <= limit, f"{name}: {held} blocks for {life.slots} tokens"
        first = (
            life.plan.compaction(0).retained.start if not life.plan.is_static else 1000
        )
        for place, block in enumerate(blocks):
            if block.is_null:
                continue
            contents = self.wrote[block.block_id]
            assert contents == life.content(place), (
                f"{name}: {contents} in block {place}"
            )
            if block.block_hash is not None:
                assert place < first, f"{name}: block {place} can be hit"
                of_tokens = make_block_hash_with_group_id(
                    request.block_hashes[place], 0
                )
                assert block.block_hash == of_tokens, f"{name}: block {place}"
            elif place < first:
                known = min(request.num_computed_tokens, request.num_tokens)
                full = (place + 1) * SIZE <= known - bool(life.flying)
                assert not full, f"{name}: block {place} cannot be hit"
