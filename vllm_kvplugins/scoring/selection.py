"""Selection: which slots stay, given scores and an exact count per row."""

from __future__ import annotations

import torch


def keep_top(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mark the ``counts`` best slots of every row; ties go to the lower slot.

    Args:
        scores: float32 [..., slots]; may hold ``inf`` and ``-inf``, never NaN.
        counts: int64 [...], how many slots each row keeps, 0 to ``slots``.

    Returns:
        bool [..., slots] with exactly ``counts`` True per row. The same input
        gives the same output on every device.

    Raises:
        ValueError: a score is NaN, or a count is out of range.

    Cost: one top-k of the largest count, two passes over the scores.
    """
    slots = scores.shape[-1]
    if bool(torch.isnan(scores).any()):
        raise ValueError("scores hold NaN; a policy must return numbers or infinities")
    most = int(counts.max()) if counts.numel() else 0
    if most > slots or (counts.numel() and int(counts.min()) < 0):
        raise ValueError(f"cannot keep {counts.tolist()} of {slots} slots")
    if most == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    best = scores.topk(most, dim=-1, sorted=True).values
    threshold = best.gather(-1, (counts - 1).clamp(min=0).unsqueeze(-1))
    above = scores > threshold
    missing = counts.unsqueeze(-1) - above.sum(-1, keepdim=True)
    # top-k leaves open which of several equal scores it returns; the lower do.
    ties = scores == threshold
    return above | (ties & (ties.cumsum(-1) <= missing))
