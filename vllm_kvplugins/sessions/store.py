"""A worker's side of sessions: holds the bytes and executes commands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from vllm_kvplugins.errors import coded
from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.commands import (
    Event,
    Load,
    Place,
    Save,
    SessionAck,
    SessionCommands,
)
from vllm_kvplugins.sessions.deltas import Lineage
from vllm_kvplugins.sessions.file_thread import FileThread
from vllm_kvplugins.sessions.files import SessionFiles, WrittenFile
from vllm_kvplugins.sessions.page_tokens import PageFormat
from vllm_kvplugins.sessions.reduced import ReducedSnapshot, expanded, reduced
from vllm_kvplugins.sessions.snapshot import COPY_ERRORS, CacheSnapshot
from vllm_kvplugins.sessions.tensor_file import SessionFileError

logger = logging.getLogger("vllm.kv_policy")

_COPY_WAIT_S = 0.02
_CLOSE_WAIT_S = 30.0
# A thread copies larger caches. Smaller ones take less time than the step that would
# have to follow to learn of the copy.
_COPIED_AT_ONCE_BYTES = 1 << 20


class PendingCopy(Protocol):
    """A cache that is still to be copied out of the pool; see ``PendingSave``.

    Attributes:
        saved: everything but its pages.
    """

    saved: CacheSnapshot

    @property
    def num_bytes(self) -> int:
        """Memory of the pages, as they will be stored."""

    def finish(self) -> CacheSnapshot:
        """Copy the pages, in any thread."""


class Placement(Protocol):
    """A session that is still to be copied to blocks; see ``PendingPlacement``."""

    def finish(self) -> tuple[torch.Tensor, ...]:
        """Copy the pages, in any thread; page IDs of each heap's retained region."""


class CacheTransfer(Protocol):
    """Copies caches out of the pool and into it; see ``transfer.Transfer``."""

    def save(
        self,
        request_id: str,
        compaction: Compaction | None,
        tokens: int,
        blocks: tuple[int, ...],
        first_query: int,
    ) -> PendingCopy:
        """Prepare to copy a request's cache out of the pool."""

    def place(
        self, saved: CacheSnapshot, tokens: int, blocks: tuple[int, ...]
    ) -> Placement:
        """Prepare to copy a session to blocks that nobody uses."""

    def restore(
        self,
        request_id: str,
        prompt_tokens: int,
        saved: CacheSnapshot,
        tokens: int,
        blocks: tuple[int, ...],
        in_place: bool,
        prefix: tuple[int, ...],
        rewound: Compaction | None,
        moves: bool,
    ) -> None:
        """Let a request continue from a snapshot.

        If this raises, the request's KV is invalid until it is recomputed.
        """

    def discard(self, saved: CacheSnapshot) -> None:
        """Free the states of step extensions that a snapshot holds."""

    def mismatch(self, saved: CacheSnapshot) -> str | None:
        """Why a snapshot does not fit this worker; None: it fits."""

    def page_formats(self) -> tuple[PageFormat, ...]:
        """The order of elements in stored pages of each heap."""


@dataclass(slots=True)
class _Saving:
    """A session that a thread copies out of the pool.

    Attributes:
        keeps, writes: whether it is kept in memory, and written to a file, when it is
            copied.
    """

    save: Save
    pending: PendingCopy
    copy: Future[CacheSnapshot]
    writes: bool
    keeps: bool = True


@dataclass(frozen=True, slots=True)
class _Placing:
    """A session that a thread copies to blocks."""

    place: Place
    saved: CacheSnapshot
    copy: Future[tuple[torch.Tensor, ...]]


