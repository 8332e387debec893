"""A worker's side of sessions: holds the bytes and carries out orders."""

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.commands import (
    Event,
    Load,
    Save,
    SessionAcks,
    SessionCommands,
)
from vllm_kvplugins.sessions.files import SessionFileError, SessionFolder
from vllm_kvplugins.sessions.snapshot import COPY_ERRORS, CacheSnapshot

logger = logging.getLogger("vllm.kv_policy")

_REST_S = 0.02


class Caches(Protocol):
    """What a vault needs of the runtime."""

    def save(
        self,
        request_id: str,
        compaction: Compaction | None,
        tokens: int,
        blocks: tuple[int, ...],
        first_query: int,
    ) -> CacheSnapshot:
        """Copy a request's cache out of the pool."""

    def restore(
        self,
        request_id: str,
        prompt_tokens: int,
        saved: CacheSnapshot,
        tokens: int,
        blocks: tuple[int, ...],
        in_place: bool,
    ) -> None:
        """Let a request go on from a saved cache, or from what it was saved from.

        If that raises, the request is lost: what it computes is not looked at.
        """

    def discard(self, saved: CacheSnapshot) -> None:
        """Free what a saved cache has besides its pages."""

    def misfit(self, saved: CacheSnapshot) -> str | None:
        """Why a saved cache cannot be restored here, if so."""


class SessionStore:
    """Sessions of one worker.

    Args:
        files: where they are written; None = memory only.
        moves: a session goes to the request that continues it.
    """

    def __init__(
        self,
        caches: Caches,
        files: SessionFolder | None = None,
        rank: int = 0,
        moves: bool = False,
    ) -> None:
        self._caches = caches
        self._files = files
        self._rank = rank
        self._moves = moves
        self._held: dict[str, CacheSnapshot] = {}
        self._reports: list[SessionAcks] = []
        # separate, so that nobody who waits to read waits for writers
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvp-session-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kvp-session-read")
        self._writing: dict[str, Future[None]] = {}
        self._reading: dict[str, Future[CacheSnapshot]] = {}

    def take_in(self, orders: SessionCommands) -> None:
        """Save; call before the worker forgets who has ended, and before the step
        runs: the blocks may belong to others in this step already."""
        for save in orders.saves:
            self._save(save)

    def hand_out(self, orders: SessionCommands) -> None:
        """All other orders; call when the worker has forgotten, before the step."""
        for load in orders.loads:
            self._load(load)
        for session_id in orders.drop:
            dropped = self._held.pop(session_id, None)
            if dropped is not None:
                self._caches.discard(dropped)
            self._reading.pop(session_id, None)
        for session_id in orders.unlink:
            self._unlink(session_id)
        for session_id in orders.stage:
            self._stage(session_id)

    def rest(self) -> None:
        """Wait a moment for files that are being read; call when a step computes
        nothing, so that the engine does not spin until they are there."""
        wait(self._reading.values(), timeout=_REST_S, return_when=FIRST_COMPLETED)

    def take_reports(self) -> list[SessionAcks]:
        """What has come of orders since the last call."""
        self._collect()
        taken, self._reports = self._reports, []
        return taken

    def close(self) -> None:
        """Wait until all files are written."""
        self._writer.shutdown()
        self._reader.shutdown()

    @property
    def held_bytes(self) -> int:
        """Memory of this worker's sessions."""
        return sum(saved.num_bytes for saved in self._held.values())

    @property
    def num_held(self) -> int:
        """Sessions in memory."""
        return len(self._held)

    # -- orders -----------------------------------------------------------------

    def _save(self, save: Save) -> None:
        session = save.session
        try:
            saved = self._caches.save(
                save.request_id,
                session.compaction,
                len(session.tokens),
                save.blocks,
                session.first_query,
            )
        except COPY_ERRORS as error:
            self._say("saved", session.session_id, f"cannot be kept: {error}")
            return
        self._held[session.session_id] = saved
        self._say("saved", session.session_id)
        if self._files is not None:
            self._writing[session.session_id] = self._writer.submit(
                self._files.write, session, self._rank, saved
            )

    def _load(self, load: Load) -> None:
        if self._moves:
            saved = self._held.pop(load.session_id)
        else:
            saved = self._held[load.session_id]
        try:
            self._caches.restore(
                load.request_id,
                load.prompt_tokens,
                saved,
                load.tokens,
                load.blocks,
                load.in_place,
            )
        except COPY_ERRORS as error:
            # held until the scheduler says otherwise: others may go on from it in
            # steps that it has planned already
            self._say("loaded", load.session_id, f"cannot be loaded: {error}", load)

    def _stage(self, session_id: str) -> None:
        assert self._files is not None, "there are no files"
        self._reading[session_id] = self._reader.submit(
            self._files.read, session_id, self._rank
        )

    def _unlink(self, session_id: str) -> None:
        assert self._files is not None, "there are no files"
        # behind whatever is being written for it
        self._writing.pop(session_id, None)
        self._writer.submit(self._files.unlink, session_id, self._rank)

    # -- reports ----------------------------------------------------------------

    def _collect(self) -> None:
        for session_id in [i for i, f in self._writing.items() if f.done()]:
            error = self._writing.pop(session_id).exception()
            problem = None if error is None else f"cannot be written: {error}"
            self._say("written", session_id, problem)
        for session_id in [i for i, f in self._reading.items() if f.done()]:
            self._finish_reading(session_id, self._reading.pop(session_id))

    def _finish_reading(self, session_id: str, read: Future[CacheSnapshot]) -> None:
        try:
            saved = read.result()
        except (SessionFileError, MemoryError, RuntimeError, OSError) as error:
            self._say("staged", session_id, f"cannot be loaded: {error}")
            return
        problem = self._caches.misfit(saved)
        if problem is not None:
            self._say("staged", session_id, f"cannot be loaded: {problem}")
            return
        self._held[session_id] = saved
        self._say("staged", session_id)

    def _say(
        self,
        event: Event,
        session_id: str,
        problem: str | None = None,
        load: Load | None = None,
    ) -> None:
        if problem is not None:
            logger.warning("session %s %s", session_id, problem)
        self._reports.append(SessionAcks(event, session_id, problem, load))
