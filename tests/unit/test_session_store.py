"""The session directory and its index, without an engine."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.commands import Session, SessionAck
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import FoundSession
from vllm_kvplugins.sessions.index import SessionIndex
from vllm_kvplugins.sessions.records import Match, SharedStore

BLOCK = 4


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def session(name: str, ids: np.ndarray, at: int = 0, owner: str = "o", size: int = 1):
    compaction = None
    if at >= BLOCK:
        stop = at // BLOCK
        compaction = Compaction(at, BlockSpan(0, stop), BlockSpan(stop - 1, stop))
    return Session(name, owner, ids, compaction, size, first_query=len(ids))


# -- the index -----------------------------------------------------------------------


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    n = min(len(first), len(second))
    return [*(first[:n] == second[:n]).tolist(), False].index(False)


def kind_of(each: Session) -> tuple[object, int]:
    return each.compaction, len(each.tokens) - each.first_query


class BruteForce:
    """Compares a prompt with all sessions; the last one is the newest."""

    def __init__(self, min_tokens: int) -> None:
        self.min_tokens = min_tokens
        self.sessions: list[Session] = []

    def find(self, owner: str, prompt: np.ndarray) -> list[tuple[int, Session]]:
        """All matches: most shared tokens, then shortest, then newest first."""
        matches = []
        for number, each in enumerate(self.sessions):
            shared = shared_tokens(each.tokens, prompt)
            least = max(each.compacted_at, min(self.min_tokens, len(each.tokens)), 1)
            if each.owner == owner and shared >= least:
                order = (-shared, len(each.tokens), -number)
                matches.append((order, shared, each))
        return [match[1:] for match in sorted(matches, key=lambda match: match[0])]


def first_of_each_kind(
    matches: list[tuple[int, Session]],
) -> list[tuple[int, Session]]:
    """Of the sessions that share equally many tokens."""
    first: dict[object, tuple[int, Session]] = {}
    for shared, each in matches:
        first.setdefault((shared, kind_of(each)), (shared, each))
    return list(first.values())


def restorable(shared: int, each: Session, window: int, whole: bool) -> int:
    """As ``SchedulerSessions`` decides: by kind and length of the session only."""
    if whole and shared < len(each.tokens):
        return 0
    tokens = shared if each.first_query <= shared - window else shared - window
    return tokens if tokens >= each.compacted_at else 0


def best(
    matches: Iterable[tuple[int, Session]], window: int, whole: bool
) -> tuple[int, str]:
    most, found = 0, ""
    for shared, each in matches:
        tokens = restorable(shared, each, window, whole)
        if tokens > most:
            most, found = tokens, each.session_id
    return most, found


def random_session(rng: random.Random, name: str, known: list[np.ndarray]) -> Session:
    """Continues a known one, or branches off from it."""
    start = rng.choice(known)
    start = start[: rng.randrange(len(start) + 1)]
    new = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
    ids = np.append(start, new).astype(np.int32)
    known.append(ids)
    at = rng.choice((0, 0, 4, 8, len(ids)))
    each = session(name, ids, min(at, len(ids)), rng.choice("ab"))
    return replace(each, first_query=max(0, len(ids) - rng.choice((0, 0, 2, 5))))


@pytest.mark.parametrize("seed", range(12))
def test_the_index_finds_what_a_full_comparison_finds(seed):
    """The same sessions in the same order, and so the same choice."""
    print("seed", seed)
    rng = random.Random(seed)
    index, everything = SessionIndex(BLOCK), BruteForce(BLOCK)
    known = [tokens(*(rng.randrange(3) for _ in range(rng.choice((1, 20)))))]
    for number in range(500):
        if rng.random() < rng.choice((0.3, 0.6)) and everything.sessions:
            gone = everything.sessions.pop(rng.randrange(len(everything.sessions)))
            assert index.remove(gone.session_id) is gone
        else:
            each = random_session(rng, str(number), known)
            index.add(each)
            everything.sessions.append(each)
        if number % 20 == 0:
            index.check_integrity()
        prompt = random_session(rng, "", known).tokens
        known.pop(rng.randrange(len(known)) if len(known) > 40 else -1)
        owner = rng.choice("ab")
        expected = everything.find(owner, prompt)
        found = list(index.find(owner, prompt))
        assert found == first_of_each_kind(expected)
        for window in (0, 2, 5):
            for whole in (False, True):
                choice = best(expected, window, whole)
                assert best(index.find(owner, prompt), window, whole) == choice
        equal = [s for n, s in expected if n == len(s.tokens) == len(prompt)]
        assert index.equal(owner, prompt) is (equal[0] if equal else None)
    for each in everything.sessions:
        index.remove(each.session_id)
    index.check_integrity()
    assert len(index) == 0
    assert not index._roots, "nodes without sessions stay"


def test_nodes_of_removed_sessions_are_freed():
    """Also where a session ends inside another one's tokens."""
    index = SessionIndex(1)
    for name, ids in (("s", (1, 2, 3, 4)), ("t", (1, 2)), ("u", (1, 2, 5))):
        index.add(session(name, tokens(*ids)))
    (top,) = index._roots["o"].children.values()
    assert (top.depth, len(top.children)) == (2, 2)
    index.remove("t")
    index.remove("u")
    (only,) = index._roots["o"].children.values()
    assert (only.depth, only.edge) == (4, tokens(1, 2, 3, 4).tobytes())
    index.check_integrity()


