"""Sessions on a disk that stalls, is full, or loses its folder."""

from __future__ import annotations

import logging
import shutil
import threading
import weakref
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest
import torch
from test_session_files import Caches, cache, folder
from test_session_store import session
from token_pool import CopiedCache
from waiting import wait_for

from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.sessions import store as session_store
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.directory import MAX_WAIT_S, SessionDirectory
from vllm_kvplugins.sessions.file_thread import FileThread
from vllm_kvplugins.sessions.files import FoundSession, SessionFolder
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.store import SessionStore

SIZE, LIMIT = 100, 1000


class Weighed(Caches):
    """A transfer that knows which of its snapshots still exist."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def save(self, *arguments: object) -> CopiedCache:
        saved = cache(9)
        self.alive.add(saved.parts[0].tail)
        return CopiedCache(saved)

    @property
    def num_bytes(self) -> int:
        return SIZE * len(self.alive)


class StalledFolder:
    """Session files on a disk that answers only when ``responds`` is set."""

    def __init__(self, files: SessionFolder) -> None:
        self._files = files
        self.responds = threading.Event()

    def __getattr__(self, name: str) -> object:
        method = getattr(self._files, name)

        def late(*arguments: object) -> object:
            assert self.responds.wait(60)
            return method(*arguments)

        return late


class Engine:
    """A directory and the store of one worker."""

    def __init__(self, tmp_path: Path, **settings: object) -> None:
        self.now = 0.0
        self.disk = StalledFolder(folder(tmp_path))
        self.transfer = Weighed()
        self.store = SessionStore(self.transfer, self.disk)  # type: ignore[arg-type]
        self.directory = SessionDirectory(
            LIMIT, writes=True, clock=lambda: self.now, **settings
        )

    def step(self) -> None:
        commands = self.directory.take_commands()
        self.store.save(commands)
        self.store.execute(commands)
        self.directory.process(self.store.take_acks())
        self.directory.check_integrity()

    def save(self, number: int) -> bool:
        done = talk(number)
        return self.directory.save(done, done.session_id, ())

    def finish(self) -> None:
        self.disk.responds.set()
        self.store.wait_for_writes()
        self.step()


def talk(number: int) -> Session:
    ids = np.arange(9, dtype=np.int32) + 100 * number
    return session(f"s{number}", ids, size=SIZE)


def test_a_stalled_disk_takes_no_more_than_session_memory(tmp_path, caplog, reported):
    engine = Engine(tmp_path)
    saved = []
    for number in range(80):
        saved.append(engine.save(number))
        engine.step()
        assert engine.transfer.num_bytes <= LIMIT
        assert engine.directory.held_bytes <= LIMIT
    assert saved == 10 * [True] + 70 * [False]
    assert engine.directory.counts.refused == 70
    assert engine.directory.unwritten_bytes == LIMIT
    (record,) = caplog.records
    assert codes_in(record.getMessage()) == ("KVP310",)
    # What is in memory can be continued meanwhile.
    prompt = np.append(talk(3).tokens, 7).astype(np.int32)
    assert next(engine.directory.find("o", prompt)).ready
    engine.finish()
    assert engine.directory.unwritten_bytes == 0
    assert len(engine.directory.on_disk) == 10
    assert engine.save(99), "the disk has caught up"
    engine.finish()
    engine.store.close()


def test_sessions_removed_from_the_queue_free_their_memory(tmp_path):
    """All but the one that is being written."""
    engine = Engine(tmp_path)
    for number in range(10):
        engine.save(number)
    engine.step()
    wait_for(lambda: engine.store._writer.num_running)
    engine.directory.clear()
    engine.step()
    engine.step()
    assert engine.transfer.num_bytes == engine.directory.held_bytes == SIZE
    for number in range(20, 40):
        engine.save(number)
        engine.step()
        assert engine.transfer.num_bytes <= LIMIT
    assert engine.directory.num_sessions == 9
    engine.finish()
    written = {path.name.split(".")[0] for path in engine.disk._files.folder.iterdir()}
    assert written == engine.directory.on_disk, "a removed session has a file"
    engine.store.close()


def test_old_sessions_leave_memory_before_new_ones_are_copied(tmp_path):
    engine = Engine(tmp_path)
    engine.disk.responds.set()
    most = 0
    copy = engine.transfer.save

    def measured(*arguments: object) -> CacheSnapshot:
        nonlocal most
        saved = copy(*arguments)
        most = max(most, engine.transfer.num_bytes)
        return saved

    engine.transfer.save = measured  # type: ignore[method-assign]
    for number in range(30):
        assert engine.save(number)
        engine.step()
        engine.finish()
    assert most == LIMIT
    engine.store.close()


def test_a_request_does_not_wait_for_a_disk_that_never_answers(tmp_path):
    engine = Engine(tmp_path)
    engine.directory.add_files([FoundSession(talk(1), 0.0, SIZE)])
    prompt = np.append(talk(1).tokens, 7).astype(np.int32)
    match = next(engine.directory.find("o", prompt))
    assert engine.directory.fetch(match, "r")
    engine.step()
    engine.now = MAX_WAIT_S - 0.1
    assert engine.directory.fetch(match, "r")
    engine.now = MAX_WAIT_S + 0.1
    assert not engine.directory.fetch(match, "r")
    engine.now += MAX_WAIT_S
    assert not engine.directory.fetch(match, "r"), "it waits again"
    assert engine.directory.fetch(match, "another")
    engine.directory.stop_waiting("r")
    assert engine.directory.fetch(match, "r"), "it was preempted, and starts again"
    engine.disk.responds.set()
    engine.store.close()


def test_closing_does_not_wait_for_a_disk_that_never_answers(
    tmp_path, monkeypatch, caplog, reported
):
    monkeypatch.setattr(session_store, "_CLOSE_WAIT_S", 0.05)
    engine = Engine(tmp_path)
    engine.save(1)
    engine.step()
    engine.store.close()
    (record,) = caplog.records
    assert codes_in(record.getMessage()) == ("KVP306",)
    engine.disk.responds.set()


def file_sizes(engine: Engine) -> list[int]:
    return [p.stat().st_size for p in engine.disk._files.folder.iterdir()]


def test_files_never_take_more_than_the_limit(tmp_path):
    """With files that are being written, and other files."""
    engine = Engine(tmp_path, disk_bytes=15000, other_disk_bytes=1000)
    engine.disk.responds.set()
    for number in range(20):
        assert engine.save(number)
        engine.step()
        engine.finish()
        sizes = file_sizes(engine)
        assert sum(sizes) <= 14000
        assert engine.directory.written_bytes == sum(sizes)
    assert sum(sizes) > 14000 - 5000, "room for one more file as the directory expects"
    kept = {f"s{number}" for number in range(20 - len(sizes), 20)}
    assert engine.directory.on_disk == kept, "the least recently used ones go"
    engine.store.close()


def test_with_a_stalled_disk_no_more_is_queued_than_the_limit(tmp_path, caplog):
    engine = Engine(tmp_path, disk_bytes=3 * (SIZE + 36 + 4096))
    for number in range(9):
        assert engine.save(number), "it is in memory"
        engine.step()
    assert engine.directory.unwritten_bytes == 3 * SIZE
    engine.finish()
    assert engine.directory.num_sessions == 9
    engine.store.close()


def test_a_file_larger_than_the_limit_is_not_written(tmp_path, caplog, reported):
    engine = Engine(tmp_path, disk_bytes=1000, other_disk_bytes=900)
    for number in range(2):
        assert engine.save(number), "it is in memory"
        engine.step()
    assert file_sizes(engine) == []
    (record,) = caplog.records
    assert codes_in(record.getMessage()) == ("KVP311",)
    engine.store.close()


def test_a_full_disk_keeps_sessions_in_memory(tmp_path, monkeypatch):
    engine = Engine(tmp_path)
    engine.disk.responds.set()

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "write", full)
    for number in range(30):
        assert engine.save(number)
        engine.step()
        engine.finish()
    assert engine.directory.counts.failures == 30
    assert len(engine.directory.in_memory) == 10
    assert (engine.directory.written_bytes, file_sizes(engine)) == (0, [])
    engine.store.close()


def test_a_directory_that_is_removed_while_running(tmp_path):
    """Sessions in memory continue; those in files are misses."""
    engine = Engine(tmp_path)
    engine.disk.responds.set()
    for number in range(15):
        engine.save(number)
        engine.step()
        engine.finish()
    shutil.rmtree(tmp_path)
    for number, ready in ((0, False), (14, True)):
        prompt = np.append(talk(number).tokens, 7).astype(np.int32)
        match = next(engine.directory.find("o", prompt))
        assert match.ready == ready
        if not ready:
            assert engine.directory.fetch(match, "r")
            engine.step()
            wait_for(lambda: all(r.done() for r in engine.store._reads.values()))
            engine.step()
            assert next(engine.directory.find("o", prompt), None) is None
    assert engine.directory.counts.failures == 1
    engine.save(20)
    engine.step()
    engine.finish()
    assert engine.directory.counts.failures == 2
    assert "s20" in engine.directory.in_memory
    assert not tmp_path.exists(), "it may have been a mount"
    engine.store.close()


def test_a_session_removed_before_its_step_is_not_saved(tmp_path):
    engine = Engine(tmp_path)
    engine.save(1)
    engine.directory.clear()
    assert not engine.directory.has_commands
    assert engine.directory.held_bytes == engine.directory.unwritten_bytes == 0
    engine.step()
    engine.store.close()


# -- the background thread -------------------------------------------------------------


def test_jobs_run_in_order_and_errors_stay_with_their_job():
    thread, seen = FileThread("t"), []

    def fail() -> None:
        raise OSError("full")

    first = thread.submit(lambda: seen.append(1))
    second = thread.submit(fail)
    third = thread.submit(lambda: seen.append(3))
    assert thread.close(20)
    assert seen == [1, 3]
    assert isinstance(second.exception(), OSError)
    assert (first.result(), third.result()) == (None, None)


def test_a_cancelled_job_is_freed_at_once():
    thread, go = FileThread("t"), threading.Event()
    running = thread.submit(lambda: go.wait(20))
    kept = cache(9)
    alive = weakref.ref(kept.parts[0].tail)
    queued = thread.submit(lambda kept=kept: kept)
    del kept
    wait_for(lambda: running.running())
    assert not thread.cancel(running)
    assert thread.cancel(queued)
    assert queued.cancelled()
    assert alive() is None
    assert not thread.close(0.01), "the first job still runs"
    go.set()
    wait_for(running.done)


def test_nobody_waits_for_a_cancelled_job():
    thread, go = FileThread("t"), threading.Event()
    running = thread.submit(lambda: go.wait(20))
    queued = thread.submit(lambda: None)
    threading.Timer(0.2, lambda: thread.cancel(queued)).start()
    assert wait([queued], timeout=20).done == {queued}, "cancelled while it waited"
    assert wait([queued], timeout=0).done == {queued}
    go.set()
    wait_for(running.done)
    assert thread.close(1)


def test_a_job_that_has_ended_is_freed():
    thread, kept = FileThread("t"), cache(9)
    alive = weakref.ref(kept.parts[0].tail)
    ended: Future[object] = thread.submit(lambda kept=kept: None)
    del kept
    wait_for(ended.done)
    wait_for(lambda: alive() is None)
    assert thread.close(1)


@pytest.fixture
def reported(monkeypatch):
    """Once imported, vLLM does not propagate its loggers' messages."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
