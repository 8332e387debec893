"""The order in which sessions are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


class EvictionOrder:
    """Superseded sessions first, then others, then retained ones.

    A session is superseded when a later turn of its conversation is saved: only a
    client that goes back would use it again. Among superseded sessions, the one that
    was superseded first is evicted first; among the others, and among retained ones,
    the least recently used one. ::

        superseded [ a1 b1 a2 ]   others [ c1 b2 a3 ]   retained [ d1 e1 ]
                     <- evicted first                     most recently used

    Each operation takes constant time.

    Args:
        is_retained: whether a session is to be evicted last; never changes.
    """

    __slots__ = ("_is_retained", "_others", "_retained", "_superseded")

    def __init__(
        self, is_retained: Callable[[str], bool] = lambda session_id: False
    ) -> None:
        self._is_retained = is_retained
        self._superseded: dict[str, None] = {}
        self._others: dict[str, None] = {}
        self._retained: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        yield from self._superseded
        yield from self._others
        yield from self._retained

    def __contains__(self, session_id: str) -> bool:
        return any(session_id in each for each in self._classes)

    @property
    def _classes(self) -> tuple[dict[str, None], ...]:
        return self._superseded, self._others, self._retained

    def keep(self, session_id: str, is_in: bool) -> None:
        """Add a session as most recently used, keep its place, or remove it."""
        if not is_in:
            for each in self._classes:
                each.pop(session_id, None)
        elif session_id not in self:
            retained = self._is_retained(session_id)
            (self._retained if retained else self._others)[session_id] = None

    def touch(self, session_id: str) -> None:
        """A session is used, so it is not superseded. Unknown ones are ignored."""
        if session_id in self:
            self.keep(session_id, False)
            self.keep(session_id, True)

    def supersede(self, session_id: str) -> None:
        """A later turn takes a session's place. Unknown sessions are ignored."""
        if session_id in self and session_id not in self._superseded:
            self.keep(session_id, False)
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
        rest = [each for each in by_use if each not in self._superseded]
        others = [each for each in rest if not self._is_retained(each)]
        retained = [each for each in rest if self._is_retained(each)]
        assert list(self._others) == others, "not in the order of use"
        assert list(self._retained) == retained, "not in the order of use"
