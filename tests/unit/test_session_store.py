"""Sessions without an engine: which are found, and which go."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions import index as session_index
from vllm_kvplugins.sessions.commands import Session, SessionAcks
from vllm_kvplugins.sessions.directory import Match, SessionDirectory
from vllm_kvplugins.sessions.index import SessionIndex

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


@pytest.mark.parametrize("collide", [False, True])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_found_is_what_a_look_at_all_tokens_finds(collide, data):
    """Against comparing the prompt with every session, token by token; also where
    all digests are the same."""
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(session_index, "_chain", lambda o, t, lengths: lengths)
        look_at_all_tokens(data)


def test_owners_have_other_digests():
    of = {owner: session_index._chain(owner, tokens(1, 2, 3), [2, 3]) for owner in "ab"}
    assert not set(of["a"]) & set(of["b"])


def look_at_all_tokens(data: st.DataObject) -> None:
    alphabet = st.integers(0, 2)
    index, everything = SessionIndex(BLOCK), []
    for number in range(data.draw(st.integers(0, 12))):
        ids = tokens(*data.draw(st.lists(alphabet, min_size=BLOCK, max_size=14)))
        at = data.draw(st.integers(0, len(ids)))
        each = session(str(number), ids, at, data.draw(st.sampled_from("ab")))
        index.add(each)
        everything.append(each)
    for name in data.draw(st.sets(st.sampled_from(range(12)))):
        if str(name) in index:
            gone = index.remove(str(name))
            everything.remove(gone)
    owner = data.draw(st.sampled_from("ab"))
    prompt = tokens(*data.draw(st.lists(alphabet, max_size=16)))
    expected = {}
    for each in everything:
        n = min(len(each.tokens), len(prompt))
        same = (each.tokens[:n] == prompt[:n]).tolist()
        shared = [*same, False].index(False)
        if each.owner == owner and shared >= max(each.compacted_at, BLOCK):
            expected[each.session_id] = shared
    found = index.find(owner, prompt)
    assert {s.session_id: shared for shared, s in found} == expected
    assert [shared for shared, _ in found] == sorted(expected.values(), reverse=True)


# -- the keeper, with a worker that does as it is told -------------------------------


class FakeWorker:
    """Sessions in memory and on disk as orders leave them; reports come late."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.memory: set[str] = set()
        self.disk: set[str] = set()
        self.under_way: list[SessionAcks] = []

    def step(self, keeper: SessionDirectory) -> None:
        orders = keeper.take_orders()
        for save in orders.saves:
            name = save.session.session_id
            self.memory.add(name)
            self.under_way.append(SessionAcks("saved", name))
            fails = self.rng.random() < 0.1
            self.under_way.append(
                SessionAcks("written", name, "full" if fails else None)
            )
        for load in orders.loads:
            assert load.session_id in self.memory, "loaded what is not in memory"
        for name in orders.drop:
            self.memory.discard(name)
        for name in orders.unlink:
            self.disk.discard(name)
        for name in orders.stage:
            fails = name not in self.disk or self.rng.random() < 0.1
            self.under_way.append(
                SessionAcks("staged", name, "torn" if fails else None)
            )
        late = [r for r in self.under_way if self.rng.random() < 0.5]
        self.under_way = [r for r in self.under_way if r not in late]
        for report in late:
            if report.problem is None and report.event == "written":
                self.disk.add(report.session_id)
            if report.problem is None and report.event == "staged":
                self.memory.add(report.session_id)
        keeper.hear(late)


