"""Replicas of an engine without vLLM: directory, worker and store of sessions are real.

Saved caches consist of their tokens (``token_pool``), so that a load shows whether it
got the right session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from token_pool import Pool, num_bytes

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.directory import SessionDirectory
from vllm_kvplugins.sessions.files import Identity, SessionFiles
from vllm_kvplugins.sessions.head_shards import Heads
from vllm_kvplugins.sessions.records import Match, SharedStore
from vllm_kvplugins.sessions.replicas import Query, ReplicaSessions
from vllm_kvplugins.sessions.session_ids import new_id
from vllm_kvplugins.sessions.storage import SessionStorage, StoredFile
from vllm_kvplugins.sessions.store import SessionStore

IDENTITY = Identity.of(model="m")
BLOCK = 4


def ids(*numbers: int) -> Tokens:
    return np.array(numbers, dtype=np.int32)


def talk(seed: int, n: int) -> Tokens:
    """The tokens of a conversation; a longer one begins with the same tokens."""
    return np.random.default_rng(seed).integers(0, 50_000, 10_000, np.int32)[:n]


class FaultyStorage:
    """A storage that fails, or does not respond, when a test says so.

    Attributes:
        fails: every operation raises an error.
        fails_every: each n-th operation does; 0: none.
        calls: number of operations.
        before_read: called with the name of each file that is read as a whole.
    """

    def __init__(self, storage: SessionStorage) -> None:
        self.storage = storage
        self.fails = False
        self.fails_every = 0
        self.responds = threading.Event()
        self.responds.set()
        self.calls = 0
        self.before_read: Callable[[str], None] = lambda name: None

    @property
    def location(self) -> str:
        return self.storage.location

    def _pass(self) -> SessionStorage:
        self.calls += 1
        assert self.responds.wait(60)
        is_nth = bool(self.fails_every) and self.calls % self.fails_every == 0
        if self.fails or is_nth:
            raise OSError("the store fails")
        return self.storage

    def prepare(self) -> None:
        self._pass().prepare()

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        yield from self._pass().list(prefix)

    def read(
        self, name: str, only: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        storage = self._pass()
        if only is None:
            self.before_read(name)
        return storage.read(name, only)

    def write(
        self, name: str, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
    ) -> int:
        return self._pass().write(name, tensors, about)

    def delete(self, name: str) -> None:
        self._pass().delete(name)

    def touch(self, name: str) -> None:
        self._pass().touch(name)


class Replica:
    """One engine. ``ask`` and ``save`` do what vLLM's scheduler and a worker do."""

    def __init__(
        self,
        storage: SessionStorage,
        memory_bytes: int = 1 << 20,
        lookup_s: float = 10.0,
        load_s: float = 10.0,
        refresh_s: float | None = None,
        max_age_s: float | None = None,
        index_bytes: int = 1 << 20,
        ranks: int = 1,
        heads: Heads | None = None,
    ) -> None:
        self.now = 0.0
        self.files = SessionFiles(storage, IDENTITY, ranks, heads)
        self.pool = Pool()
        self.store = SessionStore(self.pool, self.files, num_readers=2, num_writers=2)
        self.replicas = ReplicaSessions(
            self.files,
            BLOCK,
            refresh_s,
            lookup_s,
            max_age_s,
            index_bytes // 2,
            clock=lambda: self.now + time.monotonic(),
        )
        self.directory = SessionDirectory(
            memory_bytes,
            min_tokens=BLOCK,
            writes=True,
            on_forgotten=self.replicas.forget,
            shared=SharedStore(
                index_bytes,
                load_s,
                on_unloadable=self.replicas.ignore,
                on_late=self.replicas.note_late_read,
            ),
            clock=lambda: self.now + time.monotonic(),
        )
        self._requests = 0
        self._continued: tuple[str, str] | None = (
            None  # by the last request, until it is saved
        )

    def step(self) -> None:
        commands = self.directory.take_commands()
        self.store.save(commands)
        self.store.execute(commands)
        self.directory.process(self.store.take_acks())
        assert self.store.held_bytes <= self.directory.memory_bytes
        assert self.directory.held_bytes <= self.directory.memory_bytes

    def update(self) -> None:
        """Take what was found in the store."""
        changes = self.replicas.take()
        for found in changes.found:
            self.directory.add_stored(found.session, found.file_bytes)
            if found.session.session_id in self.directory:
                self.replicas.add_known(found.session.session_id)
        for session_id in changes.gone:
            self.directory.remove_stored(session_id)

    def save(self, owner: str, tokens: Tokens, at: int = 0) -> str | None:
        """The cache of a request that has ended; its ID, or None if it is refused.

        It is the request that asked last, if that one continued a session.
        """
        self._requests += 1
        request, continued = f"saved{self._requests}", None
        if self._continued is not None:
            name, continued = self._continued
            self.pool.continued[request] = self.pool.continued.pop(name)
            self._continued = None
        span = BlockSpan(0, at // BLOCK)
        compaction = Compaction(at, span, span) if at else None
        session_id = new_id(owner, tokens)
        n = len(tokens)
        session = Session(session_id, owner, tokens, compaction, num_bytes(tokens), n)
        self.pool.caches[request] = tokens
        if not self.directory.save(session, request, (), continued):
            return None
        self.replicas.add_known(session_id)
        self.step()
        return session_id

    def finish_writes(self) -> None:
        self.store.wait_for_writes()
        self.step()
        self.directory.check_integrity()

    def ask(self, owner: str, prompt: Tokens) -> Tokens:
        """The tokens that a request restores; empty if it continues no session."""
        self._requests += 1
        request = f"r{self._requests}"
        more_than = max((m.tokens for m in self._matches(owner, prompt)), default=0)
        self.replicas.look_up(request, [Query(owner, prompt, more_than)])
        while self.replicas.waits(request):
            self.replicas.wait(0.01)
        self.replicas.stop_waiting(request)
        while True:
            self.update()
            match = next(self._matches(owner, prompt), None)
            if match is None or match.ready:
                break
            if not self.directory.fetch(match, request):
                match = None
                break
            self.step()
            self.store.wait_for_copies()
        if match is None:
            self.directory.stop_waiting(request)
            self.directory.count_miss()
            self.step()
            return ids()
        self.directory.load(match, request, len(prompt), ())
        self.step()
        restored = self.pool.restored.pop(request)
        self._continued = request, match.session.session_id
        assert (restored == prompt[: len(restored)]).all(), "another session's cache"
        return restored

    def _matches(self, owner: str, prompt: Tokens) -> Iterator[Match]:
        for match in self.directory.find(owner, prompt):
            if self.replicas.responds or not match.needs_file:
                yield match

    def close(self) -> None:
        self.replicas.close()
        self.store.close()
