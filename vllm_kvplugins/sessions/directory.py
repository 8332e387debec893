"""The scheduler's side of sessions: which there are, where, and which must go."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from vllm_kvplugins.sessions.commands import (
    Load,
    Save,
    Session,
    SessionAcks,
    SessionCommands,
    Tokens,
)
from vllm_kvplugins.sessions.index import SessionIndex

logger = logging.getLogger("vllm.kv_policy")

Progress = Literal["no", "under way", "done"]


@dataclass(slots=True)
class _Kept:
    """Where a session is.

    Attributes:
        memory, disk: whether it is there; "under way" until all ranks said so.
        waiting: reports that are still to come, per event.
        last_used: seconds, on the keeper's clock.
    """

    memory: Progress
    disk: Progress
    last_used: float
    waiting: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A session that a prompt can continue.

    Attributes:
        tokens: how many of its tokens to restore.
        shared: how many it has in common with the prompt.
        ready: whether it is in memory; else it will be, or be gone.
    """

    session: Session
    tokens: int
    shared: int
    ready: bool


@dataclass(slots=True)
class Counts:
    """What has happened since the start."""

    hits: int = 0
    parked_hits: int = 0
    misses: int = 0
    restored_tokens: int = 0
    recomputed_tokens: int = 0
    evictions: int = 0
    refused: int = 0
    failures: int = 0


