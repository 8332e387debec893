"""Random scheduler operations on vLLM's KV cache manager under a policy."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import stateful
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from scheduled_blocks import BLOCKS, Schedule
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from vllm_kvplugins.config import parse_policy

SNAPKV: dict[str, Any] = {"name": "snapkv", "window": 3}
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": SNAPKV | {"budget": 10},
    "share": SNAPKV | {"budget": 0.4, "allocator": "cross-layer"},
    "sinks": {
        "name": "streaming-llm",
        "budget": 9,
        "sinks": 2,
        "allocator": "pyramid",
        "decode_budget": 17,
        "fold_blocks": 1,
    },
    "folding": SNAPKV | {"budget": 10, "decode_budget": 10, "fold_blocks": 2},
    "blockwise": SNAPKV | {"budget": 14, "prefill_block": 12},
    "both": SNAPKV
    | {"budget": 6, "prefill_block": 9, "decode_budget": 8, "fold_blocks": 3},
    "observing": {"name": "h2o", "budget": 12, "prefill_block": 16},
    "turns": {"name": "flowkv", "ratio": 0.4, "floor": 5, "base": "knorm"},
    "offloading": {
        "name": "quest",
        "budget": 8,
        "sinks": 2,
        "window": 5,
        "skip_layers": 1,
    },
    "full": {"name": "full"},
}
anyone = st.integers(0, 9)
chunks = st.sampled_from((1, 3, 8, 24, 64))


class Blocks(RuleBasedStateMachine):
    """Requests with shared prefixes in a pool that is too small for all of them."""

    operations = 0
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        asynchronous=st.booleans(),
        reserve=st.sampled_from((True, True, False)),
    )
    def start(self, policy: str, asynchronous: bool, reserve: bool) -> None:
        built = parse_policy(POLICIES[policy])
        self.scheduled = Schedule(built, asynchronous, reserve, self.counts)
        self.number, self.sound = 0, False

    @precondition(lambda self: len(self.scheduled.all_requests) < 8)
    @rule(
        head=st.integers(0, 2),
        shared=st.sampled_from((0, 9, 24, 40, 70)),
        own=st.integers(1, 30),
        answer=st.sampled_from((1, 5, 30, 60)),
        turn=st.integers(1, 100),
        names=st.booleans(),
    )
    def arrive(
        self, head: int, shared: int, own: int, answer: int, turn: int, names: bool
    ) -> None:
        """A third of the prompts may be equal to another one. Half of the requests
        name their first part as shared prefix.
        """
        self.sound = False
        self.number += 1
        tail = [self.number if own % 3 else 9] * own
        prompt = [1000 * (head + 1) + place for place in range(shared)] + tail
        ends = sorted({min(turn, len(prompt)), max(len(prompt) - turn // 8, 1)})
        prefix = shared if names else 0
        self.scheduled.add(f"r{self.number}", prompt, answer, ends, prefix)

    @precondition(lambda self: self.scheduled.waiting)
    @rule(chunk=chunks)
    def admit(self, chunk: int) -> None:
        self.sound = False
        self.scheduled.admit(chunk)

    @precondition(lambda self: self.scheduled.running)
    @rule(which=anyone, chunk=chunks)
    def advance(self, which: int, chunk: int) -> None:
        """Compute a chunk of a prompt, or one token of an answer."""
        self.sound = False
        running = self.scheduled.running
        self.scheduled.go_on(running[which % len(running)], chunk)

    @precondition(lambda self: any(life.flying for life in self.scheduled.all_requests))
    @rule(which=anyone)
    def hear(self, which: int) -> None:
        """Process the oldest output in flight of a request."""
        self.sound = False
        flying = [life for life in self.scheduled.all_requests if life.flying]
        self.scheduled.process(flying[which % len(flying)])

    @precondition(lambda self: self.scheduled.waiting or self.scheduled.running)
    @rule(which=anyone)
    def abort(self, which: int) -> None:
        """Abort a request, rarely, so that most requests finish."""
        self.sound = False
        alive = [*self.scheduled.running, *self.scheduled.waiting]
        if which < min(len(alive), 4):
            self.counts["aborted"] += 1
            self.scheduled.end(alive[which], RequestStatus.FINISHED_ABORTED)

    @precondition(lambda self: self.scheduled.wrote)
    @rule(which=anyone)
    def reset(self, which: int) -> None:
        """Reset the prefix cache, sometimes with a preemption of all requests."""
        self.sound = False
        while self.scheduled.running and which == 0:
            self.scheduled.preempt(drop=True)
        if not self.scheduled.running:
            self.counts["reset"] += 1
            self.scheduled.reset()

    @invariant()
    def whole(self) -> None:
        type(self).operations += 1
        if hasattr(self, "scheduled"):
            self.scheduled.check()
            self.sound = True

    def teardown(self) -> None:
        """All requests finish, and nothing is left."""
        if not getattr(self, "sound", False):
            return  # a check has failed before
        scheduled, turns = self.scheduled, 0
        while scheduled.all_requests:
            turns += 1
            assert turns < 3000, "some requests wait or run forever"
            for life in scheduled.all_requests:
                if life.flying:
                    scheduled.process(life)
            for life in list(scheduled.running):
                if life in scheduled.running:
                    scheduled.go_on(life, 64)
            if scheduled.waiting:
                scheduled.admit(64)
            life = None  # nothing here keeps the request alive
            self.whole()
        assert scheduled.pool.get_num_free_blocks() == BLOCKS - 1
        manager = scheduled.manager
        left = (
            manager.req_to_blocks,
            manager.num_cached_block,
            manager.freed_compactions,
        )
        assert not any(left), f"left behind: {left}"
        assert not len(manager.plans) + len(manager.starts), (
            "ended requests are kept alive"
        )
        self.counts["compactions"] += manager.compactions


def any_operations() -> dict[str, int]:
    """Run ``KVP_TEST_OPERATIONS`` operations; returns event counts."""
    init_none_hash(sha256)
    Blocks.counts.clear()
    stateful.run_machine(Blocks)
    return {**Blocks.counts, "operations": Blocks.operations}
