"""Directory, store and files of sessions under random operations and faults.

Everything but the copies between pool and host is real: threads, files, late
acknowledgements. Saved pages contain their own tokens, so that a load shows whether it
got the right session. ``KVP_TEST_OPERATIONS``: number of operations.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_pool import Pool, num_bytes

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import Identity, SessionFolder
from vllm_kvplugins.sessions.store import SessionStore

_BY_TIER = "100000" if os.environ.get("KVP_TEST_TIER") == "all" else "10000"
OPERATIONS = int(os.environ.get("KVP_TEST_OPERATIONS", _BY_TIER))
COPIES = 8
MEMORY_BYTES, DISK_BYTES, MAX_AGE_S = 64 * 40 * COPIES, 3200 * 60, 400.0


class Machine:
    """One engine after the other with the same ``session_dir``.

    Args:
        other: an engine that runs at the same time, with the same directory and
            conversations.
    """

    def __init__(self, root: Path, seed: int, other: Machine | None = None) -> None:
        self.rng = random.Random(seed)
        self.root, self.now, self.number = root, 0.0, 0
        self.histories: list[Tokens] = [np.arange(8, dtype=np.int32)]
        self.responds = threading.Event()
        self.responds.set()
        self.seed = seed
        if other is not None:
            self.histories, self.responds = other.histories, other.responds
        self.full = False
        self.hits = 0
        self.deltas = 0
        self.reduced = 0
        self.start()

    def start(self) -> None:
        """A new engine, which finds the files of the last one."""
        self.files = SessionFolder(self.root, Identity.of(model="m"))
        self.files.prepare()
        scan = self.files.scan()
        self.pool = Pool(COPIES)
        self.store = SessionStore(self.pool, self.files)  # type: ignore[arg-type]
        self.directory = SessionDirectory(
            MEMORY_BYTES,
            min_tokens=4,
            writes=True,
            disk_bytes=DISK_BYTES,
            other_disk_bytes=min(scan.other_bytes, DISK_BYTES // 2),
            max_age_s=MAX_AGE_S,
            clock=lambda: self.now,
        )
        self.directory.add_files(scan.sessions)

    def step(self) -> None:
        commands = self.directory.take_commands()
        loads = {load.request_id: load for load in commands.loads}
        self.store.save(commands)
        self.store.execute(commands)
        for request, load in loads.items():
            cache = self.pool.restored.pop(request, None)
            if cache is not None:
                expected = self.expected.pop(request)[: load.tokens]
                assert (cache == expected).all(), "another session's cache"
                self.hits += 1
        self.directory.process(self.store.take_acks())
        assert self.store.held_bytes <= MEMORY_BYTES
        assert self.directory.held_bytes <= MEMORY_BYTES

    expected: dict[str, Tokens]

    def num_deltas(self) -> int:
        """How many files need others, as far as the directory knows."""
        return sum(bool(entry.sources) for entry in self.directory._entries.values())

    # -- operations ---------------------------------------------------------------

    def request(self) -> None:
        """A request continues a history, or branches off from it, and ends."""
        rng = self.rng
        known = rng.choice(self.histories)
        known = known[: max(1, len(known) - rng.choice((0, 0, 0, 1, 5, 20)))]
        new = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
        prompt = np.append(known, new).astype(np.int32)[:160]
        owner = rng.choice("ab")
        self.number += 1
        name = f"r{self.number}"
        self.expected = {name: prompt}
        match, continued = next(self.directory.find(owner, prompt), None), None
        if match is not None and match.ready:
            assert match.session.owner == owner
            self.directory.load(match, name, len(prompt), ())
            continued = match.session.session_id
            self.step()  # the worker learns what it continues before it ends
        elif match is not None:
            self.directory.fetch(match, name)
            self.step()
            if rng.random() < 0.5:
                self.wait_for_reads()
            self.directory.stop_waiting(name)
        self.histories[:] = [*self.histories[-30:], prompt]
        self.pool.caches[name] = prompt
        at = rng.choice((0, len(prompt) // 8 * 4))
        span = BlockSpan(0, at // 4)
        compaction = Compaction(at, span, span) if at else None
        name_of = f"s{self.seed}-{self.number}"
        size = num_bytes(prompt, COPIES)
        done = Session(name_of, owner, prompt, compaction, size, len(prompt))
        self.directory.save(done, name, (), continued)
        self.step()
        self.deltas += self.num_deltas()
        self.reduced += len(self.directory.reduced)
        self.pool.caches.clear()

    def wait_for_reads(self) -> None:
        end = time.monotonic() + 10
        while self.responds.is_set() and time.monotonic() < end:
            if all(read.done() for read in self.store._reads.values()):
                return
            time.sleep(0.0005)

    def pass_time(self) -> None:
        self.now += self.rng.choice((0.1, 5.0, 60.0))
        self.directory.expire()

    def reset(self) -> None:
        if self.rng.random() < 0.02:
            self.directory.clear()

    def stall(self) -> None:
        """The disk stops to respond, or responds again."""
        self.responds.clear() if self.rng.random() < 0.2 else self.responds.set()

    def fill_disk(self) -> None:
        self.full = self.rng.random() < 0.2

    def fill_memory(self) -> None:
        self.pool.fails = self.rng.random() < 0.05

    def damage(self) -> None:
        """Change, cut, remove or replace a file."""
        files = sorted(self.files.folder.glob("*.safetensors"))
        files = [path for path in files if path.is_file()]
        if not files:
            return
        path, how = self.rng.choice(files), self.rng.choice((0, 0, 0, 0, 1, 2, 3, 4))
        with suppress(OSError):  # the server has deleted it meanwhile
            raw = bytearray(path.read_bytes())
            path.unlink()
            if how == 0:
                # Often in the pages, which are at the end.
                last = min(self.rng.choice((len(raw), 40)), len(raw))
                if last:  # an earlier damage may have left nothing
                    raw[-1 - self.rng.randrange(last)] ^= 1 << self.rng.randrange(8)
                path.write_bytes(raw)
            elif how == 1:
                path.write_bytes(raw[: self.rng.randrange(max(len(raw), 1))])
            elif how == 2:
                os.mkfifo(path)
            elif how == 3:
                path.symlink_to("nowhere")

    def litter(self) -> None:
        with suppress(FileNotFoundError):  # the folder has been removed
            (self.files.folder / f"{self.rng.randrange(3)}.part").write_bytes(b"half")

    def remove_folder(self) -> None:
        if self.rng.random() < 0.02:
            shutil.rmtree(self.files.folder, ignore_errors=True)
            self.restart()

    def change_date(self) -> None:
        """The file times jump; the directory's clock does not."""
        for path in list(self.files.folder.glob("*.safetensors"))[:3]:
            date = time.time() + self.rng.choice((-1e9, -100.0, 1e9))
            with suppress(OSError):
                os.utime(path, (date, date), follow_symlinks=False)

    def restart(self) -> None:
        """The engine ends, after writing its files or by ``kill -9``."""
        if self.rng.random() < 0.05:
            self.responds.set()
            self.full = False
            self.finish() if self.rng.random() < 0.5 else self.abandon()
            self.start()

    def abandon(self) -> None:
        """As after ``kill -9``: nothing is acknowledged."""
        for write in self.store._writes.values():
            self.store._writer.cancel(write)
        self.store.close()

    def finish(self) -> None:
        self.responds.set()
        for _ in range(3):
            self.store.wait_for_writes()
            self.wait_for_reads()
            self.step()
        for _ in range(1000):
            directory = self.directory
            if not (
                directory.pending or directory.awaits_copies or directory.has_commands
            ):
                break
            self.store.wait_for_copies()
            self.step()
        self.directory.check_integrity()
        assert self.directory.unwritten_bytes == 0
        assert not self.directory.pending
        assert self.store.held_bytes == self.directory.held_bytes
        self.store.close()


