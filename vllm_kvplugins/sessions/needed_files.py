"""Which session files others need, and files that stay only for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_kvplugins.sessions.commands import Session


@dataclass(frozen=True, slots=True)
class KeptFiles:
    """Files of a session that has left the directory.

    Attributes:
        num_bytes: their size, over all ranks.
        sources: sessions whose files they need.
    """

    session: Session
    num_bytes: int
    sources: tuple[str, ...]


class NeededFiles:
    """Counts the sessions that need the files of each session.

    A file that a later turn needs stays when its own session is removed, and is deleted
    when no session needs it any more. ::

        files   a <- b <- c      a and b are needed
        remove b                 the file of b stays: c needs it
        remove c                 delete c and b; a remains, a session of its own

    A file that stays also keeps what it needs itself. So every file can be read, and an
    engine that starts later finds a session in it.

    Attributes:
        kept_bytes: size of the files that stay only for others.
    """

    def __init__(self) -> None:
        self.kept_bytes = 0
        self._counts: Counter[str] = Counter()
        self._kept: dict[str, KeptFiles] = {}

    def __contains__(self, session_id: str) -> bool:
        """Whether some session needs the files of this one."""
        return session_id in self._counts

    @property
    def kept(self) -> set[str]:
        """IDs of sessions whose files stay only for others."""
        return set(self._kept)

    def need(self, sources: Iterable[str]) -> None:
        """A session needs the files of these sessions, or may need them."""
        self._counts.update(sources)

    def release(self, sources: Iterable[str]) -> list[Session]:
        """A session does not need the files of these sessions any more.

        Returns:
            Sessions whose files are to be deleted now.
        """
        unneeded, left = [], list(sources)
        while left:
            session_id = left.pop()
            self._counts[session_id] -= 1
            if self._counts[session_id]:
                continue
            del self._counts[session_id]
            kept = self._kept.pop(session_id, None)
            if kept is not None:
                self.kept_bytes -= kept.num_bytes
                unneeded.append(kept.session)
                left += kept.sources
        return unneeded

    def keep(self, session: Session, num_bytes: int, sources: tuple[str, ...]) -> None:
        """A session is removed, and others need its files.

        Args:
            sources: sessions whose files these need.
        """
        self._kept[session.session_id] = KeptFiles(session, num_bytes, sources)
        self.kept_bytes += num_bytes
        self.need(sources)

    def forget_kept(self) -> None:
        """Nobody deletes files from now on."""
        for kept in self._kept.values():
            self._counts.subtract(kept.sources)
        self._counts += Counter()  # without those that nobody needs any more
        self._kept.clear()
        self.kept_bytes = 0

    def check_integrity(self, needed: Iterable[str]) -> None:
        """All counts are those of ``needed``, which names a session for each need of a
        session in the directory."""
        by_kept = [s for kept in self._kept.values() for s in kept.sources]
        assert self._counts == Counter([*needed, *by_kept]), "needs are miscounted"
        assert self._kept.keys() <= self._counts.keys(), "files stay for nobody"
        kept = sum(each.num_bytes for each in self._kept.values())
        assert self.kept_bytes == kept, "kept files are miscounted"
