"""Waits for background threads."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it does not hold in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
