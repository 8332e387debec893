"""The scheduler's account of session files: sizes, writes, and who needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_kvplugins.sessions.commands import Session, SessionAck
from vllm_kvplugins.sessions.entries import Entry, Write
from vllm_kvplugins.sessions.needed_files import NeededFiles


class FileLedger:
    """What a session directory knows of the files of all sessions.

    It decides nothing about sessions: the directory tells it which files exist, and
    asks it which may be deleted.

    Args:
        limit_bytes: limit on files; None: no limit.
        other_bytes: size of files that are not sessions; they count.
        delete: called with each session whose files nobody needs any more.

    Attributes:
        unwritten_bytes: host memory of sessions whose files are not written yet.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        other_bytes: int,
        delete: Callable[[Session], None],
    ) -> None:
        self.limit_bytes = limit_bytes
        self.other_bytes = other_bytes
        self.unwritten_bytes = 0
        self._delete = delete
        self._own_bytes = 0
        self._writes: dict[str, Write] = {}
        self._needed = NeededFiles()

    # -- writes ---------------------------------------------------------------

    def begin_write(
        self, session: Session, ranks: int, may_need: tuple[str, ...]
    ) -> None:
        """Workers are told to write a session.

        Args:
            may_need: sessions whose files the new ones may need.
        """
        write = Write(session.num_bytes, ranks, may_need=may_need)
        self._writes[session.session_id] = write
        self._needed.need(may_need)
        self.unwritten_bytes += session.num_bytes

    def is_writing(self, session_id: str) -> bool:
        """Whether workers write a session, or will."""
        return session_id in self._writes

    def acknowledge(self, ack: SessionAck) -> Write:
        """A rank has written its part of a session, or will not write it."""
        write = self._writes[ack.session_id]
        write.acks_due -= 1
        write.file_bytes += ack.num_bytes
        write.needs.update(ack.sources)
        return write

    def end_write(self, session_id: str) -> None:
        """No rank writes a session any more. Others are ignored."""
        write = self._writes.pop(session_id, None)
        if write is not None:
            self.unwritten_bytes -= write.num_bytes
            self.release(write.may_need)

    def set_written(self, entry: Entry, write: Write) -> None:
        """All ranks have written a session that is in the directory."""
        self._own_bytes += write.file_bytes - entry.file_bytes
        entry.file_bytes = write.file_bytes
        entry.sources = tuple(sorted(write.needs))
        self.need(entry.sources)

    # -- files ----------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """A session of the directory has files, or will have."""
        self._own_bytes += entry.file_bytes

    def remove(self, entry: Entry) -> None:
        """The files of a session are no longer those of a session."""
        self._own_bytes -= entry.file_bytes
        sources, entry.sources = entry.sources, ()
        self.release(sources)

    def delete(self, entry: Entry) -> None:
        """Delete the files of a session, now or when no other session needs them."""
        session = entry.session
        if self.is_needed(session.session_id):
            self._needed.keep(session, entry.file_bytes, entry.sources)
        else:
            self._delete(session)

    def need(self, sources: Iterable[str]) -> None:
        """A session needs the files of these sessions."""
        self._needed.need(sources)

    def release(self, sources: Iterable[str]) -> None:
        """A session does not need the files of these sessions any more."""
        for session in self._needed.release(sources):
            self._delete(session)

    def is_needed(self, session_id: str) -> bool:
        """Whether other sessions need the files of one."""
        return session_id in self._needed

    def forget_kept(self) -> None:
        """Nobody deletes files from now on."""
        self._needed.forget_kept()

    # -- sizes ----------------------------------------------------------------

    @property
    def written_bytes(self) -> int:
        """Size of files: of sessions, with those being written, and those that only
        other files need."""
        return self._own_bytes + self._needed.kept_bytes

    @property
    def kept(self) -> set[str]:
        """IDs of removed sessions whose files others need."""
        return self._needed.kept

    def can_hold(self, num_bytes: int) -> bool:
        """Whether files of this size fit into the limit if all sessions leave."""
        return self.limit_bytes is None or self._room_bytes(num_bytes) >= 0

    def exceeds(self, num_bytes: int) -> bool:
        """Whether files of this size would now exceed the limit."""
        return self.limit_bytes is not None and self.written_bytes > self._room_bytes(
            num_bytes
        )

    def _room_bytes(self, num_bytes: int) -> int:
        assert self.limit_bytes is not None
        return self.limit_bytes - self.other_bytes - num_bytes

    def unwritten_of_removed(self, entries: Iterable[str]) -> int:
        """Memory of sessions that are being written and have left the directory."""
        known = set(entries)
        return sum(w.num_bytes for i, w in self._writes.items() if i not in known)

    def check_integrity(self, entries: Iterable[Entry]) -> None:
        """All sums and needs are those of the directory's sessions."""
        entries = list(entries)
        written = [e.file_bytes for e in entries if e.disk != "absent"]
        assert self._own_bytes == sum(written), "files miscounted"
        unwritten = sum(write.num_bytes for write in self._writes.values())
        assert self.unwritten_bytes == unwritten, "writes miscounted"
        self._needed.check_integrity(
            [source for entry in entries for source in entry.sources]
            + [source for write in self._writes.values() for source in write.may_need]
        )
