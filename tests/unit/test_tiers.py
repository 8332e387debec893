"""What the default tier leaves out."""

from __future__ import annotations

import os
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import covering, tiered

grids = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def groups(cases, strength):
    return {
        group
        for case in cases
        for group in combinations(sorted(case.items()), min(strength, len(case)))
    }


@given(grids, st.sampled_from([1, 2]), st.randoms(use_true_random=False))
def test_values_that_occur_together_are_kept(sizes, strength, random):
    cases = [
        {f"p{i}": value for i, value in enumerate(values)}
        for values in product(*map(range, sizes))
        if random.random() < 0.8
    ]
    chosen = covering(cases, strength)
    assert groups([cases[i] for i in chosen], strength) == groups(cases, strength)
    assert covering(cases, strength) == chosen


def test_a_grid_needs_few_combinations():
    cases = [
        dict(zip("abc", case, strict=True)) for case in product(range(6), repeat=3)
    ]
    assert len(covering(cases, 1)) == 6
    assert len(covering(cases, 2)) < len(cases) / 4


def test_values_may_lack_a_hash():
    cases = [{"a": {"x": value}} for value in (1, 2, 1)]
    assert covering(cases, 1) == {0, 1}


def test_other_values_are_slow():
    first, second = tiered(["a", "b"], ["b"])
    assert first == pytest.param("a", marks=pytest.mark.slow)
    assert second == "b"


RAN: list[tuple[int, int]] = []


@pytest.mark.each_value
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(4))
def test_a_grid(a, b):
    RAN.append((a, b))


def test_only_the_full_tier_runs_the_whole_grid():
    """Counts what ran of the test above."""
    if not RAN:
        pytest.skip("the grid was not asked for")
    is_full = os.environ.get("KVP_TEST_TIER") == "all"
    assert len(RAN) == (12 if is_full else 4)
    assert {a for a, _ in RAN} == {0, 1, 2}
    assert {b for _, b in RAN} == {0, 1, 2, 3}
