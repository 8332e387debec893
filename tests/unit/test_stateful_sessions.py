"""The session store under random operations, with workers that are late or fail.

Twice: by hypothesis, which finds the shortest sequence that fails, and ten times as
fast by a seeded random walk. ``KVP_TEST_OPERATIONS``: number of operations of each.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from stateful import run_machine

from vllm_kvplugins.sessions.commands import Session, SessionAck, SessionCommands
from vllm_kvplugins.sessions.directory import SessionDirectory

MEMORY_BYTES, DISK_BYTES, MAX_AGE_S = 10, 25_000, 200.0
WALKED = int(os.environ.get("KVP_TEST_OPERATIONS", "100000"))
SEED = int(os.environ.get("KVP_TEST_SEED", "20261126"))
seeds = st.integers(0, 2**31)
anyone = st.integers(0, 9)


def file_bytes(session: Session, ranks: int) -> int:
    """Size of a rank's file, a little more than the directory expects."""
    return session.tokens.nbytes + session.num_bytes // ranks + 4097


class Worker:
    """Sessions of one rank in memory and in files."""

    def __init__(self, writes: bool, ranks: int, sizes: dict[str, int]) -> None:
        self.writes = writes
        self.ranks = ranks
        self.sizes = sizes
        self.bases: dict[str, str] = {}
        self.memory: set[str] = set()
        self.files: set[str] = set()
        self.writing: set[str] = set()
        self.failed: set[str] = set()  # to save
        # Sessions whose files each file needs.
        self.sources: dict[str, tuple[str, ...]] = {}
        # Sessions whose memory has only what others lack, and these others.
        self.reduced: dict[str, str] = {}
        self.freed: dict[str, int] = {}
        self.expanded = 0
        self.under_way: list[SessionAck] = []

    @property
    def held(self) -> set[str]:
        """Sessions in memory, with those whose files are not written yet."""
        return self.memory | {
            r.session_id
            for r in self.under_way
            if r.event == "written" and r.session_id not in self.failed
        }

    def carry_out(self, commands: SessionCommands, fails: random.Random) -> None:
        """Executes commands as ``SessionCommands`` says."""

        def problem(why: str) -> str | None:
            return why if fails.random() < 0.1 else None

        self.files -= set(commands.unlink)
        self.writing -= set(commands.unlink)
        self.drop(set(commands.drop) - {load.session_id for load in commands.loads})
        for save in commands.saves:
            name = save.session.session_id
            failed = problem("no memory")
            self.under_way.append(SessionAck("saved", name, failed))
            if failed is None:
                self.memory.add(name)
            else:
                self.failed.add(name)
            if save.reduces is not None:
                self.reduce(save.reduces, name, failed is None, fails)
            if save.writes:
                assert self.writes
                unwritten = None if failed else problem("full")
                size = file_bytes(save.session, self.ranks)
                self.sources[name] = self.needed(save.continues, fails)
                self.under_way.append(
                    SessionAck(
                        "written",
                        name,
                        unwritten,
                        num_bytes=size,
                        sources=self.sources[name],
                    )
                )
                if not failed and not unwritten:
                    self.writing.add(name)
        for load in commands.loads:
            assert load.session_id in self.memory, "loaded what is not in memory"
            if load.moves:
                self.memory.discard(load.session_id)
        self.drop(set(commands.drop))
        for name in commands.stage:
            if name in self.reduced or name in self.memory:
                self.whole_base(name)
                self.expanded += 1
                self.under_way.append(SessionAck("staged", name))
                continue
            missing = None if name in self.files else "no such file"
            self.under_way.append(
                SessionAck("staged", name, missing or problem("it is torn"))
            )

    def drop(self, names: set[str]) -> None:
        self.memory -= names
        for name in names:
            self.reduced.pop(name, None)
            self.freed.pop(name, None)
        self.under_way = [
            r
            for r in self.under_way
            if r.session_id not in names or r.event not in ("staged", "reduced")
        ]

    def reduce(self, name: str, base: str, saved: bool, chance: random.Random) -> None:
        """One of two ranks may keep it whole."""
        freed = 0
        if saved and name in self.memory and chance.random() < 0.8:
            freed = self.sizes[name] // 2 // self.ranks
        self.bases[name] = base
        self.under_way.append(SessionAck("reduced", name, num_bytes=freed))

    def whole_base(self, name: str) -> None:
        """Fails if what a reduced session needs is not there."""
        while name not in self.memory:
            name = self.reduced[name]

    def needed(self, continued: str | None, chance: random.Random) -> tuple[str, ...]:
        """The files that a new file needs: some of those that it may need."""
        if continued is None or chance.random() < 0.2:
            return ()
        assert continued in self.files, "it may need a file that is not there"
        every = (*self.sources[continued], continued)[-7:]
        return tuple(name for name in every if chance.random() < 0.8)

    def report(self, late: random.Random) -> list[SessionAck]:
        """Acknowledge some of the commands."""
        out = [r for r in self.under_way if late.random() < 0.5]
        self.under_way = [r for r in self.under_way if r not in out]
        for report in out:
            if report.event == "written" and report.session_id in self.writing:
                self.writing.discard(report.session_id)
                self.files.add(report.session_id)
            if report.problem is None and report.event == "staged":
                self.memory.add(report.session_id)
                self.reduced.pop(report.session_id, None)
                self.freed.pop(report.session_id, None)
            if report.event == "reduced" and report.num_bytes:
                self.memory.discard(report.session_id)
                self.reduced[report.session_id] = self.bases[report.session_id]
                self.freed[report.session_id] = report.num_bytes
        return out


