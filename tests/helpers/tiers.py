"""Which parameters of a test the default tier runs."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

T = TypeVar("T")


def covering(cases: Sequence[Mapping[str, object]], strength: int) -> set[int]:
    """Few cases in which all values that occur together in a case still do.

    Each step takes the case that adds most, and the first one of those that add the
    same, so that the choice is the same in every run.

    Args:
        cases: value of each parameter.
        strength: 1: every value of every parameter occurs. 2: every pair of values of
            two parameters occurs.

    Returns:
        Indices of the chosen cases.
    """
    left = {i: _groups(case, strength) for i, case in enumerate(cases)}
    missing = set().union(*left.values()) if left else set()
    chosen: set[int] = set()
    while missing:
        best = max(left, key=lambda i: (len(left[i] & missing), -i))
        missing -= left.pop(best)
        chosen.add(best)
    return chosen


def _groups(case: Mapping[str, object], strength: int) -> set[Hashable]:
    items = [(name, _key(case[name])) for name in sorted(case)]
    return set(combinations(items, min(strength, len(items))))


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def tiered(values: Iterable[T], default: Container[T]) -> list[T | ParameterSet]:
    """Values of one parameter, of which the default tier runs only some."""
    slow = pytest.mark.slow
    return [v if v in default else pytest.param(v, marks=slow) for v in values]