@contextmanager
def disk(machine: Callable[[], Machine]) -> Iterator[None]:
    """The real functions for files, which stall or fail as the machine says."""
    write, read = tensor_file.write, tensor_file.read

    def slow_write(*arguments: Any) -> int:
        assert machine().responds.wait(60)
        if machine().full:
            raise OSError(28, "No space left on device")
        return write(*arguments)

    def slow_read(path: Path, only: Any = None) -> Any:
        if only is None:
            assert machine().responds.wait(60)
        return read(path, only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "write", slow_write)
        patch.setattr(tensor_file, "read", slow_read)
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def test_any_operations_and_faults_give_no_wrong_token(tmp_path, caplog):
    """No wrong cache, no crash, no more memory than the limit."""
    caplog.set_level(logging.CRITICAL, "vllm.kv_policy")
    seed = int(os.environ.get("KVP_TEST_SEED", "20261125"))
    print("seed", seed)
    with disk(lambda: machine):
        machine = Machine(tmp_path / "sessions", seed)
        operations: dict[Callable[[], None], int] = {
            machine.request: 30,
            machine.step: 40,
            machine.pass_time: 10,
            machine.reset: 1,
            machine.stall: 5,
            machine.fill_disk: 2,
            machine.fill_memory: 2,
            machine.damage: 8,
            machine.litter: 1,
            machine.remove_folder: 1,
            machine.change_date: 1,
            machine.restart: 2,
        }
        names, weights = list(operations), list(operations.values())
        for number in range(OPERATIONS):
            machine.rng.choices(names, weights)[0]()
            if number % 50 == 0:
                machine.directory.check_integrity()
        machine.finish()
    counts = machine.directory.counts
    print(machine.hits, machine.deltas, machine.reduced, counts)
    assert machine.reduced  # how often depends on the speed of threads
    assert machine.deltas > OPERATIONS / 100
    assert machine.hits > OPERATIONS / 100