class Store(RuleBasedStateMachine):
    """Conversations of two owners, which continue and branch."""

    operations = 0

    @initialize(ranks=st.integers(1, 2), kind=st.sampled_from(("writes", "moves", "")))
    def start(self, ranks: int, kind: str) -> None:
        self.now, self.number = 0.0, 0
        self.sizes: dict[str, int] = {}
        self.workers = [
            Worker(kind == "writes", ranks, self.sizes) for _ in range(ranks)
        ]
        self.moves = kind == "moves"
        self.directory = SessionDirectory(
            MEMORY_BYTES,
            ranks,
            writes=kind == "writes",
            disk_bytes=DISK_BYTES,
            max_age_s=MAX_AGE_S,
            on_memory_freed=lambda name: self.parked.discard(name),
            clock=lambda: self.now,
        )
        # sessions that are also on the device, for the first request that continues
        # them
        self.parked: set[str] = set()
        self.file_sizes: dict[str, int] = {}
        self.histories = [np.array([1, 2, 3, 4], np.int32)]
        self.waiting: dict[str, tuple[str, np.ndarray]] = {}
        self.continued: dict[str, str] = {}

    @precondition(lambda self: len(self.waiting) < 5)
    @rule(which=anyone, seed=seeds, owner=st.sampled_from("ab"), back=st.integers(0, 3))
    def arrive(self, which: int, seed: int, owner: str, back: int) -> None:
        """A prompt that continues an earlier one, from its end or a little before."""
        known = self.histories[which % len(self.histories)]
        new = np.random.default_rng(seed).integers(0, 5, 4, np.int32)
        prompt = np.concatenate([known[: max(1, len(known) - back)], new])
        self.number += 1
        self.waiting[f"r{self.number}"] = owner, prompt

    @precondition(lambda self: self.waiting)
    @rule(which=anyone, size=st.integers(1, MEMORY_BYTES + 1))
    def serve(self, which: int, size: int) -> None:
        """A request starts if its session is available, and ends at once."""
        name = list(self.waiting)[which % len(self.waiting)]
        if not self.starts(name):
            return
        owner, prompt = self.waiting.pop(name)
        self.histories = [*self.histories[-8:], prompt[:60]]
        ttl_s = (None, None, 3.0, 100.0)[size % 4]
        done = Session(f"s-{name}", owner, prompt, None, size, len(prompt), ttl_s=ttl_s)
        self.sizes[done.session_id] = size
        self.file_sizes[done.session_id] = file_bytes(done, len(self.workers))
        if self.directory.save(done, name, (), self.continued.pop(name, None)):
            self.parked.add(done.session_id)

    def starts(self, name: str) -> bool:
        owner, prompt = self.waiting[name]
        match = next(self.directory.find(owner, prompt), None)
        if match is None:
            self.directory.count_miss()
            self.directory.stop_waiting(name)
            return True
        assert match.session.owner == owner
        assert (match.session.tokens[: match.tokens] == prompt[: match.tokens]).all()
        if not match.ready:
            if self.directory.fetch(match, name):
                return False
            self.directory.stop_waiting(name)
            return True
        of = match.session.session_id
        # A request that branches off moves a session only if memory is full.
        moves = self.moves and (match.lost_tokens < 2 or len(prompt) % 2 == 0)
        in_place = of in self.parked
        self.directory.load(match, name, len(prompt), (), in_place, moves=moves)
        self.parked.discard(of)
        if not moves:
            self.continued[name] = of
        return True

    @precondition(lambda self: self.waiting)
    @rule(which=anyone)
    def abort(self, which: int) -> None:
        name = list(self.waiting)[which % len(self.waiting)]
        self.directory.stop_waiting(name)
        del self.waiting[name]

    @rule(seed=seeds)
    def step(self, seed: int) -> None:
        commands, chance = self.directory.take_commands(), random.Random(seed)
        for worker in self.workers:
            worker.carry_out(commands, chance)
        self.directory.process(
            r for worker in self.workers for r in worker.report(chance)
        )

    @rule(seconds=st.sampled_from((0.5, 5.0, 150.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.directory.expire()

    @rule()
    def drop_oldest(self) -> None:
        before, oldest = self.directory.held_bytes, self.directory.oldest()
        if oldest is not None:
            assert self.directory.oldest(besides=oldest) != oldest
            self.directory.evict(oldest)
            assert self.directory.held_bytes < before

    @rule(which=st.integers(0, 9))
    def forget_all(self, which: int) -> None:
        """A reset, as after a change of weights; rare, because it empties the
        directory.
        """
        if which == 0:
            self.directory.clear()

    @invariant()
    def whole(self) -> None:
        type(self).operations += 1
        if hasattr(self, "directory"):
            self.directory.check_integrity()
            held = self.directory.in_memory | self.directory.pending
            nowhere = self.parked - held
            assert not nowhere, f"parked, and not in memory: {nowhere}"
            on_disk = [name for w in self.workers for name in w.files | w.writing]
            for worker in self.workers:
                stay = self.directory.on_disk | self.directory.kept_files
                for name in stay & worker.files:
                    assert worker.files.issuperset(worker.sources[name]), "deleted"
            written = sum(self.file_sizes[name] for name in on_disk)
            # The directory learns a file's exact size when it is written.
            slack = len(on_disk) + 2
            assert written <= DISK_BYTES + slack, "files take more than the limit"
            ranks = len(self.workers)
            parts = [
                self.sizes[name] / ranks - worker.freed.get(name, 0)
                for worker in self.workers
                for name in worker.held | worker.reduced.keys()
            ]
            assert sum(parts) <= MEMORY_BYTES, "the workers hold more than the limit"

    def teardown(self) -> None:
        """All requests start eventually, and directory and workers agree."""
        if not hasattr(self, "directory"):
            return
        for seed in range(60):
            for name in list(self.waiting):
                if self.starts(name):
                    del self.waiting[name]
            self.step(seed)
        assert not self.waiting, "a request waits forever"
        assert not any(worker.under_way for worker in self.workers)
        assert self.directory.unwritten_bytes == 0
        for worker in self.workers:
            assert self.directory.in_memory <= worker.memory
            in_memory = self.directory.in_memory | self.directory.reduced
            assert in_memory == worker.memory | worker.reduced.keys()
            known = self.directory.on_disk
            needed = {source for name in known for source in worker.sources[name]}
            # What one rank's file needs, all ranks keep.
            assert known | needed <= worker.files
            assert worker.files - known == self.directory.kept_files


def test_any_operations_leave_the_directory_consistent(caplog):
    caplog.set_level(logging.ERROR, "vllm.kv_policy")  # sessions that are too large
    run_machine(Store)


# -- a random walk ---------------------------------------------------------------------


def arrive(store: Store, rng: random.Random) -> None:
    if len(store.waiting) < 5:
        seed = rng.randrange(2**31)
        store.arrive(rng.randrange(10), seed, rng.choice("ab"), rng.randrange(4))


def serve(store: Store, rng: random.Random) -> None:
    if store.waiting:
        largest = rng.choice((4, MEMORY_BYTES + 1))
        store.serve(rng.randrange(10), rng.randint(1, largest))


def abort(store: Store, rng: random.Random) -> None:
    if store.waiting:
        store.abort(rng.randrange(10))


WALK: dict[Callable[[Store, random.Random], None], int] = {
    arrive: 25,
    serve: 25,
    abort: 5,
    lambda store, rng: store.step(rng.randrange(2**31)): 25,
    lambda store, rng: store.wait(rng.choice((0.5, 5.0, 150.0))): 10,
    lambda store, rng: store.expire(): 5,
    lambda store, rng: store.drop_oldest(): 4,
    lambda store, rng: store.forget_all(rng.randrange(10)): 1,
}


def test_a_random_walk_leaves_the_directory_consistent(caplog):
    """All invariants after each operation; a store lives for 500 of them."""
    caplog.set_level(logging.CRITICAL, "vllm.kv_policy")
    print("seed", SEED)
    rng, operations, hits, reduced, expanded = random.Random(SEED), 0, 0, 0, 0
    while operations < WALKED:
        store = Store()
        store.start(rng.randint(1, 2), rng.choice(("writes", "moves", "")))
        for walk in rng.choices(list(WALK), list(WALK.values()), k=500):
            walk(store, rng)
            store.whole()
            reduced += len(store.directory.reduced)
        store.teardown()
        operations += 500
        hits += store.directory.counts.hits
        expanded += sum(worker.expanded for worker in store.workers)
    print(hits, reduced, expanded)
    assert hits > operations / 100
    assert reduced > operations / 100
    assert expanded > operations / 2000
