"""Sessions in memory that store only what a later turn does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from fake_sessions import SessionEngine
from test_session_deltas import CONVERSATIONS, assert_equal
from test_session_store import session, tokens
from test_sessions_runtime import BLOCK, ENDS, PROMPTS, run, says, small
from token_pool import Pool
from token_pool import num_bytes as bytes_of

from vllm_kvplugins.sessions import reduced as module
from vllm_kvplugins.sessions.commands import SessionAck, Tokens
from vllm_kvplugins.sessions.deltas import FileRecord
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.page_tokens import PageFormat
from vllm_kvplugins.sessions.reduced import ReducedSnapshot, expanded, reduced
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.store import SessionStore


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    with torch.inference_mode():
        yield


def conversation(
    policy: dict[str, object], session_dtype: str = "auto"
) -> tuple[SessionEngine, list[CacheSnapshot]]:
    """Requests that continue each other."""
    engine = SessionEngine(policy, BLOCK, 120, True, session_dtype=session_dtype)  # type: ignore[arg-type]
    if session_dtype != "auto":
        # Restored keys are not those of the dense copy.
        engine._check_attention = lambda *arguments: None  # type: ignore[method-assign]
    turns: list[CacheSnapshot] = []
    request = None
    for turn, prompt in enumerate(PROMPTS):
        ends = ENDS[:turn] if policy["name"] == "flowkv" else ()
        if request is None:
            request = says(engine.add("r", prompt, 12, ends))
        else:
            request = engine.resume(request, turns[-1], prompt, 12, ends)
        run(engine, request, 9)
        turns.append(engine.save("r"))
        engine.remove("r")
    return engine, turns


def reduce_all(
    turns: list[CacheSnapshot], formats: tuple[PageFormat, ...]
) -> list[ReducedSnapshot | CacheSnapshot]:
    """Each turn without what the next one has."""
    every: list[ReducedSnapshot | CacheSnapshot] = []
    for number, (one, after) in enumerate(pairwise(turns)):
        assert after.lineage is not None
        few = reduced(one, str(number + 1), after, after.lineage, formats)
        assert few is not None
        every.append(few)
    return [*every, turns[-1]]


@pytest.mark.parametrize("policy", CONVERSATIONS)
@pytest.mark.parametrize("session_dtype", ["auto", "int8"])
def test_turns_are_made_whole_again(policy, session_dtype, monkeypatch):
    """Bit for bit, also through turns that are reduced themselves."""
    monkeypatch.setattr(module, "_MIN_FREED", -1)  # tables are large beside tiny heads
    engine, turns = conversation(policy, session_dtype)
    formats = engine.transfer.page_formats()
    every = reduce_all(turns, formats)
    for number, few in enumerate(every[:-1]):
        assert isinstance(few, ReducedSnapshot)
        whole = expanded(few, every[number + 1 :], formats)
        assert engine.transfer.mismatch(whole) is None
        assert whole.num_bytes == turns[number].num_bytes
        if session_dtype == "auto":
            assert_equal(whole, turns[number])
            assert whole.file is turns[number].file


def test_a_turn_whose_tokens_were_all_kept_stores_none():
    engine, turns = conversation(small("full"))
    few, *_ = reduce_all(turns, engine.transfer.page_formats())
    assert isinstance(few, ReducedSnapshot)
    assert [len(part.own) for part in few.parts] == [0]
    assert few.num_bytes < 0.1 * turns[0].num_bytes


def test_a_turn_that_shares_little_with_the_next_stays_whole():
    """The request has computed most tokens again: their keys may differ."""
    engine, turns = conversation(small("full"))
    lineage = turns[1].lineage
    assert lineage is not None
    assert turns[0].tokens > 2 * BLOCK
    some = replace(lineage, tokens=turns[0].tokens // 10)
    formats = engine.transfer.page_formats()
    assert reduced(turns[0], "1", turns[1], some, formats) is None


COPIES = 8


def num_bytes(of: Tokens) -> int:
    return bytes_of(of, COPIES)


# -- directory and store ---------------------------------------------------------------


class Engine:
    """A directory and a store, whose pages consist of the tokens they cache."""

    def __init__(self, memory_bytes: int) -> None:
        self.pool = Pool(COPIES)
        self.store = SessionStore(self.pool)  # type: ignore[arg-type]
        self.directory = SessionDirectory(memory_bytes, min_tokens=4)
        self.number = 0

    def step(self) -> None:
        """A step, and the end of what it began."""
        for _ in range(2):
            commands = self.directory.take_commands()
            self.store.save(commands)
            self.store.execute(commands)
            for future in [*self.store._reductions.values()]:
                future.exception()
            self.store.wait_for_copies()
            self.directory.process(self.store.take_acks())
        self.directory.check_integrity()
        assert self.store.held_bytes <= self.directory.held_bytes
        assert self.directory.held_bytes <= self.directory.memory_bytes

    def ask(self, prompt: Tokens, owner: str = "o") -> int:
        """A request; returns how many tokens it restores."""
        self.number += 1
        name, continued = f"r{self.number}", None
        match = next(self.directory.find(owner, prompt), None)
        for _ in range(100):
            if match is None or match.ready or not self.directory.fetch(match, name):
                break
            self.step()
            match = next(self.directory.find(owner, prompt), None)
        restored = 0
        if match is not None and match.ready:
            self.directory.load(match, name, len(prompt), ())
            self.step()
            cache = self.pool.restored.pop(name)
            assert (cache == prompt[: match.tokens]).all(), "another session's cache"
            continued, restored = match.session.session_id, match.tokens
        self.directory.stop_waiting(name)
        self.pool.caches[name] = prompt
        done = session(f"s{self.number}", prompt, owner=owner, size=num_bytes(prompt))
        self.directory.save(done, name, (), continued)
        self.step()
        return restored

    def begin(self, prompt: Tokens, name: str) -> None:
        """A request continues a session in memory, and is about to end."""
        match = next(self.directory.find("o", prompt))
        self.directory.load(match, name, len(prompt), ())
        self.step()
        self.pool.caches[name] = prompt


def history(n: int) -> Tokens:
    return np.arange(n, dtype=np.int32)


def test_a_conversation_takes_little_more_than_its_last_turn():
    """And goes back to any turn."""
    engine = Engine(40_000)
    lengths = range(40, 200, 16)
    for turn, length in enumerate(lengths):
        assert engine.ask(history(length)) == (length - 16 if turn else 0)
    assert len(engine.directory.reduced) == len(lengths) - 1
    whole = sum(num_bytes(history(n)) for n in lengths)
    last = num_bytes(history(lengths[-1]))
    assert last < engine.directory.held_bytes < last + 0.2 * whole
    edited = np.append(history(72), [7, 7, 7, 7]).astype(np.int32)
    assert engine.ask(edited) == 72
    assert engine.ask(np.append(history(56), 9).astype(np.int32)) == 56


def test_turns_leave_memory_before_what_they_need():
    engine = Engine(5800)
    for length in (40, 56, 72):
        engine.ask(history(length))
    assert engine.directory.reduced == {"s1", "s2"}
    engine.ask(history(100) + 500, owner="p")
    assert "s3" in engine.directory.in_memory
    assert engine.ask(history(80)) == 72


def test_a_request_does_not_wait_for_a_turn_that_does_not_fit():
    """The last turn has to stay to make an earlier one whole."""
    directory = SessionDirectory(110)
    for name, size, continues in (("a", 60, None), ("b", 30, "a"), ("c", 70, "b")):
        made = session(name, tokens(*range(4 + ord(name))), size=size)
        assert directory.save(made, name, (), continues)
        freed = [
            SessionAck(
                "reduced", save.reduces, num_bytes=50 if save.reduces == "a" else 5
            )
            for save in directory.take_commands().saves
            if save.reduces is not None
        ]
        directory.process([SessionAck("saved", name), *freed])
    assert directory.reduced == {"a", "b"}
    match = next(directory.find("o", tokens(*range(4 + ord("a")), 0)))
    assert match.session.session_id == "a"
    assert not directory.fetch(match, "r")
    directory.check_integrity()


def test_a_session_that_several_requests_continue_stays_whole():
    engine = Engine(20_000)
    engine.ask(history(80))
    for user in (1, 2, 3):
        question = np.append(history(80), [user] * 8).astype(np.int32)
        assert engine.ask(question) == 80
    assert "s1" in engine.directory.in_memory


def test_what_needs_a_replaced_session_goes_with_it():
    """The same conversation again: the last turn is saved a second time."""
    engine = Engine(20_000)
    for length in (40, 56):
        engine.ask(history(length))
    assert engine.directory.reduced == {"s1"}
    assert engine.directory.save(
        session("again", history(56), size=num_bytes(history(56))), "x", ()
    )
    engine.pool.caches["x"] = history(56)
    engine.step()
    assert engine.directory.in_memory == {"again"}
    assert engine.store.num_held == 1


@pytest.mark.parametrize("then", ["save fails", "removed"])
def test_a_next_turn_that_is_not_saved_changes_nothing(then):
    engine = Engine(20_000)
    engine.ask(history(40))
    engine.begin(history(56), "x")
    done = session("next", history(56), size=num_bytes(history(56)))
    assert engine.directory.save(done, "x", (), "s1")
    if then == "removed":
        engine.directory.evict("next")
    else:
        engine.pool.fails = True
    engine.step()
    engine.pool.fails = False
    assert engine.directory.in_memory == {"s1"}
    assert engine.ask(history(44)) == 40


def test_one_rank_may_keep_a_session_whole():
    """It counts what the other rank has freed."""
    directory = SessionDirectory(100, ranks=2)
    ready = [SessionAck("saved", "a")] * 2
    assert directory.save(session("a", tokens(1, 2, 3, 4), size=20), "r", ())
    directory.process(ready)
    later = session("b", tokens(1, 2, 3, 4, 5), size=20)
    assert directory.save(later, "q", (), "a")
    (save,) = [s for s in directory.take_commands().saves if s.session is later]
    assert save.reduces == "a"
    directory.process([SessionAck("saved", "b")] * 2)
    directory.process(
        [SessionAck("reduced", "a", num_bytes=7), SessionAck("reduced", "a")]
    )
    directory.check_integrity()
    assert (directory.reduced, directory.held_bytes) == ({"a"}, 33)


def test_a_session_that_was_read_again_stays_whole():
    """Its tokens need not be those that the request has continued."""
    engine = Engine(20_000)
    engine.ask(history(40))
    engine.begin(history(56), "x")
    engine.store._snapshots["s1"] = replace(
        engine.store._snapshots["s1"],  # type: ignore[type-var]
        file=FileRecord(),
    )
    done = session("next", history(56), size=num_bytes(history(56)))
    assert engine.directory.save(done, "x", (), "s1")
    engine.step()
    assert engine.directory.in_memory == {"s1", "next"}