# -- the directory, with a worker that executes its commands -------------------------


class FakeWorker:
    """Executes commands at once; its acknowledgements come late."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.memory: set[str] = set()
        self.disk: set[str] = set()
        self.writing: set[str] = set()
        self.under_way: list[SessionAck] = []

    def step(self, directory: SessionDirectory) -> None:
        commands = directory.take_commands()
        for name in commands.unlink:
            self.disk.discard(name)
            self.writing.discard(name)
        for save in commands.saves:
            name = save.session.session_id
            self.memory.add(name)
            self.under_way.append(SessionAck("saved", name))
            if save.reduces is not None:
                freed = self.rng.randrange(2)
                self.under_way.append(
                    SessionAck("reduced", save.reduces, num_bytes=freed)
                )
            if not save.writes:
                continue
            fails = self.rng.random() < 0.1
            self.writing |= set() if fails else {name}
            size = save.session.tokens.nbytes + 4096
            self.under_way.append(
                SessionAck("written", name, "full" if fails else None, num_bytes=size)
            )
        for load in commands.loads:
            assert load.session_id in self.memory, "loaded what is not in memory"
        for name in commands.drop:
            self.memory.discard(name)
        for name in commands.stage:
            fails = name not in self.disk or self.rng.random() < 0.1
            self.under_way.append(SessionAck("staged", name, "torn" if fails else None))
        late = [r for r in self.under_way if self.rng.random() < 0.5]
        self.under_way = [r for r in self.under_way if r not in late]
        for report in late:
            if report.event == "written" and report.session_id in self.writing:
                self.writing.discard(report.session_id)
                self.disk.add(report.session_id)
            if report.problem is None and report.event == "staged":
                self.memory.add(report.session_id)
        directory.process(late)


@pytest.mark.parametrize("seed", range(30))
def test_the_directory_knows_where_its_sessions_are(seed):
    """Random conversations; every request starts eventually."""
    print("seed", seed)
    rng = random.Random(seed)
    clock = [0.0]
    directory = SessionDirectory(
        memory_bytes=10,
        writes=True,
        disk_bytes=rng.choice([None, 25 * 4200]),
        max_age_s=rng.choice([None, 200]),
        clock=lambda: clock[0],
    )
    worker, histories, waiting = FakeWorker(rng), [tokens(1, 2, 3, 4)], {}
    for number in range(300):
        clock[0] += rng.random() * 3
        if rng.random() < 0.6 and len(waiting) < 5:
            new = [rng.randrange(5) for _ in range(4)]
            waiting[f"r{number}"] = np.append(rng.choice(histories), new).astype(
                "int32"
            )
        for name, prompt in list(waiting.items()):
            match = next(directory.find("o", prompt), None)
            if match is not None and not match.ready:
                if directory.fetch(match, name):
                    continue
                match = None
            if match is not None:
                same = match.session.tokens[: match.tokens] == prompt[: match.tokens]
                assert same.all()
                directory.load(match, name, len(prompt), ())
            else:
                directory.count_miss()
            del waiting[name]
            directory.stop_waiting(name)
            histories.append(prompt)
            done = session(f"s{number}{name}", prompt, 0, size=rng.randrange(1, 5))
            directory.save(done, name, ())
            if rng.random() < 0.2:
                break
        directory.check_integrity()
        worker.step(directory)
    for _ in range(60):
        for name, prompt in list(waiting.items()):
            match = next(directory.find("o", prompt), None)
            if match is None or match.ready or not directory.fetch(match, name):
                directory.stop_waiting(name)
                del waiting[name]
        worker.step(directory)
    assert not waiting, "a request waits forever"
    directory.check_integrity()
    assert directory.in_memory == worker.memory
    assert directory.on_disk == worker.disk
    assert directory.counts.hits > 20
    assert directory.counts.evictions > 5


def test_unused_sessions_expire():
    clock = [0.0]
    directory = SessionDirectory(10, max_age_s=5, clock=lambda: clock[0])
    directory.save(session("s", tokens(1, 2, 3)), "r", ())
    directory.take_commands()
    directory.process([SessionAck("saved", "s")])
    assert next(directory.find("o", tokens(1, 2, 3, 4)), None) is not None
    clock[0] = 6.0
    assert not directory.has_commands
    assert next(directory.find("o", tokens(1, 2, 3, 4)), None) is None
    assert directory.num_sessions == 0
    assert directory.has_commands, "an idle engine would not run a step"
    assert directory.take_commands().drop == ["s"]
    assert not directory.has_commands


def test_the_oldest_session_expires_next():
    clock = [1000.0]
    directory = SessionDirectory(10, max_age_s=5, clock=lambda: clock[0], writes=True)
    assert directory.seconds_to_expiry() is None
    first = FoundSession(session("s", tokens(1, 2, 3)), 3.0, 1)
    directory.add_files([first, FoundSession(session("t", tokens(4, 5, 6)), 0.0, 1)])
    for gone in ("s", "t"):
        clock[0] += directory.seconds_to_expiry()
        directory.expire()
        assert directory.take_commands().unlink == [gone], "too late, or too early"
    assert clock[0] == pytest.approx(1005, abs=0.1)
    assert SessionDirectory(10).seconds_to_expiry() is None
    directory.check_integrity()


def retaining(ttl_s: float | None, **arguments: Any) -> tuple[SessionDirectory, Any]:
    """A directory with a session ``s`` that has this time to live, and its clock."""
    clock = [0.0]
    directory = SessionDirectory(3, clock=lambda: clock[0], **arguments)
    keep(directory, replace(session("s", tokens(1, 2, 3)), ttl_s=ttl_s))
    return directory, clock


def keep(
    directory: SessionDirectory, each: Session, continues: str | None = None
) -> None:
    assert directory.save(each, each.session_id, (), continues)
    saves = directory.take_commands().saves
    reduced = [SessionAck("reduced", save.reduces) for save in saves if save.reduces]
    directory.process([SessionAck("saved", each.session_id), *reduced])
    directory.check_integrity()


def others(directory: SessionDirectory) -> None:
    for number in range(5):
        keep(directory, session(f"other{number}", tokens(20 + number, 1, 1)))


@pytest.mark.parametrize("ttl_s", [None, 60.0])
def test_a_retained_session_is_evicted_last(ttl_s):
    directory, _ = retaining(ttl_s)
    others(directory)
    assert ("s" in directory.in_memory) == (ttl_s is not None)
    assert len(directory.in_memory) == 3


def test_retained_sessions_evict_each_other():
    """Least recently used first: it is no promise."""
    directory, _ = retaining(60.0)
    for number in range(3):
        each = session(f"more{number}", tokens(40 + number, 1, 1))
        keep(directory, replace(each, ttl_s=60.0))
    assert directory.in_memory == {"more0", "more1", "more2"}


def test_a_retained_session_is_dropped_after_its_time():
    directory, clock = retaining(60.0)
    clock[0] = 59.0
    directory.expire()
    assert "s" in directory
    match = next(directory.find("o", tokens(1, 2, 3, 4)))
    directory.load(match, "r", 4, ())  # a use starts the time anew
    clock[0] = 118.0
    directory.expire()
    assert "s" in directory
    clock[0] += directory.seconds_to_expiry()
    directory.expire()
    assert "s" not in directory
    assert clock[0] == pytest.approx(119, abs=0.1)
    assert directory.seconds_to_expiry() is None


def test_a_retained_session_is_dropped_after_its_time_in_spite_of_a_restart():
    """Its time goes on from its last use."""
    clock = [1000.0]
    directory = SessionDirectory(10, clock=lambda: clock[0], writes=True)
    kept = replace(session("s", tokens(1, 2, 3)), ttl_s=60.0)
    late = replace(session("t", tokens(4, 5, 6)), ttl_s=60.0)
    directory.add_files([FoundSession(late, 61.0, 1), FoundSession(kept, 50.0, 1)])
    directory.expire()
    assert directory.take_commands().unlink == ["t"]
    assert directory.seconds_to_expiry() == pytest.approx(10, abs=0.1)
    clock[0] += directory.seconds_to_expiry()
    directory.expire()
    assert directory.take_commands().unlink == ["s"]
    directory.check_integrity()


def test_a_replica_does_not_drop_what_another_one_retains():
    """It does not know when the session was used last."""
    clock, shared = [0.0], SharedStore(1 << 20, 10.0)
    directory = SessionDirectory(10, clock=lambda: clock[0], shared=shared)
    each = replace(session("s", tokens(1, 2, 3)), ttl_s=60.0)
    directory.add_stored(each, 1)
    clock[0] = 1000.0
    directory.expire()
    assert "s" in directory
    assert directory.seconds_to_expiry() is None


def test_the_age_limit_applies_to_retained_sessions():
    directory, clock = retaining(60.0, max_age_s=5.0)
    clock[0] = 6.0
    directory.expire()
    assert "s" not in directory


def test_the_next_turn_takes_the_place_of_a_retained_session():
    directory, _ = retaining(60.0)
    match = next(directory.find("o", tokens(1, 2, 3, 4)))
    directory.load(match, "r", 4, ())
    keep(directory, replace(session("t", tokens(1, 2, 3, 4)), ttl_s=60.0), "s")
    others(directory)
    assert "t" in directory.in_memory
    assert "s" not in directory


def test_the_date_of_the_system_does_not_matter(monkeypatch):
    directory = SessionDirectory(10, max_age_s=500)
    directory.save(session("s", tokens(1, 2, 3)), "r", ())
    for date in (0.0, 4e9):
        monkeypatch.setattr(time, "time", lambda date=date: date)
        directory.expire()
    assert directory.num_sessions == 1


def test_clear_removes_sessions_from_memory_and_disk():
    directory = SessionDirectory(10, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        directory.save(session(name, ids), name, ())
    directory.take_commands()
    directory.process(
        [
            SessionAck("saved", "s"),
            SessionAck("written", "s"),
            SessionAck("saved", "t"),
        ]
    )
    directory.clear()
    commands = directory.take_commands()
    assert (commands.drop, commands.unlink) == (["s", "t"], ["s", "t"])
    directory.process([SessionAck("written", "t")])
    directory.check_integrity()
    assert (directory.num_sessions, directory.held_bytes, directory.written_bytes) == (
        0,
        0,
        0,
    )


def two_on_disk(memory_bytes: int = 2) -> SessionDirectory:
    """A directory with the sessions s and t of 2 bytes, in files."""
    directory = SessionDirectory(memory_bytes, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        directory.add_files([FoundSession(session(name, ids, size=2), 0.0, 2)])
    return directory


def fetch_s(directory: SessionDirectory, request: str = "r") -> Match:
    match = next(directory.find("o", tokens(1, 2, 3, 9)), None)
    directory.fetch(match, request)
    return match


def test_an_awaited_session_stays_until_its_request_starts():
    directory = two_on_disk()
    fetch_s(directory)
    assert directory.take_commands().stage == ["s"]
    directory.process([SessionAck("staged", "s")])
    new = session("u", tokens(7, 8, 9), size=2)
    assert not directory.save(new, "q", ()), (
        "evicted a session that a request waits for"
    )
    assert directory.oldest() is None, "would drop a session that a request waits for"
    directory.load(fetch_s(directory), "r", 4, ())
    assert directory.save(new, "q", ()), "no request waits any more"
    assert directory.take_commands().drop == ["s"]
    directory.check_integrity()


def test_a_request_that_stops_waiting_frees_its_session():
    directory = two_on_disk()
    for request in ("r", "q"):
        fetch_s(directory, request)
    directory.process([SessionAck("staged", "s")])
    directory.stop_waiting("r")
    assert directory.oldest() is None, "another request waits"
    directory.stop_waiting("q")
    assert directory.oldest() is not None


def test_a_removed_session_is_not_staged():
    directory = two_on_disk()
    fetch_s(directory)
    directory.clear()
    commands = directory.take_commands()
    assert (commands.stage, sorted(commands.unlink)) == ([], ["s", "t"])


def test_a_session_with_the_same_tokens_is_replaced():
    directory = SessionDirectory(10)
    for name, owner in (("s", "o"), ("t", "o"), ("u", "other")):
        assert directory.save(session(name, tokens(1, 2, 3), owner=owner), name, ())
        assert directory.take_commands().drop == (["s"] if name == "t" else [])
    assert directory.num_sessions == 2
    directory.save(session("v", tokens(1, 2, 3, 4)), "v", ())
    assert directory.num_sessions == 3, "another request may still branch off"
    directory.check_integrity()


class Chats:
    """Conversations whose turns are sessions of one byte each."""

    def __init__(self, directory: SessionDirectory) -> None:
        self.directory = directory
        self.number = 0

    def continues(self, prompt: np.ndarray) -> str | None:
        """A request starts; the session that it continues."""
        match = next(self.directory.find("o", prompt), None)
        if match is None:
            return None
        if not match.ready:
            self.directory.fetch(match, "r")
            self.answer()
        self.directory.load(match, "r", len(prompt), ())
        return match.session.session_id

    def ends(self, prompt: np.ndarray) -> str:
        """It ends, and leaves a session."""
        self.number += 1
        name = f"s{self.number}"
        assert self.directory.save(session(name, prompt), "r", ())
        self.answer()
        return name

    def turn(self, prompt: np.ndarray) -> tuple[str | None, str]:
        return self.continues(prompt), self.ends(prompt)

    def answer(self) -> None:
        commands = self.directory.take_commands()
        for save in commands.saves:
            self.directory.process([SessionAck("saved", save.session.session_id)])
            if save.writes:
                size = 4097 + save.session.tokens.nbytes
                done = SessionAck("written", save.session.session_id, num_bytes=size)
                self.directory.process([done])
        self.directory.process([SessionAck("staged", name) for name in commands.stage])
        self.directory.check_integrity()

    @property
    def kept(self) -> set[str]:
        return {each.session_id for each in self.directory}


def turn_of(chat: int, number: int) -> np.ndarray:
    """The prompt of a turn: 12 tokens more than that of the turn before."""
    return np.arange(12 * number, dtype=np.int32) + 1000 * chat


@pytest.mark.parametrize("left_out", [0, 3])
def test_memory_for_one_session_per_conversation_serves_every_turn(left_out):
    """The next turn takes the memory of the one before, also of one whose client leaves
    out the last tokens of each answer."""
    chats = Chats(SessionDirectory(8))
    prompts = {chat: turn_of(chat, 1) for chat in range(8)}
    newest: dict[int, str] = {}
    for number in range(1, 10):
        for chat, prompt in prompts.items():
            used, newest[chat] = chats.turn(prompt)
            assert (used is not None) == (number > 1)
            added = np.arange(12, dtype=np.int32) + 1000 * chat + 100 * number
            prompts[chat] = np.append(prompt[: len(prompt) - left_out], added)
    assert chats.kept == set(newest.values())


def test_files_of_one_session_per_conversation_serve_every_turn():
    """All files together have a limit, and memory holds one session."""
    four_files = 4 * (4097 + turn_of(1, 9).nbytes) + 200
    chats = Chats(SessionDirectory(2, writes=True, disk_bytes=four_files))
    for number in range(1, 10):
        used = [chats.turn(turn_of(chat, number))[0] for chat in range(4)]
        assert (None in used) == (number == 1)


def test_a_beginning_that_several_requests_continue_is_not_superseded():
    """A document and many questions about it."""
    chats = Chats(SessionDirectory(4))
    _, unrelated = chats.turn(turn_of(2, 1))
    _, document = chats.turn(turn_of(1, 1))
    questions = [np.append(turn_of(1, 1), tokens(*[i] * 12)) for i in (7, 8)]
    assert [chats.continues(question) for question in questions] == [document] * 2
    for question in questions:
        chats.ends(question)
    chats.turn(turn_of(3, 1))
    assert document in chats.kept
    assert unrelated not in chats.kept, "used less recently"


def test_a_superseded_session_that_is_used_again_is_as_good_as_any():
    """A client that regenerates its last answer."""
    chats = Chats(SessionDirectory(3))
    _, first = chats.turn(turn_of(1, 1))
    _, second = chats.turn(turn_of(1, 2))
    assert chats.continues(np.append(turn_of(1, 1), tokens(*[5] * 12))) == first
    chats.turn(turn_of(2, 1))
    _, other = chats.turn(turn_of(3, 1))
    assert first in chats.kept
    assert second not in chats.kept, "now used less recently than all others"
    assert other in chats.kept


def test_another_branch_is_not_superseded():
    """A client that edits an early message has two conversations from then on."""
    chats = Chats(SessionDirectory(3))
    _, whole = chats.turn(turn_of(1, 3))
    _, other = chats.turn(turn_of(2, 1))
    chats.turn(np.append(turn_of(1, 1), tokens(*[5] * 24)))
    chats.turn(turn_of(3, 1))
    assert whole in chats.kept
    assert other not in chats.kept, "used less recently than all others"


def test_on_memory_freed_is_called_when_a_session_leaves_memory():
    """Also if its file cannot be deleted."""
    closed: list[str] = []
    directory = SessionDirectory(3, writes=True, on_memory_freed=closed.append)
    for name, first in (("s", 1), ("t", 2)):
        directory.save(session(name, tokens(first, 2, 3), size=2), name, ())
        reports = [SessionAck("saved", name), SessionAck("written", name)]
        directory.process(reports)
        assert closed == ([] if name == "s" else ["s"])
    assert directory.num_sessions == 2, "one is in its file"
    directory.clear()
    assert set(closed) == {"s", "t"}


def test_loads_in_place_are_counted():
    directory = SessionDirectory(10)
    directory.save(session("s", tokens(1, 2, 3)), "s", ())
    directory.process([SessionAck("saved", "s")])
    for request, in_place in (("r", True), ("q", False)):
        match = next(directory.find("o", tokens(1, 2, 3, 4)), None)
        assert match is not None
        directory.load(match, request, 4, (7,), in_place)
    assert [load.in_place for load in directory.take_commands().loads] == [True, False]
    assert (directory.counts.hits, directory.counts.device_hits) == (2, 1)


def test_a_session_too_large_for_memory_is_refused_and_evicts_none(caplog, monkeypatch):
    # once imported, vLLM does not propagate its loggers' messages
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    memory = 10 << 10
    directory = SessionDirectory(memory)
    assert directory.save(session("s", tokens(1, 2, 3), size=memory), "r", ())
    # a session that is being copied cannot leave; this passes without a message
    assert not directory.save(session("u", tokens(7, 8, 9), size=3), "p", ())
    assert not caplog.records
    directory.take_commands()
    directory.process([SessionAck("saved", "s")])
    for number in range(2):
        large = session(f"t{number}", tokens(4, 5, number), size=memory + 1)
        assert not directory.save(large, "q", ())
    assert directory.num_sessions == 1
    assert (directory.counts.refused, directory.counts.evictions) == (3, 0)
    (record,) = caplog.records
    # the message names both sizes, however small the memory is
    assert (
        "a session of 3 tokens takes 11 KiB, more than all of session_memory (10 "
        in (record.getMessage())
    )
