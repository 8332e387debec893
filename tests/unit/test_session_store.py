"""Sessions without an engine: which are found, which go, and what lies on disk."""

from __future__ import annotations

import json
import logging
import os
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from typer.testing import CliRunner

from vllm_kvplugins.cli.app import app
from vllm_kvplugins.config import parse_policy, parse_sessions
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.residency.plan import BlockSpan, Compaction
from vllm_kvplugins.residency.saved import SavedCache
from vllm_kvplugins.sessions import files as session_files
from vllm_kvplugins.sessions import index as session_index
from vllm_kvplugins.sessions.files import Identity, SessionDir, SessionFileError
from vllm_kvplugins.sessions.index import SessionIndex
from vllm_kvplugins.sessions.keeper import Keeper, Match
from vllm_kvplugins.sessions.orders import Report, Session
from vllm_kvplugins.sessions.vault import Vault

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
        self.under_way: list[Report] = []

    def step(self, keeper: Keeper) -> None:
        orders = keeper.take_orders()
        for save in orders.saves:
            name = save.session.session_id
            self.memory.add(name)
            self.under_way.append(Report("saved", name))
            fails = self.rng.random() < 0.1
            self.under_way.append(Report("written", name, "full" if fails else None))
        for load in orders.loads:
            assert load.session_id in self.memory, "loaded what is not in memory"
        for name in orders.drop:
            self.memory.discard(name)
        for name in orders.unlink:
            self.disk.discard(name)
        for name in orders.stage:
            fails = name not in self.disk or self.rng.random() < 0.1
            self.under_way.append(Report("staged", name, "torn" if fails else None))
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
    keeper = Keeper(
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
    keeper = Keeper(10, max_age_s=5, clock=lambda: now[0])
    keeper.save(session("s", tokens(1, 2, 3)), "r", ())
    keeper.take_orders()
    keeper.hear([Report("saved", "s")])
    usable = lambda s, shared: shared  # noqa: E731
    assert keeper.match("o", tokens(1, 2, 3, 4), usable) is not None
    now[0] = 6.0
    assert keeper.match("o", tokens(1, 2, 3, 4), usable) is None
    keeper.expire()
    assert keeper.num_sessions == 0
    assert keeper.take_orders().drop == ["s"]


def test_new_weights_leave_no_session():
    keeper = Keeper(10, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        keeper.save(session(name, ids), name, ())
    keeper.take_orders()
    keeper.hear([Report("saved", "s"), Report("written", "s"), Report("saved", "t")])
    keeper.clear()
    orders = keeper.take_orders()
    assert (orders.drop, orders.unlink) == (["s", "t"], ["s", "t"])
    keeper.hear([Report("written", "t")])
    keeper.check_integrity()
    assert (keeper.num_sessions, keeper.held_bytes, keeper.written_bytes) == (0, 0, 0)


def two_on_disk(memory_bytes: int = 2) -> Keeper:
    """A keeper with the sessions s and t of 2 bytes in their files."""
    keeper = Keeper(memory_bytes, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        keeper.found(session(name, ids, size=2), 0.0)
    return keeper


def fetch_s(keeper: Keeper, request: str = "r") -> Match:
    match = keeper.match("o", tokens(1, 2, 3, 9), lambda s, shared: shared)
    keeper.fetch(match, request)
    return match


def test_a_session_that_is_waited_for_stays_until_the_request_starts():
    keeper = two_on_disk()
    fetch_s(keeper)
    assert keeper.take_orders().stage == ["s"]
    keeper.hear([Report("staged", "s")])
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
    keeper.hear([Report("staged", "s")])
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
    keeper = Keeper(10)
    for name, owner in (("s", "o"), ("t", "o"), ("u", "other")):
        assert keeper.save(session(name, tokens(1, 2, 3), owner=owner), name, ())
    assert keeper.take_orders().drop == ["s"]
    assert keeper.num_sessions == 2
    keeper.save(session("v", tokens(1, 2, 3, 4)), "v", ())
    assert keeper.num_sessions == 3, "its beginning may still be branched off from"
    keeper.check_integrity()


def test_a_session_too_large_for_memory_is_not_kept_and_drives_nobody_out(
    caplog, monkeypatch
):
    # vLLM, where it has been imported, keeps its loggers to itself
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    keeper = Keeper(10)
    assert keeper.save(session("s", tokens(1, 2, 3), size=10), "r", ())
    # one that is under way cannot leave; that passes, and nobody has to be told
    assert not keeper.save(session("u", tokens(7, 8, 9), size=3), "p", ())
    assert not caplog.records
    keeper.take_orders()
    keeper.hear([Report("saved", "s")])
    for number in range(2):
        large = session(f"t{number}", tokens(4, 5, number), size=11)
        assert not keeper.save(large, "q", ())
    assert keeper.num_sessions == 1
    assert (keeper.counts.refused, keeper.counts.evictions) == (3, 0)
    (said,) = caplog.records
    assert "a session of 3 tokens takes 1 MiB, more than all" in said.getMessage()


# -- files ---------------------------------------------------------------------------


def cache(n: int = 9) -> SavedCache:
    rng = torch.Generator().manual_seed(n)
    pages = torch.randn(6, 16, generator=rng).to(torch.bfloat16)
    return SavedCache(
        tokens=n,
        compaction=None,
        counts=torch.zeros(2, dtype=torch.int64),
        positions=torch.zeros(2, 0, dtype=torch.int32),
        zone=pages[:0].clone(),
        tail=pages,
        layout="l",
    )


def folder(tmp_path: Path, **facts: object) -> SessionDir:
    found = SessionDir(tmp_path, Identity.of(**({"model": "m", "policy": "p"} | facts)))
    found.prepare()
    return found


def write(files: SessionDir, name: str = "s", n: int = 9) -> Path:
    files.write(session(name, np.arange(n, dtype=np.int32)), 0, cache(n))
    return files.path(name, 0)


@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "metadata"])
def test_a_damaged_file_is_never_loaded(tmp_path, damage):
    files = folder(tmp_path)
    path = write(files)
    raw = bytearray(path.read_bytes())
    if damage == "bit":
        raw[-3] ^= 4
    elif damage == "cut":
        raw = raw[:-7]
    elif damage == "empty":
        raw = bytearray()
    elif damage == "metadata":
        raw = bytearray(bytes(raw).replace(b'"layout":"l"', b'"layout":"m"'))
    path.unlink() if damage == "gone" else path.write_bytes(bytes(raw))
    with pytest.raises(SessionFileError, match=r"s\.r0of1"):
        files.read("s", 0)


def test_another_model_finds_nothing(tmp_path):
    write(folder(tmp_path))
    assert list(folder(tmp_path, model="other").scan()) == []
    moved = folder(tmp_path, policy="q")
    os.replace(folder(tmp_path).path("s", 0), moved.path("s", 0))
    with pytest.raises(SessionFileError, match="another model or policy"):
        moved.read("s", 0)
    (problem,) = moved.scan()
    assert isinstance(problem, SessionFileError)


def test_a_scan_finds_whole_sessions_oldest_first(tmp_path):
    files = folder(tmp_path)
    for age, name in enumerate("cab"):
        os.utime(write(files, name, 9 + age), (1000 - age, 1000 - age))
    (files.folder / "torn.r0of1.safetensors").write_bytes(b"{}")
    found = [item for item in files.scan() if not isinstance(item, SessionFileError)]
    assert [s.session_id for s, _ in found] == ["b", "a", "c"]
    assert [used for _, used in found] == [998, 999, 1000]
    assert found[0][0].tokens.tolist() == list(range(11))


def test_nothing_is_left_of_a_write_that_fails(tmp_path, monkeypatch):
    files = folder(tmp_path)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(files)
    assert list(files.folder.iterdir()) == []


def test_why_a_file_cannot_be_written_is_one_kind_of_error(tmp_path, monkeypatch):
    def full(tensors: object, path: str, about: object) -> None:
        Path(path).write_bytes(b"a part")
        raise SafetensorError("No space left on device")

    files = folder(tmp_path)
    monkeypatch.setattr(session_files, "save_file", full)
    with pytest.raises(OSError, match=r"s\.r0of1.*No space"):
        write(files)
    assert list(files.folder.iterdir()) == []


def test_a_file_is_its_owners_and_takes_no_memory_to_write(tmp_path, monkeypatch):
    """Synced as what it is: whoever wrote it may have made another file of it."""
    files, large = folder(tmp_path), cache()
    large.tail = torch.zeros(6000, 1000)
    synced = []
    sync = os.fsync

    def noted(handle: int) -> None:
        stat = os.fstat(handle)
        synced.append((stat.st_ino, stat.st_size))
        sync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    mask = os.umask(0)
    tracemalloc.start()
    try:
        files.write(session("s", np.arange(9, dtype=np.int32)), 0, large)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        os.umask(mask)
    assert peak < large.tail.nbytes / 20
    stat = files.path("s", 0).stat()
    assert stat.st_mode & 0o777 == 0o600
    assert synced == [(stat.st_ino, stat.st_size)]
    assert torch.equal(files.read("s", 0).tail, large.tail)


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVPolicyError, match="cannot be written to"):
        folder(tmp_path / "file" / "below")


