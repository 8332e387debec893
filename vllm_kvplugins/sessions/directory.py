"""The scheduler's side of sessions: which exist, where they are, which to drop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from vllm_kvplugins.errors import coded
from vllm_kvplugins.sessions.commands import (
    Load,
    Save,
    Session,
    SessionAck,
    SessionCommands,
    Tokens,
)
from vllm_kvplugins.sessions.index import SessionIndex

logger = logging.getLogger("vllm.kv_policy")

Presence = Literal["absent", "pending", "present"]


@dataclass(slots=True)
class _Entry:
    """Where one session is.

    Attributes:
        memory, disk: "pending" until all ranks have acknowledged.
        last_used: seconds, on the directory's clock.
        acks_due: number of missing acknowledgements, per event.
    """

    memory: Presence
    disk: Presence
    last_used: float
    acks_due: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A session that a prompt can continue.

    Attributes:
        tokens: number of tokens to restore.
        shared: number of first tokens that session and prompt share.
        ready: whether it is in memory; if not, ``fetch`` reads it.
    """

    session: Session
    tokens: int
    shared: int
    ready: bool


@dataclass(slots=True)
class Counts:
    """Events since the start.

    Attributes:
        hits: requests that continued a session.
        device_hits: hits whose pages were still on the device.
        misses: requests that started without a session.
        restored_tokens: prompt tokens restored from sessions.
        recomputed_tokens: prompt tokens that a session shares but does not restore.
        evictions: sessions removed from memory or disk to make room, or by age.
        refused: sessions that were not saved because memory was full.
        failures: sessions lost to an error.
    """

    hits: int = 0
    device_hits: int = 0
    misses: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    refused: int = 0
    failures: int = 0


