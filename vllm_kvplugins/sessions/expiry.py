"""When sessions expire: all by their age, some by a time to live of their own."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from vllm_kvplugins.sessions.entries import Entry


class Expiry:
    """Finds sessions that were not used for too long.

    Args:
        max_age_s: seconds after which any unused session expires; None: never.
        clock: seconds, monotonic.
    """

    def __init__(self, max_age_s: float | None, clock: Callable[[], float]) -> None:
        self._max_age_s = max_age_s
        self._clock = clock
        # When sessions with a time to live expire, with earlier times of those that
        # were used since.
        self._deadlines: list[tuple[float, str]] = []

    def note_use(self, entry: Entry) -> None:
        """A session is new, or was used.

        Cost: O(log(uses)) for a session with a time to live.
        """
        if entry.session.ttl_s is not None:
            deadline = entry.last_used + entry.session.ttl_s
            heapq.heappush(self._deadlines, (deadline, entry.session.session_id))

    def next_expired(self, entries: Mapping[str, Entry]) -> str | None:
        """The ID of a session that has expired; None: there is none.

        Args:
            entries: all sessions, least recently used first.
        """
        oldest = next(iter(entries.values()), None)
        if oldest is not None and self._is_expired(oldest):
            return oldest.session.session_id
        while self._deadlines and self._deadlines[0][0] < self._clock():
            _, session_id = heapq.heappop(self._deadlines)
            entry = entries.get(session_id)
            if entry is not None and self._is_expired(entry):
                return session_id
        return None

    def seconds_left(self, entries: Mapping[str, Entry]) -> float | None:
        """Seconds after which a session may expire; None: none will."""
        times = [deadline for deadline, _ in self._deadlines[:1]]
        oldest = next(iter(entries.values()), None)
        if self._max_age_s is not None and oldest is not None:
            times.append(oldest.last_used + self._max_age_s)
        if not times:
            return None
        # Not just before the time: nobody would wake the engine again.
        return max(min(times) - self._clock(), 0.0) + 0.01

    def _is_expired(self, entry: Entry) -> bool:
        limits = [t for t in (self._max_age_s, entry.session.ttl_s) if t is not None]
        return bool(limits) and self._clock() - entry.last_used > min(limits)
