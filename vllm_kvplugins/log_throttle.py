"""Messages about requests that a log should not drown in."""

from __future__ import annotations

import re
from collections import Counter


class LogThrottle:
    """Lets the 1st, 10th, 100th, … message of a kind through.

    Messages that differ in numbers only are of one kind.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def format(self, message: str) -> str | None:
        """The message as it should be logged, with its count; None: not this time."""
        kind = re.sub(r"\d+(\.\d+)?", "#", message)
        self._counts[kind] += 1
        count = self._counts[kind]
        if str(count).strip("0") != "1":
            return None
        return message if count == 1 else f"{message} (request {count} of this kind)"