class SessionDirectory:
    """All sessions of an engine.

    Args:
        memory_bytes: most host memory, all ranks together.
        ranks: workers that hold a part of every session.
        least_tokens: see ``SessionIndex``.
        writes: whether workers write every session to its file.
        disk_bytes: most bytes in files; None = no limit.
        max_age_s: seconds after which an unused session goes; None = never.
        moves: a session goes to the request that continues it, instead of a copy.
        on_gone: called with the id of every session that is no longer here.
        on_leave: the same, also of those that only leave memory.
        clock: seconds since the epoch, comparable to the times of files.
    """

    def __init__(
        self,
        memory_bytes: int,
        ranks: int = 1,
        least_tokens: int = 1,
        writes: bool = False,
        disk_bytes: int | None = None,
        max_age_s: float | None = None,
        moves: bool = False,
        on_gone: Callable[[str], None] = lambda session_id: None,
        on_leave: Callable[[str], None] = lambda session_id: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.counts = Counts()
        self._ranks = ranks
        self._writes = writes
        self._disk_bytes = disk_bytes
        self._max_age_s = max_age_s
        self._moves = moves
        self._on_gone, self._on_leave = on_gone, on_leave
        self._clock = clock
        self._index = SessionIndex(least_tokens)
        self._kept: dict[str, _Kept] = {}  # least recently used first
        # bytes of all sessions in memory, those under way included; in files
        self.held_bytes = 0
        self.written_bytes = 0
        self._orders = SessionCommands()
        self._said_too_large = False
        # request that waits -> session that it waits for
        self._wanted: dict[str, str] = {}

    # -- a prompt comes -------------------------------------------------------

    def match(
        self, owner: str, prompt: Tokens, usable: Callable[[Session, int], int]
    ) -> Match | None:
        """The session that saves a prompt most; changes nothing.

        Args:
            prompt: int32 token ids.
            usable: how many of the shared tokens can be restored; 0 = none.
        """
        best: Match | None = None
        for shared, session in self._index.find(owner, prompt):
            if best is not None and best.tokens >= shared:
                break
            if session.num_bytes > self.memory_bytes:
                continue  # a file from days of more memory
            tokens = usable(session, shared)
            if tokens > (best.tokens if best else 0) and not self._too_old(session):
                ready = self._kept[session.session_id].memory == "done"
                best = Match(session, tokens, shared, ready)
        return best

    def fetch(self, match: Match, request_id: str) -> None:
        """See to it that a session that is not ready will be, or be gone. It stays
        until the request starts or gives up; else two that wait could take turns in
        driving each other's session out."""
        session_id = match.session.session_id
        kept = self._kept[session_id]
        self._wanted[request_id] = session_id
        if kept.memory != "no" or kept.disk != "done":
            return
        self._touch(session_id)
        if self._make_room(match.session.num_bytes):
            self._place(session_id, memory="under way")
            kept.waiting["staged"] = self._ranks
            self._orders.stage.append(session_id)

    def load(
        self,
        match: Match,
        request_id: str,
        prompt_tokens: int,
        blocks: Iterable[int],
        in_place: bool = False,
    ) -> None:
        """A request starts from a session.

        Args:
            blocks, in_place: see ``Load``.
        """
        session_id = match.session.session_id
        self.give_up(request_id)
        assert self._kept[session_id].memory == "done", "not in memory"
        args = (session_id, request_id, prompt_tokens, match.tokens, tuple(blocks))
        self._orders.loads.append(Load(*args, in_place))
        self.counts.hits += 1
        self.counts.parked_hits += in_place
        self.counts.restored_tokens += match.tokens
        self.counts.recomputed_tokens += match.shared - match.tokens
        if self._moves:
            self._forget(session_id)
        else:
            self._touch(session_id)

    def give_up(self, request_id: str) -> None:
        """A request waits for its session no longer."""
        self._wanted.pop(request_id, None)

    def missed(self) -> None:
        """A request starts from nothing."""
        self.counts.misses += 1

    # -- a request ends ---------------------------------------------------------

    def save(self, session: Session, request_id: str, blocks: Iterable[int]) -> bool:
        """Keep what a request has computed.

        Args:
            blocks: physical ids, from ``session.first_block`` on.

        Returns:
            Whether it will be; False if there is no memory for it.
        """
        self.expire()
        for shared, other in self._index.find(session.owner, session.tokens):
            if shared == len(session.tokens) == len(other.tokens):
                self._remove(other.session_id)  # the same conversation again
                break
        if not self._make_room(session.num_bytes):
            self._refuse(session)
            return False
        self._index.add(session)
        kept = _Kept("no", "no", self._clock(), {"saved": self._ranks})
        self._kept[session.session_id] = kept
        self._place(session.session_id, memory="under way")
        if self._writes:
            self._place(session.session_id, disk="under way")
            kept.waiting["written"] = self._ranks
        self._orders.saves.append(Save(session, request_id, tuple(blocks)))
        return True

    def _refuse(self, session: Session) -> None:
        self.counts.refused += 1
        if session.num_bytes > self.memory_bytes and not self._said_too_large:
            self._said_too_large = True
            logger.warning(
                "a session of %d tokens takes %d KiB, more than all of session_memory "
                "(%d KiB): it is not kept, nor are others as large, and their next "
                "requests compute everything anew; raise session_memory",
                len(session.tokens),
                -(-session.num_bytes >> 10),
                self.memory_bytes >> 10,
            )

    def found(self, session: Session, last_used: float) -> None:
        """A session lies in its file since before the start.

        Call with the least recently used first.
        """
        self._index.add(session)
        self._kept[session.session_id] = _Kept("no", "no", last_used)
        self._place(session.session_id, disk="done")

    # -- orders and reports -------------------------------------------------------

    def take_orders(self) -> SessionCommands:
        """Orders since the last call."""
        taken, self._orders = self._orders, SessionCommands()
        return taken

    def hear(self, reports: Iterable[SessionAcks]) -> None:
        """What workers report; a session that failed on one rank is gone."""
        reports = list(reports)
        lost = {r.session_id for r in reports if r.event == "loaded" and self._moves}
        self.counts.failures += len(lost)  # not here since they were to be loaded
        for report in reports:
            kept = self._kept.get(report.session_id)
            if kept is None:
                continue  # dropped in the meantime
            if report.problem is not None:
                self._failed(report, kept)
                continue
            kept.waiting[report.event] -= 1
            if kept.waiting[report.event]:
                continue
            if report.event == "written":
                self._place(report.session_id, disk="done")
                self._clear_disk()
            else:
                self._place(report.session_id, memory="done")

    def _failed(self, report: SessionAcks, kept: _Kept) -> None:
        self.counts.failures += 1
        if report.event == "written" and kept.memory != "no":
            self._place(report.session_id, disk="no")
            self._orders.unlink.append(report.session_id)  # other ranks' parts
        else:
            self._remove(report.session_id)

    # -- limits ---------------------------------------------------------------

    def _touch(self, session_id: str) -> None:
        kept = self._kept.pop(session_id)
        kept.last_used = self._clock()
        self._kept[session_id] = kept

    def _too_old(self, session: Session) -> bool:
        if self._max_age_s is None:
            return False
        used = self._kept[session.session_id].last_used
        return self._clock() - used > self._max_age_s

    def expire(self) -> None:
        """Drop what has not been used for too long."""
        for session in [s for s in self._index if self._too_old(s)]:
            self.counts.evictions += 1
            self._remove(session.session_id)

    def drop_oldest(self) -> bool:
        """Drop the session that was least recently used, if any can be dropped."""
        wanted = set(self._wanted.values())
        for session_id, kept in self._kept.items():
            if kept.memory == "done" and session_id not in wanted:
                self.counts.evictions += 1
                self._remove(session_id)
                return True
        return False

    def clear(self) -> None:
        """Drop all sessions, files and all: their keys and values hold no longer."""
        for session_id in list(self._kept):
            self._remove(session_id)

    def _make_room(self, num_bytes: int) -> bool:
        """Least recently used sessions leave memory until so many bytes are free.

        Returns:
            Whether they are; what is under way or waited for cannot leave.
        """
        if num_bytes > self.memory_bytes:
            return False
        wanted = set(self._wanted.values())
        for session_id, kept in list(self._kept.items()):
            if self.held_bytes + num_bytes <= self.memory_bytes:
                break
            if kept.memory != "done" or session_id in wanted:
                continue
            self.counts.evictions += 1
            if kept.disk == "no":
                self._remove(session_id)
            else:
                self._place(session_id, memory="no")
                self._orders.drop.append(session_id)
        return self.held_bytes + num_bytes <= self.memory_bytes

    def _clear_disk(self) -> None:
        """Least recently used files go until the others fit."""
        if self._disk_bytes is None:
            return
        for session_id, kept in list(self._kept.items()):
            if self.written_bytes <= self._disk_bytes:
                return
            if kept.disk != "done" or kept.memory == "under way":
                continue
            if kept.memory == "no":
                self.counts.evictions += 1
                self._remove(session_id)
            else:
                self._place(session_id, disk="no")
                self._orders.unlink.append(session_id)

    def _place(
        self,
        session_id: str,
        memory: Progress | None = None,
        disk: Progress | None = None,
    ) -> None:
        """Note where a session is now, and count its bytes there."""
        kept, size = self._kept[session_id], self._index.get(session_id).num_bytes
        if memory is not None:
            self.held_bytes += size * ((memory != "no") - (kept.memory != "no"))
            kept.memory = memory
            if memory == "no":
                self._on_leave(session_id)
        if disk is not None:
            self.written_bytes += size * ((disk == "done") - (kept.disk == "done"))
            kept.disk = disk

    def _forget(self, session_id: str) -> None:
        self._place(session_id, memory="no", disk="no")
        self._index.remove(session_id)
        del self._kept[session_id]
        self._on_gone(session_id)

    def _remove(self, session_id: str) -> None:
        if session_id in self._orders.stage:
            self._orders.stage.remove(session_id)
        self._orders.drop.append(session_id)
        if self._kept[session_id].disk != "no":
            self._orders.unlink.append(session_id)
        self._forget(session_id)

    # -- numbers --------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        """Sessions that can be continued, now or when they have been read."""
        return len(self._kept)

    def check_integrity(self) -> None:
        """Every session is filed once and somewhere, and memory suffices."""
        filed = {session.session_id for session in self._index}
        assert filed == set(self._kept), "filed and kept sessions differ"
        sizes = {s.session_id: s.num_bytes for s in self._index}
        held = [sizes[i] for i, k in self._kept.items() if k.memory != "no"]
        written = [sizes[i] for i, k in self._kept.items() if k.disk == "done"]
        assert self.held_bytes == sum(held) <= self.memory_bytes, "memory miscounted"
        assert self.written_bytes == sum(written), "files miscounted"
        lost = [i for i, k in self._kept.items() if k.memory == k.disk == "no"]
        assert not lost, f"sessions that are nowhere: {lost}"