class SessionStore:
    """The sessions of one worker.

    Args:
        files: session files; None: memory only.
        num_readers, num_writers: how many files are read and written at once.
        copied_at_once_bytes: a thread copies larger caches out of the pool, while the
            model computes. Their blocks must not be reused before "saved" is
            acknowledged.
    """

    def __init__(
        self,
        transfer: CacheTransfer,
        files: SessionFiles | None = None,
        rank: int = 0,
        num_readers: int = 1,
        num_writers: int = 1,
        copied_at_once_bytes: int = _COPIED_AT_ONCE_BYTES,
    ) -> None:
        self._transfer = transfer
        self._copied_at_once_bytes = copied_at_once_bytes
        self._files = files
        self._rank = rank
        self._snapshots: dict[str, CacheSnapshot | ReducedSnapshot] = {}
        self._acks: list[SessionAck] = []
        self._saver = FileThread("kvp-session-save")
        self._saving: dict[str, _Saving] = {}
        self._placing: dict[str, _Placing] = {}
        # Separate threads, so that reads do not wait for writes.
        self._writer = FileThread("kvp-session-write", num_writers)
        self._reader = FileThread("kvp-session-read", num_readers)
        self._writes: dict[str, Future[WrittenFile]] = {}
        self._reads: dict[str, Future[CacheSnapshot]] = {}
        # Copies within memory do not wait for files.
        self._reducer = FileThread("kvp-session-reduce")
        self._reductions: dict[str, Future[ReducedSnapshot | None]] = {}
        self._throttle = LogThrottle()

    def save(self, commands: SessionCommands) -> None:
        """Execute the saves, after making room for them in memory and on disk.

        Call before the worker forgets ended requests, and before the step runs: its
        requests may already own the blocks.
        """
        for session_id in commands.unlink:
            self._unlink(session_id, commands.file_ranks.get(session_id))
        loaded = {load.session_id for load in commands.loads}
        for session_id in commands.drop:
            if session_id not in loaded:
                self._drop(session_id)
        for save in commands.saves:
            self._save(save)

    def execute(self, commands: SessionCommands) -> None:
        """Execute all other commands.

        Call after the worker has forgotten ended requests, before the step runs.
        """
        for load in commands.loads:
            self._load(load)
        for place in commands.places:
            self._place(place)
        for session_id in commands.drop:
            self._drop(session_id)  # also sessions of this step
        for session_id in commands.stage:
            self._stage(session_id, commands.file_ranks.get(session_id))

    def wait_for_copies(self) -> None:
        """Wait up to 20 ms for a session that is being read or copied.

        Call when a step computes nothing, so that the engine does not busy-wait.
        """
        under_way: list[Future[Any]] = [s.copy for s in self._saving.values()]
        under_way += [placing.copy for placing in self._placing.values()]
        under_way += [*self._reads.values(), *self._reductions.values()]
        wait(under_way, timeout=_COPY_WAIT_S, return_when=FIRST_COMPLETED)

    def wait_for_writes(self) -> None:
        """Wait until all files are written or have failed."""
        wait([saving.copy for saving in self._saving.values()])
        self._collect()
        wait(list(self._writes.values()))

    def take_acks(self) -> list[SessionAck]:
        """Acknowledgements since the last call."""
        self._collect()
        taken, self._acks = self._acks, []
        return taken

    def close(self) -> None:
        """Wait up to 30 s until all sessions are copied, and as long for their files.

        The store cannot be used afterwards.
        """
        self._saver.close(_CLOSE_WAIT_S)
        self._collect()
        self._reader.close(timeout_s=0)
        self._reducer.close(timeout_s=0)
        if not self._writer.close(_CLOSE_WAIT_S):
            unwritten = sum(not write.done() for write in self._writes.values())
            problem = f"{unwritten} sessions were not written in {_CLOSE_WAIT_S:.0f} s"
            logger.warning("%s", coded("KVP306", problem))

    @property
    def held_bytes(self) -> int:
        """Memory of this worker's sessions."""
        saving = sum(each.pending.num_bytes for each in self._saving.values())
        return sum(saved.num_bytes for saved in self._snapshots.values()) + saving

    @property
    def num_held(self) -> int:
        """Number of sessions in memory."""
        return len(self._snapshots)

    # -- commands ---------------------------------------------------------------

    def _save(self, save: Save) -> None:
        session = save.session
        try:
            pending = self._transfer.save(
                save.request_id,
                session.compaction,
                len(session.tokens),
                save.blocks,
                session.first_query,
            )
        except COPY_ERRORS as error:
            self._fail_save(save, error)
            return
        if pending.num_bytes <= self._copied_at_once_bytes:
            saved = self._copied(save, pending, pending.finish)
            if saved is not None:
                self._finish_save(save, saved, save.writes)
            return
        copy = self._saver.submit(pending.finish)
        self._saving[session.session_id] = _Saving(save, pending, copy, save.writes)

    def _copied(
        self, save: Save, pending: PendingCopy, copy: Callable[[], CacheSnapshot]
    ) -> CacheSnapshot | None:
        """The result of a copy; None if it failed, which is acknowledged."""
        try:
            return copy()
        except COPY_ERRORS as error:
            self._transfer.discard(pending.saved)
            self._fail_save(save, error)
            return None

    def _fail_save(self, save: Save, error: Exception) -> None:
        problem = coded("KVP305", f"cannot be saved: {error}")
        self._ack("saved", save.session.session_id, problem)
        self._skip_rest_of_save(save)

    def _skip_rest_of_save(self, save: Save) -> None:
        """Acknowledge what would have followed the copy."""
        if save.writes:
            self._ack("written", save.session.session_id)  # nothing is being written
        if save.reduces is not None:
            self._ack("reduced", save.reduces)

    def _finish_saving(self, saving: _Saving) -> None:
        """A thread has copied a session, or has failed."""
        saved = self._copied(saving.save, saving.pending, saving.copy.result)
        if saved is None:
            return
        if saving.keeps:
            self._finish_save(saving.save, saved, saving.writes)
            return
        self._transfer.discard(saved)
        self._ack("saved", saving.save.session.session_id)
        self._skip_rest_of_save(saving.save)

    def _finish_save(self, save: Save, saved: CacheSnapshot, writes: bool) -> None:
        """Keep a session that is copied, and begin to write its file."""
        session = save.session
        self._snapshots[session.session_id] = saved
        self._ack("saved", session.session_id)
        lineage, saved.lineage = saved.lineage, None
        if save.reduces is not None:
            self._reduce(save.reduces, session.session_id, saved, lineage)
        if not writes:
            if save.writes:
                self._ack("written", session.session_id)  # another rank has failed
            return
        assert self._files is not None, "there are no files"
        continued = lineage.file.origins if lineage else None
        if continued is None or continued.session_id != save.continues:
            lineage = None
        write = partial(self._files.write, session, self._rank, saved)
        self._writes[session.session_id] = self._writer.submit(
            partial(write, self._transfer.page_formats(), lineage)
        )

    def _reduce(
        self,
        session_id: str,
        base_id: str,
        base: CacheSnapshot,
        lineage: Lineage | None,
    ) -> None:
        """Keep only those tokens of a session that the next turn does not have.

        Args:
            base: the next turn.
            lineage: what it has continued.
        """
        saved = self._snapshots.get(session_id)
        if (
            not isinstance(saved, CacheSnapshot)
            or lineage is None
            or lineage.file is not saved.file
            or saved.extension_states
        ):
            self._ack("reduced", session_id)
            return
        formats = self._transfer.page_formats()
        self._reductions[session_id] = self._reducer.submit(
            partial(reduced, saved, base_id, base, lineage, formats)
        )

    def _load(self, load: Load) -> None:
        saved = self._snapshots[load.session_id]
        assert isinstance(saved, CacheSnapshot), "it is not whole"
        if load.moves:
            del self._snapshots[load.session_id]
        try:
            self._transfer.restore(
                load.request_id,
                load.prompt_tokens,
                saved,
                load.tokens,
                load.blocks,
                load.in_place,
                load.prefix,
                load.rewound,
                load.moves,
            )
        except COPY_ERRORS as error:
            # Keep the snapshot until the scheduler drops it: steps that are already
            # scheduled may load it again.
            problem = coded("KVP307", f"cannot be loaded: {error}")
            self._ack("loaded", load.session_id, problem, load)

    def _place(self, place: Place) -> None:
        saved = self._snapshots.get(place.session_id)
        if not isinstance(saved, CacheSnapshot):
            self._ack("placed", place.session_id, "it is not in memory any more")
            return
        pending = self._transfer.place(saved, place.tokens, place.blocks)
        copy = self._saver.submit(pending.finish)
        self._placing[place.session_id] = _Placing(place, saved, copy)

    def _finish_placing(self, placing: _Placing) -> None:
        saved, place = placing.saved, placing.place
        try:
            retained = placing.copy.result()
        except COPY_ERRORS as error:
            problem = coded("KVP307", f"cannot be copied to the device: {error}")
            self._ack("placed", place.session_id, problem)
            return
        saved.blocks = place.blocks
        saved.parts = tuple(
            replace(part, retained_ids=ids)
            for part, ids in zip(saved.parts, retained, strict=True)
        )
        self._ack("placed", place.session_id)

    def _drop(self, session_id: str) -> None:
        saving = self._saving.get(session_id)
        if saving is not None:
            saving.keeps = False  # the copy still reads the pool
        dropped = self._snapshots.pop(session_id, None)
        if isinstance(dropped, CacheSnapshot):
            self._transfer.discard(dropped)
        read = self._reads.pop(session_id, None)
        if read is not None and not self._reader.cancel(read):
            self._reducer.cancel(read)
        reduction = self._reductions.pop(session_id, None)
        if reduction is not None:
            self._reducer.cancel(reduction)

    def _stage(self, session_id: str, ranks: int | None) -> None:
        formats = self._transfer.page_formats()
        held = self._snapshots.get(session_id)
        if isinstance(held, CacheSnapshot):
            self._ack("staged", session_id)  # only other ranks have reduced it
            return
        if held is not None:
            bases = list(self._bases(held))
            self._reads[session_id] = self._reducer.submit(
                partial(expanded, held, bases, formats)
            )
            return
        assert self._files is not None, "there are no files"
        self._reads[session_id] = self._reader.submit(
            partial(self._files.read, session_id, self._rank, ranks, formats)
        )

    def _bases(
        self, small: ReducedSnapshot
    ) -> Iterator[ReducedSnapshot | CacheSnapshot]:
        """What a reduced snapshot needs; the last one is whole."""
        base = self._snapshots[small.base]
        yield base
        while isinstance(base, ReducedSnapshot):
            base = self._snapshots[base.base]
            yield base

    def _unlink(self, session_id: str, ranks: int | None) -> None:
        assert self._files is not None, "there are no files"
        if session_id in self._saving:
            self._saving[session_id].writes = False
        write = self._writes.get(session_id)
        if write is not None and (self._writer.cancel(write) or write.cancelled()):
            write = None  # wait() never returns for it
        self._writer.submit(partial(self._unlink_after, write, session_id, ranks))

    def _unlink_after(
        self, write: Future[WrittenFile] | None, session_id: str, ranks: int | None
    ) -> None:
        """Delete files, in a thread; if one is being written, afterwards."""
        assert self._files is not None, "there are no files"
        if write is not None:
            wait([write])
        self._files.unlink(session_id, self._rank, ranks)

    # -- acknowledgements -------------------------------------------------------

    def _collect(self) -> None:
        for session_id in [i for i, s in self._saving.items() if s.copy.done()]:
            self._finish_saving(self._saving.pop(session_id))
        for session_id in [i for i, p in self._placing.items() if p.copy.done()]:
            self._finish_placing(self._placing.pop(session_id))
        for session_id in [i for i, f in self._writes.items() if f.done()]:
            self._finish_write(session_id, self._writes.pop(session_id))
        for session_id in [i for i, f in self._reads.items() if f.done()]:
            self._finish_read(session_id, self._reads.pop(session_id))
        for session_id in [i for i, f in self._reductions.items() if f.done()]:
            self._finish_reduction(session_id, self._reductions.pop(session_id))

    def _finish_reduction(
        self, session_id: str, reduction: Future[ReducedSnapshot | None]
    ) -> None:
        saved = self._snapshots[session_id]
        try:
            small = reduction.result()
        except COPY_ERRORS as error:
            small = None  # it stays whole
            problem = coded("KVP305", f"cannot be reduced: {error}")
            self._warn(session_id, problem)
        freed = 0
        if small is not None:
            freed = saved.num_bytes - small.num_bytes
            self._snapshots[session_id] = small
        self._acks.append(SessionAck("reduced", session_id, num_bytes=freed))

    def _finish_write(self, session_id: str, write: Future[WrittenFile]) -> None:
        if write.cancelled():
            self._ack("written", session_id)
            return
        error = write.exception()
        if error is not None:
            problem = coded("KVP306", f"cannot be written: {error}")
            self._ack("written", session_id, problem)
            return
        file = write.result()
        self._acks.append(
            SessionAck(
                "written", session_id, num_bytes=file.num_bytes, sources=file.sources
            )
        )

    def _finish_read(self, session_id: str, read: Future[CacheSnapshot]) -> None:
        try:
            saved = read.result()
        except (SessionFileError, MemoryError, RuntimeError, OSError) as error:
            problem: str | None = str(error)
        else:
            problem = self._transfer.mismatch(saved)
        if problem is not None:
            problem = coded("KVP307", f"cannot be loaded: {problem}")
            self._ack("staged", session_id, problem)
            return
        self._snapshots[session_id] = saved
        self._ack("staged", session_id)

    def _ack(
        self,
        event: Event,
        session_id: str,
        problem: str | None = None,
        load: Load | None = None,
    ) -> None:
        if problem is not None:
            self._warn(session_id, problem)
        self._acks.append(SessionAck(event, session_id, problem, load))

    def _warn(self, session_id: str, problem: str) -> None:
        text = self._throttle.format(problem)
        if text is not None:
            logger.warning("session %s: %s", session_id, text)
