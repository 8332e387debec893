"""The choices of benchmarks/research/page_estimates.py."""

from __future__ import annotations

import page_estimates
import pytest
import torch
from page_estimates import (
    Head,
    best_of_any,
    by_corners,
    by_deviations,
    by_mass,
    by_mean,
    covered,
    divided,
    until_coverage,
    warm_start,
)


@pytest.fixture
def head() -> Head:
    """Pages of keys around a center each; in page 3, one key is far from the others."""
    generator = torch.Generator().manual_seed(20261127)
    centers = torch.randn(12, 1, 8, generator=generator)
    keys = (centers + 0.1 * torch.randn(12, 16, 8, generator=generator)).flatten(0, 1)
    keys[:, 0] = 0.0
    keys[3 * 16 + 5, 0] = 4.0
    queries = torch.zeros(4, 2, 8)
    queries[..., 0] = 3.0
    queries[..., 1] = 0.5
    return Head(keys, torch.arange(192).view(12, 16), queries)


def test_pages_hold_each_key_once_and_similar_ones_together(head):
    order = torch.randperm(192, generator=torch.Generator().manual_seed(1))
    pages = divided(head.keys[order])
    assert torch.equal(pages.flatten().sort().values, torch.arange(192))
    spread = head.keys[order][pages].var(1).sum()
    assert spread < 0.5 * head.keys[order].view(12, 16, 8).var(1).sum()


@pytest.mark.parametrize("estimate", [by_deviations, by_corners, by_mass])
def test_only_the_mean_misses_a_page_with_one_good_key(head, estimate):
    assert estimate(head)[0, 0].argmax() == 3
    assert by_mean(head)[0, 0].argmax() != 3
    best = head.votes(0).argmax()
    assert best == 3 * 16 + 5


def test_all_pages_cover_everything_and_few_pages_less(head, monkeypatch):
    monkeypatch.setattr(page_estimates, "TOKENS", 16)
    assert covered(head, 0, torch.arange(12)) == pytest.approx(1.0)
    assert covered(head, 0, torch.tensor([0])) < 0.5


def test_a_warm_start_reads_the_pages_of_the_step_before(head, monkeypatch):
    monkeypatch.setattr(page_estimates, "TOKENS", 1)
    cold = list(best_of_any(head, by_mean, 2))
    assert all(3 not in pages for pages in cold)
    head.queries[0, :, 0] = 0.0  # the first step looks elsewhere
    head.queries[0, 0] = head.keys[7 * 16]
    warm = list(warm_start(head, by_deviations, 1))
    assert 7 in warm[0]
    assert 7 in warm[1]


def test_more_coverage_reads_more_pages(head):
    read = [
        len(next(iter(until_coverage(head, by_mass, share)))) for share in (0.5, 0.99)
    ]
    assert 1 <= read[0] < read[1]
