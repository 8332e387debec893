"""The highest rate at which a server meets a service level.

A search over a geometric grid of rates: double or halve until two rates enclose the
limit, then bisect until they are neighbors. All policies visit rates of one grid.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from _serving_rows import STOCK, Row, label_of

RATES_PER_DOUBLING = 4  # neighbors differ by 19 %
LARGEST_FACTOR = 64  # of the first rate, up and down
_NEEDED = {"completed", "failed", "goodput_per_min", "duration_s"}

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A search for the highest rate.

    Attributes:
        start: first rate, per second.
        share: of the requests that must be within the limits.
    """

    start: float
    share: float

    def rate(self, index: int) -> float:
        """A rate of the grid; index 0 is ``start``."""
        return round(self.start * 2 ** (index / RATES_PER_DOUBLING), 6)


def next_index(passed: Mapping[int, bool]) -> int | None:
    """Index of the next rate to measure; None if the highest rate is known.

    Args:
        passed: whether each measured rate met the service level. A rate above one that
            failed does not count.
    """
    if not passed:
        return 0
    best, failed = highest_passed(passed)
    if failed is None:
        assert best is not None
        following = best + RATES_PER_DOUBLING
    elif best is None:
        following = failed - RATES_PER_DOUBLING
    else:
        return None if failed - best == 1 else (best + failed) // 2
    return (
        following
        if 2 ** (abs(following) / RATES_PER_DOUBLING) <= LARGEST_FACTOR
        else None
    )


def highest_passed(passed: Mapping[N, bool]) -> tuple[N | None, N | None]:
    """The highest rate below all failed ones, and the lowest failed one.

    None for each that does not exist.
    """
    failed = min((rate for rate, ok in passed.items() if not ok), default=None)
    good = (r for r, ok in passed.items() if ok and (failed is None or r < failed))
    return max(good, default=None), failed


def share_within_limits(figures: Mapping[str, Any]) -> float:
    """Share of all requests that succeeded within the limits."""
    requests = figures["completed"] + figures["failed"]
    good = figures["goodput_per_min"] / 60 * figures["duration_s"]
    return float(good / requests) if requests else 0.0


def highest_rates(rows: Sequence[Row], share: float) -> list[dict[str, Any]]:
    """The highest measured rate at the service level, per policy.

    Args:
        rows: of one workload and comparable settings; incomplete ones are skipped.
        share: of the requests that must be within the limits.

    Returns:
        Records of ``policy``, ``rates_per_s`` (one per repetition; 0 if no rate was low
        enough), ``median``, and ``vs_stock``: ratios per repetition that stock has too.
        A rate that no measured one exceeds is a lower bound; ``is_bound`` marks it.
        ``answered_share``, of all ``answers`` of all rates, and ``answered_vs_stock``
        are None if the load has no known answers.
    """
    rows = [row for row in rows if row["figures"].keys() >= _NEEDED]
    best: dict[str, dict[int, float]] = {}
    bounds: dict[str, bool] = {}
    for label in dict.fromkeys(label_of(row["policy"]) for row in rows):
        own = [row for row in rows if label_of(row["policy"]) == label]
        best[label] = {}
        for repetition in sorted({row["repetition"] for row in own}):
            measured = {
                row["rate"]: share_within_limits(row["figures"]) >= share
                for row in own
                if row["repetition"] == repetition
            }
            highest, failed = highest_passed(measured)
            best[label][repetition] = highest or 0.0
            bounds[label] = bounds.get(label, False) or failed is None
    stock = best.get(STOCK, {})
    answers = {label: _answered(rows, label) for label in best}
    base = answers.get(STOCK, (None, 0))[0]
    return [
        {
            "policy": label,
            "rates_per_s": list(rates.values()),
            "median": statistics.median(rates.values()),
            "is_bound": bounds[label],
            "vs_stock": [rate / stock[n] for n, rate in rates.items() if stock.get(n)],
            "answered_share": share,
            "answers": count,
            "answered_vs_stock": share / base if share is not None and base else None,
        }
        for label, rates in best.items()
        for share, count in [answers[label]]
    ]


def _answered(rows: Sequence[Row], label: str) -> tuple[float | None, int]:
    """Share of right answers over all rows of a policy, and how many answers."""
    figures = [
        row["figures"]
        for row in rows
        if label_of(row["policy"]) == label and "answered_share" in row["figures"]
    ]
    count = sum(each["completed"] + each["failed"] for each in figures)
    right = sum(
        each["answered_share"] * (each["completed"] + each["failed"])
        for each in figures
    )
    return (right / count if count else None), count
