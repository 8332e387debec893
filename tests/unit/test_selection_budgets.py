"""Selections with exact counts, deterministic ties, and budgets that add up."""

from __future__ import annotations

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvplugins.budgets import ALLOCATORS, Budget, parse_allocator, round_to_pages
from vllm_kvplugins.scoring.selection import keep_top

SEED = 20261121


def full(scores: torch.Tensor) -> torch.Tensor:
    """Every row can choose all its pages."""
    return torch.full(scores.shape[:2], scores.shape[2] // 32)


def by_sorting(scores: list[float], count: int) -> list[bool]:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    return [i in order[:count] for i in range(len(scores))]


@given(st.data())
def test_keep_top_is_a_stable_sort(data):
    rows = data.draw(st.integers(1, 4))
    slots = data.draw(st.integers(1, 30))
    value = st.sampled_from([0.0, 1.0, 2.0, 2.5, float("inf"), float("-inf")])
    table = [
        data.draw(st.lists(value, min_size=slots, max_size=slots)) for _ in range(rows)
    ]
    counts = [data.draw(st.integers(0, slots)) for _ in range(rows)]
    keep = keep_top(torch.tensor(table), torch.tensor(counts))
    assert keep.tolist() == [
        by_sorting(row, n) for row, n in zip(table, counts, strict=True)
    ]


def test_keep_top_refuses_nan_and_impossible_counts():
    with pytest.raises(ValueError, match="NaN"):
        keep_top(torch.tensor([[1.0, float("nan")]]), torch.tensor([1]))
    with pytest.raises(ValueError, match="cannot keep"):
        keep_top(torch.zeros(1, 3), torch.tensor([4]))


@given(
    st.lists(st.floats(0, 50), min_size=1, max_size=40),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_rounding_is_exact_and_bounded(shares, maximum, random):
    total = random.randint(len(shares), len(shares) * maximum)
    limit = torch.full((len(shares),), maximum)
    minimum = torch.ones_like(limit)
    pages = round_to_pages(torch.tensor(shares), total, limit, minimum)
    assert int(pages.sum()) == total
    assert int(pages.min()) >= 1
    assert int(pages.max()) <= maximum


# `file` needs a file; it has its own test
NAMES = sorted(set(ALLOCATORS) - {"file"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pages", [1, 2, 7, 15])
def test_allocators_hand_out_exactly_what_there_is(name, pages):
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED + pages)
    scores = torch.rand(6, 3, 16 * 32, generator=generator) ** 4
    scores[:, :, -32:] = torch.inf
    counts = parse_allocator(name).allocate(scores, pages, 32, full(scores))
    assert counts.shape == (6, 3)
    assert int(counts.sum()) == pages * 6 * 3
    assert int(counts.min()) >= 1
    assert int(counts.max()) <= 16


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"uniform"}))
def test_nobody_gets_more_pages_than_it_has(name):
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    scores = torch.rand(6, 3, 16 * 32, generator=generator) ** 4
    available = torch.randint(5, 17, (6, 3), generator=generator)
    place = torch.arange(16 * 32)
    scores[place >= available[..., None] * 32] = -torch.inf
    counts = parse_allocator(name).allocate(scores, 4, 32, available)
    assert int(counts.sum()) == 4 * 18
    assert bool((counts <= available).all())


@pytest.mark.parametrize("name", NAMES)
def test_what_must_stay_always_fits(name):
    """A window of three pages survives a steep pyramid and heads without votes."""
    scores = torch.zeros(8, 2, 16 * 32)
    scores[0, 0, :256] = 1.0
    scores[:, :, -70:] = torch.inf
    counts = parse_allocator(name).allocate(scores, 4, 32, full(scores))
    assert int(counts.sum()) == 4 * 16
    assert int(counts.min()) >= 3


def test_adaptive_allocators_follow_the_scores():
    scores = torch.zeros(2, 2, 8 * 32)
    scores[0, 1, : 6 * 32] = 1.0  # this head gets all the mass
    within = parse_allocator("head-adaptive").allocate(scores, 3, 32, full(scores))
    assert within[0, 1] > within[0, 0]
    assert within.sum(1).tolist() == [6, 6], "a layer keeps its own share"
    scores[1, 0, : 4 * 32] = 0.5
    across = parse_allocator("cross-layer").allocate(scores, 3, 32, full(scores))
    assert across[0, 1] > across[1, 0] > across[0, 0]


def test_pyramid_narrows_upwards():
    scores = torch.zeros(8, 2, 64 * 32)
    counts = parse_allocator("pyramid").allocate(scores, 8, 32, full(scores))
    per_layer = counts.sum(1).tolist()
    assert per_layer == sorted(per_layer, reverse=True)
    assert per_layer[0] > per_layer[-1]


def test_budgets_in_all_units():
    assert Budget.parse(512).resolve(4000, 1) == 512
    assert Budget.parse(0.25).resolve(4000, 1) == 1000
    assert Budget.parse("1MiB").resolve(4000, 1024) == 1024
    assert Budget.parse("0.5 GiB").num_bytes == 1 << 29


@pytest.mark.parametrize(
    "bad", [0, -3, 0.0, 1.5, "512", "3 parsec", "", True, None, []]
)
def test_impossible_budgets_are_refused(bad):
    with pytest.raises(ValueError):
        Budget.parse(bad)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"layer_weights": [3, 1]}, [[6, 6], [2, 2]]),
        ({"head_weights": [[1, 3], [2, 2]]}, [[2, 6], [4, 4]]),
    ],
)
def test_pages_follow_a_file(tmp_path, content, expected):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps(content))
    allocator = parse_allocator({"name": "file", "path": str(path)})
    assert allocator.problems(2, 2) == []
    scores = torch.zeros(2, 2, 16 * 32)
    assert allocator.allocate(scores, 4, 32, full(scores)).tolist() == expected
    assert "3" in allocator.problems(3, 2)[0]


@pytest.mark.parametrize(
    "text", ["no json", "{}", '{"layer_weights": [1, -1]}', '{"head_weights": [1]}']
)
def test_files_without_weights_are_refused(tmp_path, text):
    path = tmp_path / "weights.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        parse_allocator({"name": "file", "path": str(path)})
