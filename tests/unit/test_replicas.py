"""Sessions of several replicas in one store, also when it is slow, fails or is damaged.

In a directory and in fsspec's memory file system; ``test_session_storage`` compares
these with a real S3 server.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pytest
from replica import IDENTITY, FaultyStorage, Replica, ids, talk
from token_pool import snapshot
from waiting import wait_for

from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.sessions import replicas as replicas_module
from vllm_kvplugins.sessions import store as session_store
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.files import SessionFolder
from vllm_kvplugins.sessions.head_shards import Heads
from vllm_kvplugins.sessions.object_store import open_storage
from vllm_kvplugins.sessions.replicas import Query
from vllm_kvplugins.sessions.session_ids import (
    bucket_start,
    bucket_starts,
    digests_at,
    new_id,
)


@pytest.fixture(params=["file", "memory"])
def storage(request, tmp_path):
    url = (
        f"file://{tmp_path}" if request.param == "file" else f"memory://{uuid.uuid4()}"
    )
    opened = FaultyStorage(open_storage(url, IDENTITY.fingerprint))
    opened.prepare()
    opened.calls = 0
    return opened


@pytest.fixture
def replica(storage):
    """Makes replicas that are closed after the test."""
    made: list[Replica] = []

    def make(**settings: object) -> Replica:
        made.append(Replica(storage, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    storage.responds.set()
    for each in made:
        each.close()


def names(storage: FaultyStorage) -> set[str]:
    return {file.name for file in storage.storage.list()}


def damage(storage: FaultyStorage, change: object) -> None:
    """Change the bytes of the only file."""
    (name,) = names(storage)
    fs, path = fsspec.core.url_to_fs(storage.location)
    raw = bytearray(fs.cat_file(f"{path}/{name}"))
    fs.pipe_file(f"{path}/{name}", bytes(change(raw)))  # type: ignore[operator]


# -- names -----------------------------------------------------------------------------


def test_keys_of_a_prompt_contain_those_of_the_sessions_it_continues():
    """All with more than a third of its tokens."""
    for n in [*range(1, 300), 1000, 4097, 100_000]:
        starts = bucket_starts(n, 1, 8)
        assert starts == sorted(set(starts), reverse=True)
        assert len(starts) <= 8
        assert {bucket_start(m) for m in range(n // 3 + 1, n + 1)} <= set(starts)
    assert bucket_starts(1000, 900, 8) == [896]
    assert bucket_starts(3, 4, 8) == []


def test_ids_depend_on_owner_and_all_tokens_and_are_unique():
    tokens = talk(1, 100)
    first, second = new_id("o", tokens), new_id("o", tokens)
    assert first != second
    assert first.rsplit("-", 1)[0] == second.rsplit("-", 1)[0]
    changed = tokens.copy()
    changed[99] += 1
    key, n, digest, _ = new_id("o", changed).split("-")
    assert (key, n) == tuple(first.split("-")[:2]), "it shares the first 96 tokens"
    assert digest != first.split("-")[2]
    assert new_id("p", tokens).split("-")[0] != key
    assert digests_at("o", tokens, {100})[100] == first.split("-")[2]


# -- replicas find each other's sessions -----------------------------------------------


def test_a_replica_continues_what_another_has_just_saved(replica):
    """By a look-up, without a listing."""
    first, second = replica(), replica()
    first.save("o", talk(1, 100))
    first.finish_writes()
    prompt = np.append(talk(1, 100), ids(7, 8, 9))
    assert len(second.ask("o", prompt)) == 100
    assert second.directory.counts.hits == second.directory.counts.store_hits == 1
    assert len(second.ask("o", prompt)) == 100, "now it is in memory"
    # And back: the longer session wins over the one in memory.
    second.save("o", talk(1, 160))
    second.finish_writes()
    assert len(first.ask("o", np.append(talk(1, 160), ids(7)))) == 160
    assert first.directory.counts.store_hits == 1
    assert len(first.ask("o", np.append(talk(1, 100), ids(7)))) == 100
    assert first.directory.counts.store_hits == 1, "its own"
    first.directory.check_integrity()
    second.directory.check_integrity()


def test_an_edited_message_finds_the_sessions_before_it(replica):
    first, second = replica(), replica()
    first.save("o", talk(1, 100))
    first.finish_writes()
    edited = np.append(talk(1, 98), talk(2, 9))  # shares the key, which covers 96
    assert len(second.ask("o", edited)) == 98


def test_a_listing_finds_sessions_and_sees_that_they_are_gone(replica, storage):
    first, second = replica(), replica(refresh_s=0.02, lookup_s=0)
    first.save("o", talk(1, 100))
    first.save("o", talk(2, 30))
    first.finish_writes()
    second.replicas.start()

    def known() -> int:
        second.update()
        return second.directory.num_sessions

    wait_for(lambda: known() == 2)
    assert len(second.ask("o", np.append(talk(1, 100), ids(7)))) == 100
    for name in names(storage):
        storage.storage.delete(name)
    wait_for(lambda: known() == 1)
    assert not second.directory.on_disk
    assert len(second.ask("o", np.append(talk(1, 100), ids(7)))) == 100, "in memory"
    assert len(second.ask("o", np.append(talk(2, 30), ids(7)))) == 0
    second.directory.check_integrity()


def test_a_restarted_replica_finds_its_sessions(replica):
    first = replica()
    first.save("o", talk(1, 100))
    first.finish_writes()
    first.close()
    again = replica()
    assert len(again.ask("o", np.append(talk(1, 100), ids(7)))) == 100


def test_two_salts_share_no_bytes(replica, storage):
    """Neither sessions nor files, and no name tells that two have equal tokens."""
    first, second = replica(), replica(refresh_s=0.02)
    for owner in ("salt a", "salt b"):
        first.save(owner, talk(1, 100))
        first.finish_writes()
    assert len(names(storage)) == 2
    parts = [name.split("-") for name in names(storage)]
    assert parts[0][0] != parts[1][0]
    assert parts[0][2] != parts[1][2]
    prompt = np.append(talk(1, 100), ids(7))
    assert len(second.ask("salt c", prompt)) == 0
    second.replicas.start()

    def known() -> int:
        second.update()
        return second.directory.num_sessions

    wait_for(lambda: known() == 2)
    assert len(second.ask("salt c", prompt)) == 0
    assert len(second.ask("salt a", prompt)) == 100
    (loaded,) = second.directory.in_memory
    assert new_id("salt a", talk(1, 100))[:24] == loaded[:24]


def test_two_replicas_save_the_same_conversation(replica, storage):
    """At once: both files are complete, and either can be continued."""
    both = [replica(), replica()]
    threads = [
        threading.Thread(target=each.save, args=("o", talk(1, 100))) for each in both
    ]
    for thread in threads:
        thread.start()
    for thread, each in zip(threads, both, strict=True):
        thread.join()
        each.finish_writes()
    assert len(names(storage)) == 2
    third = replica()
    for name in sorted(names(storage)):
        assert third.files.read(name.split(".")[0], 0).tokens == 100
    assert len(third.ask("o", np.append(talk(1, 100), ids(7)))) == 100


def test_a_session_that_is_saved_again_leaves_the_first_file(replica, storage):
    """Files of other replicas may need it."""
    first, second = replica(), replica()
    first.save("o", talk(1, 100))
    first.finish_writes()
    second.ask("o", np.append(talk(1, 100), ids(7)))
    second.save("o", talk(1, 100))
    second.finish_writes()
    first.ask("o", talk(1, 120))
    first.save("o", talk(1, 120))
    first.finish_writes()
    assert len(names(storage)) == 3
    third = replica()
    assert len(third.ask("o", np.append(talk(1, 120), ids(7)))) == 120


def test_a_session_of_which_a_rank_s_part_is_missing_is_not_found(replica, storage):
    first, second = replica(ranks=2), replica(ranks=2)
    first.save("o", talk(1, 100))
    first.store.wait_for_writes()
    assert len(second.ask("o", np.append(talk(1, 100), ids(7)))) == 0
    (name,) = names(storage)
    assert name.endswith(".r0of2.safetensors")
    session_id = name.split(".")[0]
    assert second.files.list_complete() == {}
    saved = second.files.read(session_id, 0)
    second.files.write(second.files.read_session(session_id), 1, saved)
    assert set(second.files.list_complete()) == {session_id}
    other = replica(ranks=1)
    assert other.files.list_complete() == {}, "of another size"


# Each rank of any size has the only KV head.
ONE_HEAD = Heads((1,), replicas_are_equal=True)


def saved_by_two_ranks(replica, storage) -> str:
    """The ID of a session of 100 tokens, in two files.

    The helper has the worker of the first rank only.
    """
    first = replica(ranks=2, heads=ONE_HEAD)
    session_id = first.save("o", talk(1, 100))
    first.store.wait_for_writes()
    part = first.files.read(session_id, 0)
    first.files.write(first.files.read_session(session_id), 1, part)
    return session_id


@pytest.mark.parametrize("refresh_s", [None, 0.02])
def test_a_replica_of_another_size_continues_a_session(replica, storage, refresh_s):
    """Found by a look-up or a listing. Its files stay, and its size is that of all."""
    saved_by_two_ranks(replica, storage)
    before = names(storage)
    assert len(before) == 2
    one = replica(heads=ONE_HEAD, refresh_s=refresh_s)
    if refresh_s is not None:
        one.replicas.start()
        wait_for(lambda: len(one.replicas._found))
    assert len(one.ask("o", np.append(talk(1, 100), ids(7)))) == 100
    assert one.directory.counts.store_hits == 1
    sizes = [file.num_bytes for file in storage.storage.list()]
    assert one.directory.written_bytes == sum(sizes)
    assert names(storage) == before
    one.directory.check_integrity()


def test_a_replica_of_another_size_deletes_all_files_of_a_session(replica, storage):
    """When it has expired."""
    saved_by_two_ranks(replica, storage)
    assert len(names(storage)) == 2
    time.sleep(0.3)
    other = replica(heads=ONE_HEAD, max_age_s=0.2, refresh_s=0.02)
    other.replicas.start()
    wait_for(lambda: not names(storage))


def test_ranks_that_share_a_head_write_it_several_times(replica, storage):
    """So the files are larger than the session."""
    four = replica(ranks=4, heads=ONE_HEAD)
    tokens = talk(1, 100)
    session_id, size = new_id("o", tokens), 3 << 20
    saved = snapshot(np.zeros(size // 4, np.int32), None)
    for rank in range(4):
        session = Session(session_id, "o", tokens, None, size, len(tokens))
        four.files.write(session, rank, saved)
    for heads, found in ((ONE_HEAD, 1), (Heads((4,)), 0)):
        one = replica(heads=heads)
        one.replicas.look_up("r", [Query("o", np.append(tokens, ids(7)))])
        wait_for(lambda one=one: not one.replicas.waits("r"))
        assert len(one.replicas.take().found) == found


@pytest.mark.parametrize("fault", ["missing", "vanishes"])
def test_a_session_of_another_size_without_a_part_is_a_miss(replica, storage, fault):
    """Before it is found, and while it is read."""
    session_id = saved_by_two_ranks(replica, storage)
    if fault == "missing":
        storage.storage.delete(f"{session_id}.r1of2.safetensors")
    else:
        storage.before_read = storage.storage.delete
    one = replica(heads=ONE_HEAD)
    assert len(one.ask("o", np.append(talk(1, 100), ids(7)))) == 0
    assert one.directory.counts.failures == (fault == "vanishes")
    assert one.directory.num_sessions == 0


def test_a_replica_whose_heads_do_not_fit_finds_no_other_size(replica, storage):
    saved_by_two_ranks(replica, storage)
    for heads in (None, Heads((1,))):
        one = replica(heads=heads)
        assert len(one.ask("o", np.append(talk(1, 100), ids(7)))) == 0
        assert one.files.list_complete() == {}
        assert one.directory.counts.failures == 0


def test_a_session_that_is_removed_while_it_is_written_is_deleted_afterwards(
    replica, storage
):
    """Several threads write and delete."""
    each = replica()
    storage.responds.clear()
    each.save("o", talk(1, 100))
    wait_for(lambda: each.store._writer.num_running == 1)
    each.directory.clear()
    each.step()
    time.sleep(0.05)
    storage.responds.set()
    each.finish_writes()
    each.store.close()
    assert names(storage) == set()


# -- faults ----------------------------------------------------------------------------


def warnings(caplog) -> list[str]:
    return [code for r in caplog.records for code in codes_in(r.getMessage())]


def test_a_damaged_file_is_recomputed_and_stays_for_others(replica, storage, caplog):
    caplog.set_level(logging.WARNING, "vllm.kv_policy")
    first, second = replica(), replica()
    first.save("o", talk(1, 100))
    first.finish_writes()

    def flip(raw: bytearray) -> bytearray:
        raw[-3] ^= 1  # in the pages: the header is valid
        return raw

    damage(storage, flip)
    prompt = np.append(talk(1, 100), ids(7))
    assert len(second.ask("o", prompt)) == 0
    assert second.directory.counts.failures == 1
    assert len(names(storage)) == 1
    assert warnings(caplog) == ["KVP307"]
    calls = storage.calls
    assert len(second.ask("o", prompt)) == 0
    assert storage.calls - calls <= 8, "it is read again"
    assert second.directory.counts.failures == 1
    damage(storage, flip)
    second.now += 601
    assert len(second.ask("o", prompt)) == 100, "it is repaired"
    assert len(first.ask("o", prompt)) == 100


@pytest.mark.parametrize("what", ["empty", "cut", "header", "foreign", "renamed"])
def test_foreign_and_damaged_files_are_never_found(
    replica, storage, caplog, tmp_path, what
):
    caplog.set_level(logging.WARNING, "vllm.kv_policy")
    first, second = replica(), replica(refresh_s=0.02)
    first.save("o", talk(1, 100))
    first.finish_writes()
    fs, path = fsspec.core.url_to_fs(storage.location)
    (name,) = names(storage)
    if what == "renamed":  # to a name that the prompt of another owner asks for
        stolen = f"{new_id('mallory', talk(1, 100))}.r0of1.safetensors"
        fs.mv(f"{path}/{name}", f"{path}/{stolen}")
    else:
        damage(
            storage,
            {
                "empty": lambda raw: b"",
                "cut": lambda raw: raw[:200],
                "header": lambda raw: raw[:30] + b"#" + raw[31:],
                "foreign": lambda raw: b"\x00" * 3000,
            }[what],
        )
    fs.pipe_file(f"{path}/notes.txt", b"hello")
    fs.pipe_file(f"{path}/x.r0of1.safetensors", b"hello")
    second.replicas.start()
    for owner in ("o", "mallory"):
        assert len(second.ask(owner, np.append(talk(1, 100), ids(7)))) == 0
    wait_for(lambda: second.replicas._listed != set())
    second.update()
    assert second.directory.num_sessions == 0
    assert second.directory.counts.hits == 0
    assert second.replicas.responds, "the store is blamed for a file"
    if what != "empty":
        wait_for(lambda: "KVP309" in warnings(caplog))


def test_a_file_that_is_larger_than_its_header_says_is_not_found(replica):
    """There would be no memory reserved to read it."""
    first, second = replica(), replica()
    owner, tokens = "o", talk(1, 100)
    session = Session(new_id(owner, tokens), owner, tokens, None, 1, len(tokens))
    saved = snapshot(np.zeros(1 << 20, np.int32), None)
    first.files.write(session, 0, saved)
    assert len(second.ask("o", np.append(tokens, ids(7)))) == 0
    assert second.directory.num_sessions == 0


def test_a_file_that_vanishes_before_it_is_read(replica, storage):
    first, second = replica(), replica()
    first.save("o", talk(1, 100))
    first.finish_writes()
    storage.before_read = storage.storage.delete
    assert len(second.ask("o", np.append(talk(1, 100), ids(7)))) == 0
    assert second.directory.num_sessions == 0
    assert second.directory.counts.failures == 1
    second.directory.check_integrity()


def test_requests_wait_for_a_slow_store_once(replica, storage, caplog):
    """Then none waits until the store has answered in time again."""
    caplog.set_level(logging.WARNING, "vllm.kv_policy")
    first, second = replica(), replica(lookup_s=0.3)
    first.save("o", talk(1, 100))
    first.finish_writes()
    prompt = np.append(talk(1, 100), ids(7))
    storage.responds.clear()
    started = time.monotonic()
    assert len(second.ask("o", prompt)) == 0
    assert 0.2 < time.monotonic() - started < 5
    assert not second.replicas.responds
    started = time.monotonic()
    for _ in range(100):
        assert len(second.ask("o", prompt)) == 0
    assert time.monotonic() - started < 0.3, (
        "it waits for a store that is known to fail"
    )
    assert second.replicas.failures == 1
    assert len(second.replicas._threads._jobs) <= 8, "more than one look-up at a time"
    assert warnings(caplog) == ["KVP316"]
    storage.responds.set()
    # The late look-up has found the session nevertheless.
    wait_for(lambda: bool(second.replicas._found))

    def answers() -> bool:
        return len(second.ask("o", prompt)) == 100

    wait_for(answers)
    assert second.replicas.responds


def test_a_read_that_is_late_is_a_miss(replica, storage):
    first, second = replica(), replica(load_s=0.3)
    first.save("o", talk(1, 100))
    first.finish_writes()
    storage.before_read = lambda name: storage.responds.clear() or time.sleep(1.5)
    prompt = np.append(talk(1, 100), ids(7))
    started = time.monotonic()
    assert len(second.ask("o", prompt)) == 0
    assert time.monotonic() - started < 1.4
    assert not second.replicas.responds
    storage.responds.set()
    storage.before_read = lambda name: None
    wait_for(lambda: second.step() or bool(second.directory.in_memory))
    assert len(second.ask("o", prompt)) == 100, "it is in memory now"
    second.directory.check_integrity()


def test_a_store_that_fails_for_a_while(replica, storage, caplog):
    """Sessions continue from memory, nothing crashes, and the log stays short."""
    caplog.set_level(logging.WARNING, "vllm.kv_policy")
    first, second = replica(refresh_s=0.02), replica(refresh_s=0.02)
    storage.fails = True
    for each in (first, second):
        each.replicas.start()
    for number in range(30):
        assert first.save("o", talk(number, 50))
        first.finish_writes()
    for number in range(30):
        prompt = np.append(talk(number, 50), ids(7))
        assert len(first.ask("o", prompt)) == 50
        assert len(second.ask("o", prompt)) == 0
    assert first.directory.counts.failures == 30
    assert not first.directory.on_disk
    assert first.replicas.failures > 1
    assert 0 < len(caplog.records) < 20
    assert set(warnings(caplog)) == {"KVP306", "KVP316"}
    storage.fails = False
    wait_for(lambda: first.replicas.responds and second.replicas.responds)
    first.save("o", talk(99, 50))
    first.finish_writes()
    assert len(second.ask("o", np.append(talk(99, 50), ids(7)))) == 50
    assert len(second.ask("o", np.append(talk(3, 50), ids(7)))) == 0, "never written"


# -- limits ----------------------------------------------------------------------------


def test_memory_is_bounded_while_the_store_does_not_respond(
    replica, storage, monkeypatch
):
    monkeypatch.setattr(session_store, "_CLOSE_WAIT_S", 0.05)
    each = replica(memory_bytes=2000, lookup_s=0.01)
    storage.responds.clear()
    saved = [each.save("o", talk(number, 50)) for number in range(40)]
    assert [s is not None for s in saved] == [True] * 9 + [False] * 31
    assert each.directory.counts.refused == 31
    for number in range(2000):
        each.replicas.look_up(f"r{number}", [Query("o", talk(number, 9))])
    for number in range(300):
        each.ask("o", np.append(talk(1000 + number, 50), ids(7)))
    assert len(each.replicas._threads._jobs) <= 64 * 8


def test_the_index_is_bounded_and_files_stay(replica, storage):
    """Sessions that do not fit are found by look-ups."""
    first = replica()
    for number in range(40):
        first.save("o", talk(number, 50))
        first.finish_writes()
    limit = 10 * (2048 + 8 * 50)
    second = replica(refresh_s=0.02, index_bytes=limit, memory_bytes=3 * 200)
    second.replicas.start()

    def known() -> int:
        second.update()
        assert second.directory.index_bytes <= limit
        return second.directory.num_sessions

    wait_for(lambda: known() == 5)  # half is for look-ups
    for number in range(40):
        assert len(second.ask("o", np.append(talk(number, 50), ids(7)))) == 50
        assert second.directory.index_bytes <= limit
    assert len(names(storage)) == 40
    second.directory.check_integrity()


def test_an_idle_engine_holds_few_found_sessions(replica, monkeypatch):
    monkeypatch.setattr(replicas_module, "_MAX_FOUND", 8)
    first = replica()
    for number in range(40):
        first.save("o", talk(number, 50))
        first.finish_writes()
    second = replica(refresh_s=0.02)
    second.replicas.start()
    wait_for(lambda: len(second.replicas._found) == 8)
    time.sleep(0.1)
    assert len(second.replicas._found) == 8

    def known() -> int:
        second.update()
        return second.directory.num_sessions

    wait_for(lambda: known() == 40)


def test_old_files_are_deleted_by_any_replica(tmp_path):
    """By the time of writing them, also if nobody knows them."""
    storage = open_storage(f"file://{tmp_path}", IDENTITY.fingerprint)
    storage.prepare()
    first = Replica(storage)
    for number in range(2):
        first.save("o", talk(number, 50))
        first.finish_writes()
    first.close()
    old, new = sorted((tmp_path / IDENTITY.fingerprint).iterdir())
    os.utime(old, (time.time() - 100,) * 2)
    second = Replica(storage, refresh_s=0.02, max_age_s=60.0)
    tokens = [
        t for t in (talk(0, 50), talk(1, 50)) if new_id("o", t)[:24] == old.name[:24]
    ]
    assert len(second.ask("o", np.append(tokens[0], ids(7)))) == 0, "before a listing"
    second.replicas.start()
    wait_for(lambda: not old.exists())
    assert new.exists()
    second.close()


# -- at random -------------------------------------------------------------------------


def test_any_operations_and_faults_give_no_wrong_token(tmp_path, caplog, monkeypatch):
    """Three replicas; ``Replica`` compares every restored token and all limits."""
    caplog.set_level(logging.CRITICAL, "vllm.kv_policy")
    monkeypatch.setattr(replicas_module, "_IGNORE_S", 0.01)
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    is_full = os.environ.get("KVP_TEST_TIER") == "all"
    operations = int(os.environ.get("KVP_TEST_OPERATIONS", 20000 if is_full else 600))
    seed = int(os.environ.get("KVP_TEST_SEED", "20261126"))
    print("seed", seed)
    rng = random.Random(seed)
    folder = tmp_path / IDENTITY.fingerprint
    storage = FaultyStorage(open_storage(f"file://{tmp_path}", IDENTITY.fingerprint))
    storage.prepare()

    def start() -> Replica:
        made = Replica(
            storage,
            memory_bytes=8000,
            lookup_s=0.05,
            load_s=0.05,
            refresh_s=0.01,
            index_bytes=60_000,
            max_age_s=500.0,
        )
        made.replicas.start()
        return made

    def turn() -> None:
        """A request continues a history, or branches off from it, and ends."""
        each, owner = rng.choice(replicas), rng.choice("ab")
        known = rng.choice(histories)
        known = known[: max(1, len(known) - rng.choice((0, 0, 0, 1, 5, 20)))]
        new = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        prompt = np.append(known, new).astype(np.int32)[:160]
        each.ask(owner, prompt)
        histories[:] = [*histories[-30:], prompt]
        each.save(owner, prompt, rng.choice((0, len(prompt) // 8 * 4)))

    def step() -> None:
        for each in replicas:
            each.step()
            each.update()

    def fault() -> None:
        storage.fails = rng.random() < 0.3
        storage.responds.clear() if rng.random() < 0.2 else storage.responds.set()

    def harm() -> None:
        found = sorted(folder.glob("*.safetensors"))
        if found:
            path = rng.choice(found)
            with suppress(OSError):  # a replica has deleted it
                raw = bytearray(path.read_bytes())
                path.unlink()
                how = rng.randrange(4)
                if how == 0:
                    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                    path.write_bytes(raw)
                elif how == 1:
                    path.write_bytes(raw[: rng.randrange(len(raw))])
                elif how == 2:
                    path.with_name(rng.choice(found).name).write_bytes(raw)

    def restart() -> None:
        storage.responds.set()
        old = replicas.pop(rng.randrange(len(replicas)))
        old.close()
        hits.append(old.directory.counts.store_hits)
        replicas.append(start())

    def age() -> None:
        for each in replicas:
            each.now += rng.choice((1.0, 100.0))

    histories = [np.arange(8, dtype=np.int32)]
    hits: list[int] = []
    replicas = [start() for _ in range(3)]
    weights = {turn: 40, step: 40, fault: 4, harm: 4, restart: 1, age: 1}
    for number in range(operations):
        rng.choices(list(weights), list(weights.values()))[0]()
        if number % 50 == 0:
            for each in replicas:
                each.directory.check_integrity()
    storage.responds.set()
    storage.fails = False
    for each in replicas:
        each.finish_writes()
        assert each.directory.unwritten_bytes == 0
        hits.append(each.directory.counts.store_hits)
        each.close()
    print("store hits", sum(hits))
    assert sum(hits) > operations / 100


def test_a_directory_of_session_dir_has_the_same_names(tmp_path):
    """So that ``kvplugins sessions`` lists the directory of a session_url."""
    storage = open_storage(f"file://{tmp_path}", IDENTITY.fingerprint)
    assert Path(storage.location) == SessionFolder(tmp_path, IDENTITY).folder