@pytest.mark.parametrize("seed", range(30))
def test_a_keeper_knows_where_its_sessions_are(seed):
    """Random conversations; every request starts in the end, from what is there."""
    print("seed", seed)
    rng = random.Random(seed)
    now = [0.0]
    keeper = SessionDirectory(
        memory_bytes=10,
        writes=True,
        disk_bytes=rng.choice([None, 25]),
        max_age_s=rng.choice([None, 200]),
        clock=lambda: now[0],
    )
    worker, histories, waiting = FakeWorker(rng), [tokens(1, 2, 3, 4)], {}
    for number in range(300):
        now[0] += rng.random() * 3
        if rng.random() < 0.6 and len(waiting) < 5:
            new = [rng.randrange(5) for _ in range(4)]
            waiting[f"r{number}"] = np.append(rng.choice(histories), new).astype(
                "int32"
            )
        for name, prompt in list(waiting.items()):
            match = keeper.match("o", prompt, lambda s, shared: shared)
            if match is not None and not match.ready:
                keeper.fetch(match, name)
                continue
            if match is not None:
                same = match.session.tokens[: match.tokens] == prompt[: match.tokens]
                assert same.all()
                keeper.load(match, name, len(prompt), ())
            else:
                keeper.missed()
            del waiting[name]
            keeper.give_up(name)
            histories.append(prompt)
            done = session(f"s{number}{name}", prompt, 0, size=rng.randrange(1, 5))
            keeper.save(done, name, ())
            if rng.random() < 0.2:
                break
        keeper.check_integrity()
        worker.step(keeper)
    for _ in range(60):
        for name, prompt in list(waiting.items()):
            match = keeper.match("o", prompt, lambda s, shared: shared)
            if match is None or match.ready:
                keeper.give_up(name)
                del waiting[name]
            else:
                keeper.fetch(match, name)
        worker.step(keeper)
    assert not waiting, "a request waits for ever"
    keeper.check_integrity()
    kept = keeper._kept.items()
    assert {n for n, k in kept if k.memory == "done"} == worker.memory
    assert {n for n, k in kept if k.disk == "done"} == worker.disk
    assert keeper.counts.hits > 20
    assert keeper.counts.evictions > 5


def test_old_sessions_go():
    now = [0.0]
    keeper = SessionDirectory(10, max_age_s=5, clock=lambda: now[0])
    keeper.save(session("s", tokens(1, 2, 3)), "r", ())
    keeper.take_orders()
    keeper.hear([SessionAcks("saved", "s")])
    usable = lambda s, shared: shared  # noqa: E731
    assert keeper.match("o", tokens(1, 2, 3, 4), usable) is not None
    now[0] = 6.0
    assert keeper.match("o", tokens(1, 2, 3, 4), usable) is None
    keeper.expire()
    assert keeper.num_sessions == 0
    assert keeper.take_orders().drop == ["s"]


