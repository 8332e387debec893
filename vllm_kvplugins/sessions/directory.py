"""The scheduler's side of sessions: which exist, where they are, which to drop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from vllm_kvplugins.errors import coded
from vllm_kvplugins.sessions.commands import (
    Load,
    Place,
    Save,
    Session,
    SessionAck,
    SessionCommands,
    Tokens,
)
from vllm_kvplugins.sessions.entries import (
    Entry,
    MemoryPresence,
    Presence,
    Wait,
)
from vllm_kvplugins.sessions.eviction_order import EvictionOrder
from vllm_kvplugins.sessions.expiry import Expiry
from vllm_kvplugins.sessions.file_ledger import FileLedger
from vllm_kvplugins.sessions.files import FoundSession
from vllm_kvplugins.sessions.index import SessionIndex
from vllm_kvplugins.sessions.records import Counts, Match, SharedStore
from vllm_kvplugins.sessions.reductions import Reductions

logger = logging.getLogger("vllm.kv_policy")

# A request waits for a file for this long by default. Then it computes its whole
# prompt, because the disk may not respond.
MAX_WAIT_S = 10.0

# Estimate of what a file has besides pages, queries and tokens. Its size is known when
# it is written.
_HEADER_BYTES = 4096
# Last tokens of a session that its client may leave out of the next turn.
_TAIL_TOKENS = 8


class SessionDirectory:
    """All sessions of an engine.

    Args:
        memory_bytes: host memory for sessions, over all ranks.
        ranks: number of workers; each has a part of every session.
        min_tokens: see ``SessionIndex``.
        writes: whether workers write every session to a file.
        disk_bytes: limit on files; None: no limit.
        other_disk_bytes: size of files that are not sessions; they count.
        max_age_s: seconds after which an unused session expires; None: never.
        rewinds: whether a session can be continued before its last compaction.
        on_forgotten: called with the ID of each session that leaves the directory.
        on_memory_freed: called with the ID of each session that leaves memory, even if
            its file stays.
        on_save_withdrawn: called with the ID of each session whose command to save no
            worker gets.
        shared: None: nobody else uses the files.
        clock: seconds, monotonic: changes of the system's date have no effect.

    Attributes:
        held_bytes: bytes of sessions in memory, with pending ones and with removed
            ones whose files are being written.
        index_bytes: memory for sessions that are only in files.
    """

    def __init__(
        self,
        memory_bytes: int,
        ranks: int = 1,
        min_tokens: int = 1,
        writes: bool = False,
        disk_bytes: int | None = None,
        other_disk_bytes: int = 0,
        max_age_s: float | None = None,
        rewinds: bool = False,
        on_forgotten: Callable[[str], None] = lambda session_id: None,
        on_memory_freed: Callable[[str], None] = lambda session_id: None,
        on_save_withdrawn: Callable[[str], None] = lambda session_id: None,
        shared: SharedStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.counts = Counts()
        self.held_bytes = 0
        self.index_bytes = 0
        self._ranks = ranks
        self._writes = writes
        self._on_forgotten = on_forgotten
        self._on_memory_freed = on_memory_freed
        self._on_save_withdrawn = on_save_withdrawn
        self._shared = shared
        self._clock = clock
        self._index = SessionIndex(min_tokens, rewinds)
        self._entries: dict[str, Entry] = {}  # least recently used first
        # Sessions whose memory or disk is not "absent".
        self._held = EvictionOrder(self._is_retained)
        self._with_file = EvictionOrder(self._is_retained)
        self._expiry = Expiry(max_age_s, clock)
        self._files = FileLedger(disk_bytes, other_disk_bytes, self._command_unlink)
        # A session that goes back is rebuilt from its own pages.
        self._reduces = not rewinds
        self._reductions = Reductions()
        self._commands = SessionCommands()
        self._warned: set[str] = set()  # codes
        self._waiting: dict[str, Wait] = {}  # by request ID

    # -- a request starts -----------------------------------------------------

    def find(self, owner: str, prompt: Tokens) -> Iterator[Match]:
        """Sessions that a prompt can continue. Removes only expired ones.

        Args:
            prompt: int32 [n], token IDs.

        Yields:
            Matches that restore all shared tokens, in the order of
            ``SessionIndex.find``. The caller reduces ``tokens`` if it can use fewer.
        """
        self.expire()
        for shared, session in self._index.find(owner, prompt):
            memory = self._entries[session.session_id].memory
            needs_file = session.session_id not in self._reductions
            yield Match(
                session,
                shared,
                shared,
                ready=memory == "present",
                needs_file=memory != "present" and needs_file,
            )

    def fetch(self, match: Match, request_id: str) -> bool:
        """Make a session ready, and keep it for a request.

        It is read from its file, or made whole. It stays until the request starts or
        stops waiting. Otherwise two waiting requests could evict each other's session
        again and again.

        Returns:
            False if the request should start without a session: it has waited for
            ``MAX_WAIT_S``, or that of the shared store, or there is no memory for a
            reduced session as a whole.
        """
        session_id, now = match.session.session_id, self._clock()
        waiting = self._waiting.setdefault(request_id, Wait(session_id, now))
        max_wait_s = self._shared.max_wait_s if self._shared else MAX_WAIT_S
        if waiting.session_id is None or now - waiting.since > max_wait_s:
            if self._shared is not None and waiting.session_id is not None:
                self._shared.on_late()
            waiting.session_id = None
            return False
        waiting.session_id = session_id
        entry = self._entries[session_id]
        if entry.memory in ("pending", "present"):
            return True
        if entry.memory == "absent" and entry.disk != "present":
            return True
        self._touch(session_id)
        if self._make_room(match.session.num_bytes - entry.held_bytes):
            if entry.memory == "reduced":
                self._reductions.busy.add(session_id)
            else:
                self._note_file_ranks(match.session)
            self._set_presence(session_id, memory="pending")
            entry.acks_due["staged"] = self._ranks
            self._commands.stage.append(session_id)
            return True
        if entry.memory == "reduced":
            waiting.session_id = None
            return False
        return True

    def place(self, match: Match, request_id: str, blocks: Iterable[int]) -> None:
        """Command the workers to copy a session to blocks, and keep it for a request.

        Args:
            blocks: see ``Place``.
        """
        session_id = match.session.session_id
        assert self._entries[session_id].memory == "present", "not in memory"
        self._waiting[request_id] = Wait(session_id, self._clock())
        self._touch(session_id)
        place = Place(session_id, match.tokens, tuple(blocks))
        self._commands.places.append(place)

    def load(
        self,
        match: Match,
        request_id: str,
        prompt_tokens: int,
        blocks: Iterable[int],
        in_place: bool = False,
        prefix: Iterable[int] = (),
        moves: bool = False,
        cuts_off: bool = False,
        is_placed: bool = False,
    ) -> None:
        """Command the workers to load a session into the blocks of a request.

        Args:
            blocks, in_place, prefix: see ``Load``.
            moves: the session leaves the directory with the request. Otherwise it
                stays, for other requests.
            cuts_off: it moves although others could have continued it later.
            is_placed: the blocks were filled for this request.
        """
        session_id = match.session.session_id
        self.stop_waiting(request_id)
        assert self._entries[session_id].memory == "present", "not in memory"
        args = (session_id, request_id, prompt_tokens, match.tokens, tuple(blocks))
        rewound = match.session.compaction if match.is_rewound else None
        load = Load(*args, in_place, tuple(prefix), rewound, moves)
        self._commands.loads.append(load)
        self._entries[session_id].num_loads += 1
        self.counts.hits += 1
        self.counts.device_hits += in_place and not is_placed
        self.counts.store_hits += self._entries[session_id].is_found
        self.counts.restored_tokens += match.tokens
        self.counts.recomputed_tokens += match.shared - match.tokens
        self.counts.rewinds += match.is_rewound
        self.counts.cut_off += cuts_off
        if moves:
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

    def save(
        self,
        session: Session,
        request_id: str,
        blocks: Iterable[int],
        continues: str | None = None,
    ) -> bool:
        """Command the workers to save the cache of a request.

        Replaces a session of the same owner with exactly the same tokens. The session
        that this one continues is evicted first from now on, unless several requests
        have continued it. Until then, memory has only those of its tokens that this one
        does not have.

        Args:
            blocks: physical IDs, from ``session.first_block``.
            continues: the session that the request has loaded; None: it has computed
                its prompt.

        Returns:
            False if there is no memory for it.
        """
        self.expire()
        other = self._index.equal(session.owner, session.tokens)
        if other is not None:
            self._replace(other.session_id)
        self._supersede_continued(session)
        if not self._make_room(session.num_bytes):
            self._refuse(session)
            return False
        # Each rank's file has the token IDs and a header.
        more = session.tokens.nbytes + _HEADER_BYTES
        file_bytes = session.num_bytes + self._ranks * more
        writes = self._writes and self._make_disk_room(file_bytes)
        self._index.add(session)
        now, due = self._clock(), {"saved": self._ranks}
        entry = Entry(session, "absent", "absent", now, file_bytes, due)
        self._entries[session.session_id] = entry
        self._expiry.note_use(entry)
        self._set_presence(session.session_id, memory="pending")
        reduces = self._begin_reduction(continues, session)
        if writes:
            self._set_presence(session.session_id, disk="pending")
            may_need = self._needed_by_next(continues)
            self._files.begin_write(session, self._ranks, may_need)
            continues = continues if may_need else None
        else:
            continues = None
        save = Save(session, request_id, tuple(blocks), writes, continues, reduces)
        self._commands.saves.append(save)
        return True

    def _begin_reduction(self, continued: str | None, session: Session) -> str | None:
        """Decide whether memory keeps only what the next turn of a session lacks.

        Args:
            continued: ID of the last turn.
            session: the next turn.

        Returns:
            The ID of the last turn; None: it stays as it is.
        """
        entry = self._entries.get(continued) if continued is not None else None
        if entry is None or not self._reduces or entry.memory != "present":
            return None
        assert continued is not None
        is_past = self._held.is_superseded(continued)
        if not is_past or not self._may_change(continued):
            return None
        if continued in self._kept_in_memory():
            return None
        self._set_presence(continued, memory="pending")
        entry.freed_bytes = 0
        entry.acks_due["reduced"] = self._ranks
        self._reductions.begin(continued, session.session_id)
        return continued

    def _end_reduction(self, session_id: str) -> None:
        """All ranks have reduced a session, or have kept it whole."""
        entry = self._entries[session_id]
        self._reductions.busy.discard(session_id)
        if not entry.freed_bytes:
            self._reductions.end(session_id)
            self._set_presence(session_id, memory="present")
        elif session_id in self._reductions:
            self._set_presence(session_id, memory="reduced")
        else:  # what it needs is gone
            self._leave_memory(session_id)

    def _lose_base(self, base: str) -> None:
        """Drop the sessions in memory that need one that leaves memory."""
        lost, left = [], self._reductions.needing(base)
        while left:
            session_id = left.pop()
            is_busy = session_id in self._reductions.busy
            self._reductions.end(session_id)
            if is_busy and session_id not in self._commands.stage:
                continue  # its tokens are being copied
            lost.append(session_id)
            left += self._reductions.needing(session_id)
        for session_id in reversed(lost):
            if session_id in self._commands.stage:
                self._commands.stage.remove(session_id)
            self.counts.evictions += 1
            self._leave_memory(session_id)

    def _leave_memory(self, session_id: str) -> None:
        """Delete a session from memory; it remains if it has a file."""
        if self._entries[session_id].disk == "absent":
            self._remove(session_id)
        else:
            self._set_presence(session_id, memory="absent")
            self._commands.drop.append(session_id)

    def _needed_by_next(self, continued: str | None) -> tuple[str, ...]:
        """Sessions whose files that of the next turn may need.

        Args:
            continued: the session of the last turn.

        Returns:
            Empty: the file of the last turn is not there, or of another size.
        """
        entry = self._entries.get(continued) if continued is not None else None
        if entry is None or entry.disk != "present" or entry.session.file_ranks:
            return ()
        assert continued is not None
        return (*entry.sources, continued)

    def _replace(self, session_id: str) -> None:
        """Remove a session because a newer one has the same tokens.

        Files of other replicas may need its files in a shared store.
        """
        if self._shared is None or self._entries[session_id].disk != "present":
            self._remove(session_id)
            return
        self._commands.stage = [i for i in self._commands.stage if i != session_id]
        self._commands.drop.append(session_id)
        self._forget(session_id)

    def _supersede_continued(self, session: Session) -> None:
        """Let the session that this one continues be evicted first.

        A session that several requests have continued is a beginning that they share,
        such as a document with many questions.
        """
        best = next(self._index.find(session.owner, session.tokens), None)
        if best is None:
            return
        shared, continued = best
        session_id, left_out = continued.session_id, len(continued.tokens) - shared
        if left_out <= _TAIL_TOKENS and self._entries[session_id].num_loads < 2:
            self._held.supersede(session_id)
            self._with_file.supersede(session_id)

    def _refuse(self, session: Session) -> None:
        self.counts.refused += 1
        if session.num_bytes > self.memory_bytes:
            text = (
                f"a session of {len(session.tokens)} tokens takes "
                f"{-(-session.num_bytes >> 10)} KiB, more than all of session_memory "
                f"({self.memory_bytes >> 10} KiB). Sessions of this size are not kept, "
                "and the requests that continue them recompute everything; raise "
                "session_memory"
            )
            self._warn_once("KVP308", text)
        elif self.unwritten_bytes + session.num_bytes > self.memory_bytes:
            text = (
                f"{self.unwritten_bytes >> 10} KiB of session_memory "
                f"({self.memory_bytes >> 10} KiB) wait for session_dir or session_url, "
                "which is slow or does not respond. Until it has written them, new "
                "sessions are not kept; check it, or raise session_memory"
            )
            self._warn_once("KVP310", text)

    def _warn_once(self, code: str, text: str) -> None:
        if code not in self._warned:
            self._warned.add(code)
            logger.warning("%s", coded(code, text))

    def add_files(self, found: Iterable[FoundSession]) -> None:
        """Add the sessions of an earlier engine.

        Args:
            found: in the order of last use, least recent first.
        """
        found = list(found)
        for each in found:  # so that adding one deletes none that a later one needs
            self._files.need(each.sources)
        for each in found:
            self._add_file(each)

    def _add_file(self, found: FoundSession) -> None:
        """Add a session whose sources are marked as needed."""
        session, file_bytes = found.session, found.file_bytes
        last_used = self._clock() - found.age_s
        # A larger one was written when memory_bytes was larger, and cannot be loaded.
        if session.num_bytes <= self.memory_bytes:
            self._index.add(session)
        entry = Entry(session, "absent", "absent", last_used, file_bytes)
        entry.sources = found.sources
        self._entries[session.session_id] = entry
        self._expiry.note_use(entry)
        self._set_presence(session.session_id, disk="present")
        self._make_disk_room()

    # -- a store that other replicas use ----------------------------------------

    def add_stored(self, session: Session, file_bytes: int) -> None:
        """Add a session that was found in the shared store.

        Its age is not known, so it counts as used just now; old files are deleted by
        their time in the store, or by the replica that knows when a time to live ends.
        """
        if session.session_id in self or session.num_bytes > self.memory_bytes:
            return
        session = replace(session, ttl_s=None)
        self._index.add(session)
        entry = Entry(
            session, "absent", "absent", self._clock(), file_bytes, is_found=True
        )
        self._entries[session.session_id] = entry
        self._set_presence(session.session_id, disk="present")
        self._make_index_room()

    def remove_stored(self, session_id: str) -> None:
        """Note that a session is not in the shared store any more."""
        entry = self._entries.get(session_id)
        if entry is None or entry.disk != "present" or entry.memory == "pending":
            return
        if entry.memory == "absent":
            self._forget(session_id)
        else:
            self._set_presence(session_id, disk="absent")

    def detach(self) -> None:
        """Forget all sessions, and neither write nor delete files from now on."""
        self._writes = False
        self._files.forget_kept()
        for session_id in list(self._entries):
            if session_id not in self._entries:
                continue  # it needed another one
            if not self._cancel_save(session_id):
                self._commands.drop.append(session_id)
            self._commands.stage = [i for i in self._commands.stage if i != session_id]
            self._commands.file_ranks.pop(session_id, None)
            self._forget(session_id)

    def _make_index_room(self) -> None:
        """Forget sessions that are only in the shared store, in the same order."""
        if self._shared is None or self.index_bytes <= self._shared.index_bytes:
            return
        awaited = {wait.session_id for wait in self._waiting.values()}
        for session_id in list(self._with_file):
            entry = self._entries[session_id]
            is_only_there = entry.memory == "absent" and entry.disk == "present"
            if is_only_there and session_id not in awaited:
                self._forget(session_id)
                if self.index_bytes <= self._shared.index_bytes:
                    return

    def _lose(self, session_id: str) -> None:
        """Forget a session that could not be loaded; its file stays."""
        assert self._shared is not None, "files of our own are removed"
        self._commands.drop.append(session_id)  # of ranks that have loaded it
        self._forget(session_id)
        self._shared.on_unloadable(session_id)

    # -- commands and acknowledgements ------------------------------------------

    def take_commands(self) -> SessionCommands:
        """Commands since the last call."""
        taken, self._commands = self._commands, SessionCommands()
        return taken

    def is_ready(self, session_id: str) -> bool:
        """Whether a session is in memory as a whole."""
        entry = self._entries.get(session_id)
        return entry is not None and entry.memory == "present"

    @property
    def awaits_copies(self) -> bool:
        """Whether workers copy tokens of sessions within memory."""
        return bool(self._reductions.busy)

    @property
    def has_commands(self) -> bool:
        """Whether the next step has commands."""
        return any(getattr(self._commands, f.name) for f in fields(self._commands))

    def process(self, acks: Iterable[SessionAck]) -> None:
        """Process acknowledgements. Removes sessions that failed on any rank."""
        acks = list(acks)
        # A session that moves has left the directory with its load command.
        lost = {a.session_id for a in acks if a.load is not None and a.load.moves}
        self.counts.failures += len(lost)
        for ack in acks:
            if ack.event == "written":
                self._process_written(ack)
                continue
            if ack.event == "placed":
                continue  # the request that waits for it loads it
            entry = self._entries.get(ack.session_id)
            if entry is None:
                continue  # removed in the meantime
            if ack.problem is not None:
                self.counts.failures += 1
                if self._shared is not None and ack.event != "saved":
                    self._lose(ack.session_id)
                else:
                    self._remove(ack.session_id)
                continue
            if not entry.acks_due.get(ack.event):
                continue  # removed, and found again in a shared store
            entry.acks_due[ack.event] -= 1
            if ack.event == "reduced":
                entry.freed_bytes += ack.num_bytes
            if entry.acks_due[ack.event]:
                continue
            if ack.event == "reduced":
                self._end_reduction(ack.session_id)
            else:
                self._reductions.end(ack.session_id)
                self._set_presence(ack.session_id, memory="present")

    def _process_written(self, ack: SessionAck) -> None:
        """A rank has written its part of a session, or will not write it."""
        session_id = ack.session_id
        write, entry = self._files.acknowledge(ack), self._entries.get(session_id)
        if entry is not None and entry.disk == "pending":
            if ack.problem is not None:
                self.counts.failures += 1
                self._set_presence(session_id, disk="absent")
                self._files.delete(entry)  # parts of other ranks
            elif not write.acks_due:
                self._files.set_written(entry, write)
                self._set_presence(session_id, disk="present")
        if write.acks_due:
            return
        if entry is None:
            self.held_bytes -= write.num_bytes
        self._files.end_write(session_id)
        self._make_disk_room()

    # -- limits -----------------------------------------------------------------

    def _touch(self, session_id: str) -> None:
        entry = self._entries.pop(session_id)
        entry.last_used = self._clock()
        self._entries[session_id] = entry
        self._held.touch(session_id)
        self._with_file.touch(session_id)
        self._expiry.note_use(entry)

    def _is_retained(self, session_id: str) -> bool:
        return self._entries[session_id].session.ttl_s is not None

    def expire(self) -> None:
        """Remove sessions that were not used for ``max_age_s``, or their ``ttl_s``."""
        while (session_id := self._expiry.next_expired(self._entries)) is not None:
            self.evict(session_id)

    def seconds_to_expiry(self) -> float | None:
        """Seconds after which ``expire`` may remove a session; None: never."""
        return self._expiry.seconds_left(self._entries)

    def oldest(self, besides: str | None = None) -> str | None:
        """ID of the first session in the order of eviction that can leave memory.

        Args:
            besides: ID of a session that does not count.
        """
        return next((i for i in self._removable() if i != besides), None)

    def evict(self, session_id: str) -> None:
        """Remove a session to make room."""
        self.counts.evictions += 1
        self._remove(session_id)

    def drop(self, session_id: str) -> None:
        """Remove a session and its files, for another reason than room. Unknown
        sessions are ignored.
        """
        if session_id in self._entries:
            self._remove(session_id)

    def clear(self) -> None:
        """Remove all sessions and their files."""
        for session_id in list(self._entries):
            self.drop(session_id)  # it may have left with one that it needs

    def _removable(self) -> Iterator[str]:
        """Sessions that can leave memory, in the order of eviction.

        Sessions that are being copied, that a request waits for, that are needed to
        make others whole, or whose file is not written yet stay.
        """
        kept = self._kept_in_memory()
        return (i for i in self._held if i not in kept and self._may_change(i))

    def _may_change(self, session_id: str) -> bool:
        """Whether no worker copies a session, or writes its file."""
        is_at_rest = self._entries[session_id].memory in ("present", "reduced")
        return is_at_rest and not self._files.is_writing(session_id)

    def _kept_in_memory(self) -> set[str]:
        """Sessions that a request waits for, and those needed to make others whole."""
        awaited = {wait.session_id for wait in self._waiting.values()}
        kept = {each for each in awaited if each is not None}
        return kept | self._reductions.bases({*kept, *self._reductions.busy})

    def _make_room(self, num_bytes: int) -> bool:
        """Evict sessions from memory until ``num_bytes`` are free.

        Returns:
            Whether enough memory is free.
        """
        if self.unwritten_bytes + num_bytes > self.memory_bytes:
            return False
        while self.held_bytes + num_bytes > self.memory_bytes:
            session_id = next(self._removable(), None)
            if session_id is None:
                return False
            self.counts.evictions += 1
            self._leave_memory(session_id)
        self._make_index_room()
        return True

    def _make_disk_room(self, num_bytes: int = 0) -> bool:
        """Delete files, in the order of eviction, until ``num_bytes`` are free.

        Files that are being written or read stay, and those that others need.

        Returns:
            Whether enough space is free.
        """
        limit = self._files.limit_bytes
        if limit is not None and not self._files.can_hold(num_bytes):
            text = (
                f"a session file of {num_bytes >> 10} KiB is not written: session_disk "
                f"is {limit >> 10} KiB, and other files in "
                f"session_dir take {self._files.other_bytes >> 10} KiB. Such sessions "
                "are lost at a restart; raise session_disk"
            )
            self._warn_once("KVP311", text)
            return False
        while self._files.exceeds(num_bytes):
            entries = ((i, self._entries[i]) for i in self._with_file)
            old = (
                i
                for i, e in entries
                if e.disk == "present"
                and e.memory != "pending"
                and not self._files.is_needed(i)
            )
            session_id = next(old, None)
            if session_id is None:
                return False
            if self._entries[session_id].memory == "absent":
                self.counts.evictions += 1
                self._remove(session_id)
            else:
                self._set_presence(session_id, disk="absent")
                self._files.delete(self._entries[session_id])
        return True

    def _set_presence(
        self,
        session_id: str,
        memory: MemoryPresence | None = None,
        disk: Presence | None = None,
    ) -> None:
        """Set where a session is, and update the byte counts."""
        entry = self._entries[session_id]
        self.index_bytes -= entry.index_bytes
        if memory is not None:
            before, entry.memory = entry.held_bytes, memory
            if memory != "absent" or not self._files.is_writing(session_id):
                self.held_bytes += entry.held_bytes - before
            self._held.keep(session_id, memory != "absent")
            if memory in ("absent", "reduced"):
                self._on_memory_freed(session_id)
            if memory == "absent":
                self._reductions.end(session_id)
        if disk is not None:
            was, now = entry.disk != "absent", disk != "absent"
            entry.disk = disk
            self._with_file.keep(session_id, now)
            if now and not was:
                self._files.add(entry)
            elif was and not now:
                self._files.remove(entry)
        self.index_bytes += entry.index_bytes
        if memory == "absent":
            self._lose_base(session_id)

    def _forget(self, session_id: str) -> None:
        self._set_presence(session_id, memory="absent", disk="absent")
        if session_id in self._index:
            self._index.remove(session_id)
        del self._entries[session_id]
        self._on_forgotten(session_id)

    def _remove(self, session_id: str) -> None:
        """Forget a session, and delete it from memory and disk."""
        if session_id in self._commands.stage:
            self._commands.stage.remove(session_id)
        if not self._cancel_save(session_id):
            self._commands.drop.append(session_id)
            if self._entries[session_id].disk != "absent":
                self._files.delete(self._entries[session_id])
        self._forget(session_id)

    def _command_unlink(self, session: Session) -> None:
        """Tell the workers to delete the files of a session."""
        self._commands.unlink.append(session.session_id)
        self._note_file_ranks(session)

    def _note_file_ranks(self, session: Session) -> None:
        """Tell the workers which files a session has, if it is of another size."""
        if session.file_ranks is not None:
            self._commands.file_ranks[session.session_id] = session.file_ranks

    def _cancel_save(self, session_id: str) -> bool:
        """Withdraw the command to save a session, if no step has taken it yet."""
        for save in self._commands.saves:
            if save.session.session_id == session_id:
                self._commands.saves.remove(save)
                self._on_save_withdrawn(session_id)
                if save.reduces is not None and save.reduces in self._reductions:
                    self._reductions.end(save.reduces)
                    self._set_presence(save.reduces, memory="present")
                self._files.end_write(session_id)
                return True
        return False

    # -- queries ----------------------------------------------------------------

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._entries

    def __iter__(self) -> Iterator[Session]:
        """All sessions, in memory or in files."""
        return (entry.session for entry in self._entries.values())

    @property
    def written_bytes(self) -> int:
        """Size of files: of sessions, with those being written, and those that only
        other files need."""
        return self._files.written_bytes

    @property
    def unwritten_bytes(self) -> int:
        """Of ``held_bytes``, those of sessions whose files are not written yet."""
        return self._files.unwritten_bytes

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
    def reduced(self) -> set[str]:
        """IDs of sessions of which memory has only what later turns lack."""
        return {i for i, e in self._entries.items() if e.memory == "reduced"}

    @property
    def on_disk(self) -> set[str]:
        """IDs of sessions that all ranks have in files."""
        return {i for i, e in self._entries.items() if e.disk == "present"}

    @property
    def kept_files(self) -> set[str]:
        """IDs of removed sessions whose files others need."""
        return self._files.kept

    def check_integrity(self) -> None:
        """Each session is in memory or a file, and can be found; sizes are correct."""
        sizes = {i: e.session.num_bytes for i, e in self._entries.items()}
        fitting = {i for i, size in sizes.items() if size <= self.memory_bytes}
        indexed = {session.session_id for session in self._index}
        assert fitting == indexed, "indexed and known sessions differ"
        known = self._entries.items()
        in_memory = [i for i, e in known if e.memory != "absent"]
        self._held.check_integrity(in_memory)
        with_file = [i for i, e in known if e.disk != "absent"]
        self._with_file.check_integrity(with_file)
        last_used = [e.last_used for e in self._entries.values()]
        assert last_used == sorted(last_used), "not in the order of use"
        held = [entry.held_bytes for entry in self._entries.values()]
        held.append(self._files.unwritten_of_removed(self._entries))
        assert self.held_bytes == sum(held) <= self.memory_bytes, "memory miscounted"
        self._files.check_integrity(self._entries.values())
        indexed_bytes = sum(entry.index_bytes for entry in self._entries.values())
        assert self.index_bytes == indexed_bytes, "the index is miscounted"
        nowhere = [
            i for i, e in self._entries.items() if e.memory == e.disk == "absent"
        ]
        assert not nowhere, f"sessions that are nowhere: {nowhere}"
        self._reductions.check_integrity()
        for session_id, entry in known:
            if entry.memory == "reduced":
                (base, *_) = self._reductions.bases([session_id])
                assert self._entries[base].memory != "absent", "its base is gone"
