"""Selects slots by score, with an exact count per row."""

from __future__ import annotations

import torch

# Rows of so many different counts are told apart.
_FEW_COUNTS = 4


def keep_top(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mark the ``counts`` best slots of every row; ties go to the lower slot.

    Args:
        scores: float32 [..., slots]; can contain ``inf`` and ``-inf``, but not NaN.
        counts: int64 [...], number of slots that each row keeps, 0 to ``slots``.

    Returns:
        bool [..., slots] with exactly ``counts`` True per row. The same input gives the
        same output on every device.

    Raises:
        ValueError: a score is NaN, or a count is out of range.

    Cost: two passes over the scores, and one top-k of the count, or of the slots that a
        row drops if they are fewer. Slots behind the last one with a score above
        ``-inf`` cost nothing if few different counts occur.
    """
    slots = scores.shape[-1]
    if bool(torch.isnan(scores).any()):
        raise ValueError("scores contain NaN; return numbers or infinities")
    if counts.numel() and not 0 <= int(counts.min()) <= int(counts.max()) <= slots:
        raise ValueError(f"cannot keep {counts.tolist()} of {slots} slots")
    rows, of_row = scores.reshape(-1, slots), counts.reshape(-1)
    distinct = of_row.unique().tolist()
    if len(distinct) > _FEW_COUNTS:
        return _keep(rows, of_row).view(scores.shape)
    # Rows of one count together: layers that keep all of a long context would otherwise
    # make all others as wide.
    keep = torch.zeros_like(rows, dtype=torch.bool)
    for count in distinct:
        group = (of_row == count).nonzero()[:, 0]
        own = rows[group]
        width = max(count, _width(own))
        if width:
            keep[group, :width] = _keep(own[:, :width], of_row[group])
    return keep.view(scores.shape)


def _width(scores: torch.Tensor) -> int:
    """Slots up to the last one that has a score above -inf in any row."""
    used = (scores > -torch.inf).any(0).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def _keep(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """See :func:`keep_top`; scores are [rows, slots], counts [rows]."""
    threshold = _worst_kept(scores, counts)
    above = scores > threshold
    missing = counts.unsqueeze(-1) - above.sum(-1, keepdim=True)
    # topk returns any of several equal scores; keep those in the lower slots.
    ties = scores == threshold
    return above | (ties & (ties.cumsum(-1) <= missing))


def _worst_kept(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[rows, 1]: the score of rank ``counts``, the best one's rank being 1.

    A count of 0 gets the largest score.
    """
    slots = scores.shape[-1]
    largest = max(int(counts.max()), 1)
    dropped = min(slots - int(counts.min()) + 1, slots)
    if largest <= dropped:
        best = scores.topk(largest, dim=-1, sorted=True).values
        return best.gather(-1, (counts - 1).clamp(min=0).unsqueeze(-1))
    worst = scores.topk(dropped, dim=-1, largest=False, sorted=True).values
    return worst.gather(-1, (slots - counts).clamp(max=slots - 1).unsqueeze(-1))