def test_new_weights_leave_no_session():
    keeper = SessionDirectory(10, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        keeper.save(session(name, ids), name, ())
    keeper.take_orders()
    keeper.hear(
        [
            SessionAcks("saved", "s"),
            SessionAcks("written", "s"),
            SessionAcks("saved", "t"),
        ]
    )
    keeper.clear()
    orders = keeper.take_orders()
    assert (orders.drop, orders.unlink) == (["s", "t"], ["s", "t"])
    keeper.hear([SessionAcks("written", "t")])
    keeper.check_integrity()
    assert (keeper.num_sessions, keeper.held_bytes, keeper.written_bytes) == (0, 0, 0)


def two_on_disk(memory_bytes: int = 2) -> SessionDirectory:
    """A keeper with the sessions s and t of 2 bytes in their files."""
    keeper = SessionDirectory(memory_bytes, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        keeper.found(session(name, ids, size=2), 0.0)
    return keeper


def fetch_s(keeper: SessionDirectory, request: str = "r") -> Match:
    match = keeper.match("o", tokens(1, 2, 3, 9), lambda s, shared: shared)
    keeper.fetch(match, request)
    return match


def test_a_session_that_is_waited_for_stays_until_the_request_starts():
    keeper = two_on_disk()
    fetch_s(keeper)
    assert keeper.take_orders().stage == ["s"]
    keeper.hear([SessionAcks("staged", "s")])
    new = session("u", tokens(7, 8, 9), size=2)
    assert not keeper.save(new, "q", ()), "drove out what is waited for"
    assert not keeper.drop_oldest(), "dropped what is waited for"
    keeper.load(fetch_s(keeper), "r", 4, ())
    assert keeper.save(new, "q", ()), "nobody waits any longer"
    assert keeper.take_orders().drop == ["s"]
    keeper.check_integrity()


def test_who_gives_up_waits_for_nothing():
    keeper = two_on_disk()
    for request in ("r", "q"):
        fetch_s(keeper, request)
    keeper.hear([SessionAcks("staged", "s")])
    keeper.give_up("r")
    assert not keeper.drop_oldest(), "somebody else waits"
    keeper.give_up("q")
    assert keeper.drop_oldest()


def test_what_is_gone_is_not_read():
    keeper = two_on_disk()
    fetch_s(keeper)
    keeper.clear()
    orders = keeper.take_orders()
    assert (orders.stage, sorted(orders.unlink)) == ([], ["s", "t"])


def test_the_same_conversation_is_kept_once():
    keeper = SessionDirectory(10)
    for name, owner in (("s", "o"), ("t", "o"), ("u", "other")):
        assert keeper.save(session(name, tokens(1, 2, 3), owner=owner), name, ())
    assert keeper.take_orders().drop == ["s"]
    assert keeper.num_sessions == 2
    keeper.save(session("v", tokens(1, 2, 3, 4)), "v", ())
    assert keeper.num_sessions == 3, "its beginning may still be branched off from"
    keeper.check_integrity()


def test_who_looks_after_other_copies_hears_when_a_session_leaves_memory():
    """To its file or for ever; the last copy is the one in memory."""
    left: list[str] = []
    keeper = SessionDirectory(3, writes=True, on_leave=left.append)
    for name, first in (("s", 1), ("t", 2)):
        keeper.save(session(name, tokens(first, 2, 3), size=2), name, ())
        reports = [SessionAcks("saved", name), SessionAcks("written", name)]
        keeper.hear(reports)
        assert left == ([] if name == "s" else ["s"])
    assert keeper.num_sessions == 2, "one is in its file"
    keeper.clear()
    assert set(left) == {"s", "t"}


def test_what_is_taken_in_place_is_counted_and_said():
    keeper = SessionDirectory(10)
    keeper.save(session("s", tokens(1, 2, 3)), "s", ())
    keeper.hear([SessionAcks("saved", "s")])
    for request, in_place in (("r", True), ("q", False)):
        match = keeper.match("o", tokens(1, 2, 3, 4), lambda session, shared: shared)
        assert match is not None
        keeper.load(match, request, 4, (7,), in_place)
    assert [load.in_place for load in keeper.take_orders().loads] == [True, False]
    assert (keeper.counts.hits, keeper.counts.parked_hits) == (2, 1)


def test_a_session_too_large_for_memory_is_not_kept_and_drives_nobody_out(
    caplog, monkeypatch
):
    # vLLM, where it has been imported, keeps its loggers to itself
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    memory = 10 << 10
    keeper = SessionDirectory(memory)
    assert keeper.save(session("s", tokens(1, 2, 3), size=memory), "r", ())
    # one that is under way cannot leave; that passes, and nobody has to be told
    assert not keeper.save(session("u", tokens(7, 8, 9), size=3), "p", ())
    assert not caplog.records
    keeper.take_orders()
    keeper.hear([SessionAcks("saved", "s")])
    for number in range(2):
        large = session(f"t{number}", tokens(4, 5, number), size=memory + 1)
        assert not keeper.save(large, "q", ())
    assert keeper.num_sessions == 1
    assert (keeper.counts.refused, keeper.counts.evictions) == (3, 0)
    (said,) = caplog.records
    # both sides tell which is larger, however small the memory is
    assert (
        "a session of 3 tokens takes 11 KiB, more than all of session_memory (10 "
        in (said.getMessage())
    )
