"""Limits how often messages about requests are logged."""

from __future__ import annotations

import re
from collections import Counter

_VARIABLE = re.compile(r"[0-9a-f]{16,}|\d+(\.\d+)?")


class LogThrottle:
    """Passes the 1st, 10th, 100th, … message of each kind.

    Messages that differ only in numbers and digests, as of names of files, are of the
    same kind.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def format(self, message: str) -> str | None:
        """The message to log, with its count; None if it should not be logged."""
        kind = _VARIABLE.sub("#", message)
        self._counts[kind] += 1
        count = self._counts[kind]
        if str(count).strip("0") != "1":
            return None
        return message if count == 1 else f"{message} (request {count} of this kind)"