class Caches:
    """A worker's caches: whatever is asked for."""

    def save(self, request_id, compaction, tokens, blocks, first_query):
        if request_id == "no memory":
            raise MemoryError("none left")
        return cache(tokens)

    def restore(self, *arguments):
        raise AssertionError("nothing is restored here")

    def misfit(self, saved):
        return None

    def discard(self, saved):
        """It has nothing but pages."""


def test_a_save_without_memory_is_reported_and_not_raised():
    vault, keeper = Vault(Caches()), Keeper(10)
    keeper.save(session("s", tokens(1, 2, 3)), "no memory", ())
    vault.take_in(keeper.take_orders())
    reports = vault.take_reports()
    assert "none left" in str(reports[0].problem)
    keeper.hear(reports)
    assert (keeper.num_sessions, keeper.counts.failures) == (0, 1)
    vault.close()


def test_a_session_dropped_and_wanted_in_one_step_is_read(tmp_path):
    files = folder(tmp_path)
    vault, keeper = Vault(Caches(), files), Keeper(1, writes=True)
    for name, ids in (("s", tokens(1, 2, 3)), ("t", tokens(4, 5, 6))):
        keeper.save(session(name, ids), name, ())
        orders = keeper.take_orders()
        vault.take_in(orders)
        vault._writing[name].result()
        vault.hand_out(orders)
        keeper.hear(vault.take_reports())
    assert vault.num_held == 1
    match = keeper.match("o", tokens(1, 2, 3, 9), lambda s, shared: shared)
    keeper.fetch(match, "r")  # drops t, which was in memory
    other = keeper.match("o", tokens(4, 5, 6, 9), lambda s, shared: shared)
    assert not other.ready
    orders = keeper.take_orders()
    assert (orders.drop, orders.stage) == (["t"], ["s"])
    orders.drop.append("s")  # as after an eviction earlier in the same step
    vault.hand_out(orders)
    vault._reading["s"].result()
    keeper.hear(vault.take_reports())
    assert keeper.match("o", tokens(1, 2, 3, 9), lambda s, shared: shared).ready
    vault.close()


