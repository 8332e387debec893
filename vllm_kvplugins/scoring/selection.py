"""Selects slots by score, with an exact count per row."""

from __future__ import annotations

import torch


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

    Cost: one top-k of the largest count, or of the slots that the row with the smallest
        count drops, whichever is smaller; two passes over the scores.
    """
    slots = scores.shape[-1]
    if bool(torch.isnan(scores).any()):
        raise ValueError("scores contain NaN; return numbers or infinities")
    largest = int(counts.max()) if counts.numel() else 0
    if largest > slots or (counts.numel() and int(counts.min()) < 0):
        raise ValueError(f"cannot keep {counts.tolist()} of {slots} slots")
    if largest == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = _worst_kept(scores, counts, largest)
    above = scores > threshold
    missing = counts.unsqueeze(-1) - above.sum(-1, keepdim=True)
    # topk returns any of several equal scores; keep those in the lower slots.
    ties = scores == threshold
    return above | (ties & (ties.cumsum(-1) <= missing))


def _worst_kept(
    scores: torch.Tensor, counts: torch.Tensor, largest: int
) -> torch.Tensor:
    """[..., 1]: the score of rank ``counts``, the best one's rank being 1.

    Args:
        largest: the largest count, at least 1. A count of 0 gets the largest score.
    """
    slots = scores.shape[-1]
    dropped = min(slots - int(counts.min()) + 1, slots)
    if largest <= dropped:
        best = scores.topk(largest, dim=-1, sorted=True).values
        return best.gather(-1, (counts - 1).clamp(min=0).unsqueeze(-1))
    worst = scores.topk(dropped, dim=-1, largest=False, sorted=True).values
    return worst.gather(-1, (slots - counts).clamp(max=slots - 1).unsqueeze(-1))
