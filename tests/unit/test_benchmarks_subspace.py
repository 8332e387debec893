"""benchmarks/kernels/subspace.py: both times are for the same rank; errors are
correct."""

from __future__ import annotations

import sys

import pytest
import subspace
import torch

SEED = 20261122


@pytest.fixture
def rows() -> torch.Tensor:
    print("seed", SEED)
    return subspace.make("independent", 64, 64, torch.Generator().manual_seed(SEED))


def test_both_times_are_of_one_rank(rows: torch.Tensor):
    for rank in (1, 16, 30):
        factors = subspace.decompose(rows, 64, subspace.energy_of(rows, rank))
        assert factors.ranks.tolist() == [rank]


@pytest.mark.usefixtures("compiled")
def test_losses_are_those_of_the_subspace(rows: torch.Tensor):
    assert 0.1 < subspace.loss_percent(rows, 16) < 4
    # 40 + 10 dimensions are more than half of 64, so there is no subspace
    assert abs(subspace.loss_percent(rows, 40)) < 1e-3


def test_it_prints_a_table(monkeypatch, capsys):
    small = ["subspace.py", "--case", "32x32:4", "--matrices", "2"]
    monkeypatch.setattr(sys, "argv", [*small, "--repetitions", "2"])
    threads = torch.get_num_threads()
    subspace.main()
    torch.set_num_threads(threads)
    head, _, row = capsys.readouterr().out.strip().splitlines()[-3:]
    assert row.startswith("| 32 x 32 | 4 | ")
    assert head.count("|") == row.count("|")