def test_engines_that_run_at_the_same_time_give_no_wrong_token(tmp_path, caplog):
    """Two, with one directory. Each may delete what both have found at a start."""
    caplog.set_level(logging.CRITICAL, "vllm.kv_policy")
    seed = int(os.environ.get("KVP_TEST_SEED", "20261127"))
    print("seed", seed)
    with disk(lambda: machines[0]):
        machines = [Machine(tmp_path / "sessions", seed)]
        machines.append(Machine(tmp_path / "sessions", seed + 1, machines[0]))
        failures = 0
        for number in range(OPERATIONS):
            machine = machines[number % 2]
            operations: dict[Callable[[], None], int] = {
                machine.request: 30,
                machine.step: 40,
                machine.pass_time: 10,
                machine.reset: 1,
                machine.restart: 2,
            }
            before = machine.directory
            names, weights = list(operations), list(operations.values())
            machine.rng.choices(names, weights)[0]()
            if machine.directory is not before:
                failures += before.counts.failures
            if number % 50 == 0:
                for each in machines:
                    each.directory.check_integrity()
        for machine in machines:
            machine.finish()
    directories = [machine.directory for machine in machines]
    failures += sum(directory.counts.failures for directory in directories)
    hits = sum(machine.hits for machine in machines)
    files = list(machines[0].files.folder.iterdir())
    used = sum(file.stat().st_size for file in files)
    counted = sum(directory.written_bytes for directory in directories)
    print(hits, failures, used, counted)
    assert hits > OPERATIONS / 100
    assert failures > 0, "neither has read what the other one had deleted"
    known = {each for directory in directories for each in directory.on_disk}
    known |= {each for directory in directories for each in directory.kept_files}
    # A start finds a file and does not use it if the other engine has deleted what it
    # needs. Such files stay and count, as damaged ones do.
    problems = machines[0].files.scan().problems
    assert all("is damaged or gone" in str(problem) for problem in problems)
    lost = {str(problem).partition(".")[0] for problem in problems}
    lost_bytes = sum(
        file.stat().st_size for file in files if file.name.partition(".")[0] in lost
    )
    assert used - lost_bytes <= counted <= 2 * DISK_BYTES
    known |= lost
    assert {file.name.partition(".")[0] for file in files} <= known
