"""Metrics of saved clusterings, which front ends count and not the engine.

An API server creates its metrics after its front ends, and a process without metrics
never does. Until then nothing is counted: no request has come yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Counter(Protocol):
    """A metric that only grows."""

    def inc(self) -> None:
        """Add one."""


_counters: dict[str, Counter] = {}


def attach(counters: Mapping[str, Counter]) -> None:
    """Use these metrics from now on.

    Args:
        counters: by field of ``sessions.clusterings.Counts``.
    """
    _counters.update(counters)


def count(name: str) -> None:
    """Add one to a metric, if this process has metrics."""
    counter = _counters.get(name)
    if counter is not None:
        counter.inc()
