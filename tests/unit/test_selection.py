"""Which slots stay: as many as asked for, the best ones, ties to the lower slot."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins.scoring.selection import keep_top

SLOTS = 40


def kept_by_sorting(scores: torch.Tensor, count: int) -> list[bool]:
    order = sorted(range(len(scores)), key=lambda slot: (-float(scores[slot]), slot))
    return [slot in order[:count] for slot in range(len(scores))]


# Few slots stay, nearly all, or a different number in each row.
@pytest.mark.parametrize(
    "counts",
    [
        [0, 0, 0],
        [1, 1, 1],
        [3, 0, 5],
        [20, 20, 20],
        [35, 38, 36],
        [39, 39, 39],
        [40, 40, 40],
        [0, 40, 17],
        [40, 9, 9],
        [1, 2, 3, 4, 38, 39, 40],
    ],
    ids=str,
)
@pytest.mark.parametrize("values", [3, 1000], ids=["many ties", "few ties"])
def test_the_best_slots_stay(counts, values):
    generator = torch.Generator().manual_seed(values)
    scores = torch.randint(values, (len(counts), SLOTS), generator=generator).float()
    scores[:, 5:8], scores[:, 11:13] = torch.inf, -torch.inf
    keep = keep_top(scores, torch.tensor(counts))
    expected = [
        kept_by_sorting(row, count) for row, count in zip(scores, counts, strict=True)
    ]
    assert keep.tolist() == expected


def test_rows_of_different_lengths_are_kept_as_if_alone():
    """Short rows end with -inf; if too few slots remain, the lowest of these stay."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 3, SLOTS, generator=generator)
    scores[1, :, 9:] = -torch.inf
    counts = torch.tensor([[SLOTS, 38, 38], [7, 7, 12]])
    keep = keep_top(scores, counts)
    for row, count, kept in zip(
        scores.flatten(0, 1), counts.flatten().tolist(), keep.flatten(0, 1), strict=True
    ):
        assert kept.tolist() == kept_by_sorting(row, count)


@pytest.mark.parametrize("counts", [[-1, 3], [3, SLOTS + 1]], ids=str)
def test_a_count_out_of_range_is_refused(counts):
    with pytest.raises(ValueError, match="cannot keep"):
        keep_top(torch.zeros(2, SLOTS), torch.tensor(counts))