class SessionDirectory:
    """All sessions of an engine.

    Args:
        memory_bytes: host memory for sessions, over all ranks.
        ranks: number of workers; each has a part of every session.
        min_tokens: see ``SessionIndex``.
        writes: whether workers write every session to a file.
        disk_bytes: limit on files; None: no limit.
        max_age_s: seconds after which an unused session expires; None: never.
        moves: whether a session moves into the request that continues it. Otherwise it
            is copied and stays in the directory.
        on_forgotten: called with the ID of each session that leaves the directory.
        on_memory_freed: called with the ID of each session that leaves memory, even if
            its file stays.
        clock: seconds since the epoch, comparable to file times.

    Attributes:
        held_bytes: bytes of sessions in memory, with pending ones.
        written_bytes: bytes of sessions in files.
    """

    def __init__(
        self,
        memory_bytes: int,
        ranks: int = 1,
        min_tokens: int = 1,
        writes: bool = False,
        disk_bytes: int | None = None,
        max_age_s: float | None = None,
        moves: bool = False,
        on_forgotten: Callable[[str], None] = lambda session_id: None,
        on_memory_freed: Callable[[str], None] = lambda session_id: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.counts = Counts()
        self.held_bytes = 0
        self.written_bytes = 0
        self._ranks = ranks
        self._writes = writes
        self._disk_bytes = disk_bytes
        self._max_age_s = max_age_s
        self._moves = moves
        self._on_forgotten = on_forgotten
        self._on_memory_freed = on_memory_freed
        self._clock = clock
        self._index = SessionIndex(min_tokens)
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._commands = SessionCommands()
        self._warned_too_large = False
        # waiting request -> session that it waits for
        self._waiting: dict[str, str] = {}

    # -- a request starts -----------------------------------------------------

    def find(self, owner: str, prompt: Tokens) -> Iterator[Match]:
        """Sessions that a prompt can continue. Changes nothing.

        Args:
            prompt: int32 [n], token IDs.

        Yields:
            Matches that restore all shared tokens; the longest first, then the newest.
            The caller reduces ``tokens`` if it can use fewer.
        """
        for shared, session in self._index.find(owner, prompt):
            if session.num_bytes > self.memory_bytes:
                continue  # its file was written when memory_bytes was larger
            if not self._is_expired(session):
                ready = self._entries[session.session_id].memory == "present"
                yield Match(session, shared, shared, ready)

    def fetch(self, match: Match, request_id: str) -> None:
        """Read a session into memory, and keep it there for a request.

        It stays until the request starts or stops waiting. Otherwise two waiting
        requests could evict each other's session again and again.
        """
        session_id = match.session.session_id
        entry = self._entries[session_id]
        self._waiting[request_id] = session_id
        if entry.memory != "absent" or entry.disk != "present":
            return
        self._touch(session_id)
        if self._make_room(match.session.num_bytes):
            self._set_presence(session_id, memory="pending")
            entry.acks_due["staged"] = self._ranks
            self._commands.stage.append(session_id)

    def load(
        self,
        match: Match,
        request_id: str,
        prompt_tokens: int,
        blocks: Iterable[int],
        in_place: bool = False,
    ) -> None:
        """Command the workers to load a session into the blocks of a request.

        Args:
            blocks, in_place: see ``Load``.
        """
        session_id = match.session.session_id
        self.stop_waiting(request_id)
        assert self._entries[session_id].memory == "present", "not in memory"
        args = (session_id, request_id, prompt_tokens, match.tokens, tuple(blocks))
        self._commands.loads.append(Load(*args, in_place))
        self.counts.hits += 1
        self.counts.device_hits += in_place
        self.counts.restored_tokens += match.tokens
        self.counts.recomputed_tokens += match.shared - match.tokens
        if self._moves:
            self._forget(session_id)
        else:
            self._touch(session_id)

    def stop_waiting(self, request_id: str) -> None:
        """Note that a request has started or ended and waits for no session."""
        self._waiting.pop(request_id, None)

    def count_miss(self) -> None:
        """Count a request that starts without a session."""
        self.counts.misses += 1

    # -- a request ends -------------------------------------------------------

    def save(self, session: Session, request_id: str, blocks: Iterable[int]) -> bool:
        """Command the workers to save the cache of a request.

        Replaces a session of the same owner with exactly the same tokens.

        Args:
            blocks: physical IDs, from ``session.first_block``.

        Returns:
            False if there is no memory for it.
        """
        self.expire()
        for shared, other in self._index.find(session.owner, session.tokens):
            if shared == len(session.tokens) == len(other.tokens):
                self._remove(other.session_id)
                break
        if not self._make_room(session.num_bytes):
            self._refuse(session)
            return False
        self._index.add(session)
        entry = _Entry("absent", "absent", self._clock(), {"saved": self._ranks})
        self._entries[session.session_id] = entry
        self._set_presence(session.session_id, memory="pending")
        if self._writes:
            self._set_presence(session.session_id, disk="pending")
            entry.acks_due["written"] = self._ranks
        self._commands.saves.append(Save(session, request_id, tuple(blocks)))
        return True

    def _refuse(self, session: Session) -> None:
        self.counts.refused += 1
        if session.num_bytes > self.memory_bytes and not self._warned_too_large:
            self._warned_too_large = True
            text = (
                f"a session of {len(session.tokens)} tokens takes "
                f"{-(-session.num_bytes >> 10)} KiB, more than all of session_memory "
                f"({self.memory_bytes >> 10} KiB). Sessions of this size are not kept, "
                "and the requests that continue them recompute everything; raise "
                "session_memory"
            )
            logger.warning("%s", coded("KVP308", text))

    def add_file(self, session: Session, last_used: float) -> None:
        """Add a session from a file of an earlier engine.

        Call in the order of last use, least recent first.
        """
        self._index.add(session)
        self._entries[session.session_id] = _Entry("absent", "absent", last_used)
        self._set_presence(session.session_id, disk="present")

    # -- commands and acknowledgements ------------------------------------------

    def take_commands(self) -> SessionCommands:
        """Commands since the last call."""
        taken, self._commands = self._commands, SessionCommands()
        return taken

    def process(self, acks: Iterable[SessionAck]) -> None:
        """Process acknowledgements. Removes sessions that failed on any rank."""
        acks = list(acks)
        # A session that moves has left the directory with its load command.
        lost = {a.session_id for a in acks if a.event == "loaded" and self._moves}
        self.counts.failures += len(lost)
        for ack in acks:
            entry = self._entries.get(ack.session_id)
            if entry is None:
                continue  # removed in the meantime
            if ack.problem is not None:
                self._process_failure(ack, entry)
                continue
            entry.acks_due[ack.event] -= 1
            if entry.acks_due[ack.event]:
                continue
            if ack.event == "written":
                self._set_presence(ack.session_id, disk="present")
                self._make_disk_room()
            else:
                self._set_presence(ack.session_id, memory="present")

    def _process_failure(self, ack: SessionAck, entry: _Entry) -> None:
        self.counts.failures += 1
        if ack.event == "written" and entry.memory != "absent":
            self._set_presence(ack.session_id, disk="absent")
            self._commands.unlink.append(ack.session_id)  # parts of other ranks
        else:
            self._remove(ack.session_id)

    # -- limits -----------------------------------------------------------------

    def _touch(self, session_id: str) -> None:
        entry = self._entries.pop(session_id)
        entry.last_used = self._clock()
        self._entries[session_id] = entry

    def _is_expired(self, session: Session) -> bool:
        if self._max_age_s is None:
            return False
        last_used = self._entries[session.session_id].last_used
        return self._clock() - last_used > self._max_age_s

    def expire(self) -> None:
        """Remove sessions that were not used for ``max_age_s``."""
        for session in [s for s in self._index if self._is_expired(s)]:
            self.counts.evictions += 1
            self._remove(session.session_id)

    def drop_oldest(self) -> bool:
        """Remove the least recently used session in memory that no request waits for.

        Returns:
            False if there is none.
        """
        awaited = set(self._waiting.values())
        for session_id, entry in self._entries.items():
            if entry.memory == "present" and session_id not in awaited:
                self.counts.evictions += 1
                self._remove(session_id)
                return True
        return False

    def clear(self) -> None:
        """Remove all sessions and their files."""
        for session_id in list(self._entries):
            self._remove(session_id)

    def _make_room(self, num_bytes: int) -> bool:
        """Evict least recently used sessions from memory until ``num_bytes`` are free.

        Pending and awaited sessions stay.

        Returns:
            Whether enough memory is free.
        """
        if num_bytes > self.memory_bytes:
            return False
        awaited = set(self._waiting.values())
        for session_id, entry in list(self._entries.items()):
            if self.held_bytes + num_bytes <= self.memory_bytes:
                break
            if entry.memory != "present" or session_id in awaited:
                continue
            self.counts.evictions += 1
            if entry.disk == "absent":
                self._remove(session_id)
            else:
                self._set_presence(session_id, memory="absent")
                self._commands.drop.append(session_id)
        return self.held_bytes + num_bytes <= self.memory_bytes

    def _make_disk_room(self) -> None:
        """Delete least recently used files until the others fit."""
        if self._disk_bytes is None:
            return
        for session_id, entry in list(self._entries.items()):
            if self.written_bytes <= self._disk_bytes:
                return
            if entry.disk != "present" or entry.memory == "pending":
                continue
            if entry.memory == "absent":
                self.counts.evictions += 1
                self._remove(session_id)
            else:
                self._set_presence(session_id, disk="absent")
                self._commands.unlink.append(session_id)

    def _set_presence(
        self,
        session_id: str,
        memory: Presence | None = None,
        disk: Presence | None = None,
    ) -> None:
        """Set where a session is, and update the byte counts."""
        entry, size = self._entries[session_id], self._index.get(session_id).num_bytes
        if memory is not None:
            was, now = entry.memory != "absent", memory != "absent"
            self.held_bytes += size * (now - was)
            entry.memory = memory
            if memory == "absent":
                self._on_memory_freed(session_id)
        if disk is not None:
            was, now = entry.disk == "present", disk == "present"
            self.written_bytes += size * (now - was)
            entry.disk = disk

    def _forget(self, session_id: str) -> None:
        self._set_presence(session_id, memory="absent", disk="absent")
        self._index.remove(session_id)
        del self._entries[session_id]
        self._on_forgotten(session_id)

    def _remove(self, session_id: str) -> None:
        """Forget a session, and delete it from memory and disk."""
        if session_id in self._commands.stage:
            self._commands.stage.remove(session_id)
        self._commands.drop.append(session_id)
        if self._entries[session_id].disk != "absent":
            self._commands.unlink.append(session_id)
        self._forget(session_id)

    # -- queries ----------------------------------------------------------------

    def __iter__(self) -> Iterator[Session]:
        """All sessions, in memory or in files."""
        return iter(self._index)

    @property
    def num_sessions(self) -> int:
        """Number of sessions that can be continued, at once or after a fetch."""
        return len(self._entries)

    @property
    def pending(self) -> set[str]:
        """IDs of sessions that are being copied or read into memory."""
        return {i for i, e in self._entries.items() if e.memory == "pending"}

    @property
    def in_memory(self) -> set[str]:
        """IDs of sessions that all ranks have in memory."""
        return {i for i, e in self._entries.items() if e.memory == "present"}

    @property
    def on_disk(self) -> set[str]:
        """IDs of sessions that all ranks have in files."""
        return {i for i, e in self._entries.items() if e.disk == "present"}

    def check_integrity(self) -> None:
        """Each session is in the index and in memory or a file; sizes are correct."""
        sizes = {session.session_id: session.num_bytes for session in self._index}
        assert set(sizes) == set(self._entries), "indexed and known sessions differ"
        held = [sizes[i] for i, e in self._entries.items() if e.memory != "absent"]
        written = [sizes[i] for i, e in self._entries.items() if e.disk == "present"]
        assert self.held_bytes == sum(held) <= self.memory_bytes, "memory miscounted"
        assert self.written_bytes == sum(written), "files miscounted"
        nowhere = [
            i for i, e in self._entries.items() if e.memory == e.disk == "absent"
        ]
        assert not nowhere, f"sessions that are nowhere: {nowhere}"