# -- settings and the command line --------------------------------------------------


def test_sessions_are_on_for_policies_that_work_by_turns():
    assert parse_sessions({"name": "flowkv"}).on_for(works_by_turns=True)
    assert not parse_sessions({"name": "snapkv"}).on_for(works_by_turns=False)
    assert parse_sessions({"session_memory": "1GiB"}).on_for(works_by_turns=False)
    assert not parse_sessions({"sessions": False}).on_for(works_by_turns=True)
    assert parse_sessions({"sessions": True}).on_for(works_by_turns=False)
    # said, but nothing is set by it
    unset = {"session_memory": None, "session_max_age_s": None}
    assert not parse_sessions(unset).on_for(works_by_turns=False)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"name": "snapkv", "session_memory": "much"}, "amount of memory"),
        ({"name": "snapkv", "session_disk": "1GiB"}, "needs a session_dir"),
        ({"name": "snapkv", "sessions": False, "session_memory": 9}, "is false, but"),
        ({"name": "snapkv", "session_memroy": 9}, "did you mean 'session_memory'"),
        ({"name": "icecache", "session_dir": "d"}, "session_dir does not work with"),
        ({"name": "snapkv", "session_max_age_s": 0}, "session_max_age_s"),
    ],
)
def test_mistakes_are_refused(request_, words):
    with pytest.raises(KVPolicyError, match=words):
        parse_policy(request_)


def test_the_command_line_lists_and_removes(tmp_path):
    files = folder(tmp_path)
    for name in ("aaa", "abb", "ccc"):
        write(files, name)
    (files.folder / "bad.r0of1.safetensors").write_bytes(b"x")
    run = CliRunner().invoke
    listed = json.loads(run(app, ["sessions", "ls", str(tmp_path), "--json"]).stdout)
    assert {item["session"] for item in listed} == {"aaa", "abb", "ccc", "bad"}
    assert {item["tokens"] for item in listed} == {0, 9}
    assert "cannot be read" in run(app, ["sessions", "ls", str(tmp_path)]).stdout
    assert run(app, ["sessions", "rm", str(tmp_path)]).exit_code == 2
    assert run(app, ["sessions", "rm", str(tmp_path), "zzz"]).exit_code == 1
    assert "removed 2" in run(app, ["sessions", "rm", str(tmp_path), "a"]).stdout
    os.utime(files.path("ccc", 0), (1000, 1000))
    run(app, ["sessions", "rm", str(tmp_path), "--older-than", "1"])
    assert [p.name for p in files.folder.iterdir()] == ["bad.r0of1.safetensors"]
    assert "removed 1" in run(app, ["sessions", "rm", str(tmp_path), "--all"]).stdout
