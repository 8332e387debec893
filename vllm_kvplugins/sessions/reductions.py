"""Which sessions in memory need others, because they store only what these lack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Reductions:
    """The session that each reduced one needs, its base. ::

        turn 1 -> turn 2 -> turn 3        turn 3 is whole

    Attributes:
        busy: sessions that are being reduced, or made whole again.
    """

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self._bases: dict[str, str] = {}
        self._by_base: dict[str, dict[str, None]] = {}

    def __contains__(self, session_id: str) -> bool:
        """Whether a session needs another one."""
        return session_id in self._bases

    def begin(self, session_id: str, base: str) -> None:
        """A session will need another one, as soon as it is reduced."""
        assert session_id not in self._bases, "it needs another session already"
        self._bases[session_id] = base
        self._by_base.setdefault(base, {})[session_id] = None
        self.busy.add(session_id)

    def end(self, session_id: str) -> None:
        """A session is whole, or gone. Others are ignored."""
        self.busy.discard(session_id)
        base = self._bases.pop(session_id, None)
        if base is not None:
            of_base = self._by_base[base]
            del of_base[session_id]
            if not of_base:
                del self._by_base[base]

    def needing(self, base: str) -> list[str]:
        """Sessions that need this one, without those that need them."""
        return list(self._by_base.get(base, ()))

    def bases(self, sessions: Iterable[str]) -> set[str]:
        """All sessions that some sessions need, directly or through others."""
        return {base for each in sessions for base in self._chain(each)}

    def _chain(self, session_id: str) -> Iterator[str]:
        while session_id in self._bases:
            session_id = self._bases[session_id]
            yield session_id

    def check_integrity(self) -> None:
        """Both directions agree; no session needs itself."""
        pairs = {(s, base) for base, of in self._by_base.items() for s in of}
        assert pairs == set(self._bases.items()), "bases and their sessions differ"
        assert self.busy <= self._bases.keys(), "busy without a base"
        for session_id in self._bases:
            seen = list(self._chain(session_id))
            assert session_id not in seen, "it needs itself"
