"""The order in which sessions are evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class EvictionOrder:
    """Superseded sessions first, then the others, least recently used first.

    A session is superseded when a later turn of its conversation is saved: only a
    client that goes back would use it again. Among superseded sessions, the one that
    was superseded first is evicted first. ::

        superseded [ a1 b1 a2 ]   others [ c1 b2 a3 ]
                     <- evicted first             most recently used

    Each operation takes constant time.
    """

    __slots__ = ("_others", "_superseded")

    def __init__(self) -> None:
        self._superseded: dict[str, None] = {}
        self._others: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        yield from self._superseded
        yield from self._others

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._superseded or session_id in self._others

    def keep(self, session_id: str, is_in: bool) -> None:
        """Add a session as most recently used, keep its place, or remove it."""
        if not is_in:
            self._superseded.pop(session_id, None)
            self._others.pop(session_id, None)
        elif session_id not in self:
            self._others[session_id] = None

    def touch(self, session_id: str) -> None:
        """A session is used, so it is not superseded. Unknown ones are ignored."""
        if session_id in self:
            self.keep(session_id, False)
            self.keep(session_id, True)

    def supersede(self, session_id: str) -> None:
        """A later turn takes a session's place. Unknown sessions are ignored."""
        if session_id in self._others:
            del self._others[session_id]
            self._superseded[session_id] = None

    def is_superseded(self, session_id: str) -> bool:
        """Whether a later turn has taken a session's place."""
        return session_id in self._superseded

    def check_integrity(self, by_use: Sequence[str]) -> None:
        """Check that it has these sessions, and the others in the order of use.

        Args:
            by_use: IDs, least recently used first.
        """
        assert sorted(self) == sorted(by_use), "sessions that can be evicted"
        others = [each for each in by_use if each not in self._superseded]
        assert list(self._others) == others, "not in the order of use"
