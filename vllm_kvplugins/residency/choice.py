"""What stays in a compaction, from scores and an allocator."""

from __future__ import annotations

import torch

from vllm_kvplugins.budgets import PageAllocator
from vllm_kvplugins.residency.plan import Compaction
from vllm_kvplugins.selection import keep_top


def fixed_slots(
    scores: torch.Tensor, fixed: torch.Tensor | None, block_size: int
) -> torch.Tensor:
    """bool [rows, slots]: those that stay whatever their scores."""
    layers, heads, slots = scores.shape
    if fixed is None:
        return torch.zeros(
            layers * heads, slots, dtype=torch.bool, device=scores.device
        )
    return torch.arange(slots, device=scores.device) < fixed[:, None] * block_size


def choose_slots(
    allocator: PageAllocator,
    compaction: Compaction,
    scores: torch.Tensor,
    competing: torch.Tensor,
    fixed: torch.Tensor | None,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slots stay, and how many pages each row has then.

    Args:
        scores: float32 [layers, kv_heads, slots].
        competing: int64 [layers * kv_heads], pages that each row has; the landing
            zone before this one first.
        fixed: int64 of that shape, pages of it that stay whole whatever their
            scores; None = none.

    Returns:
        bool [rows, slots] and int64 [rows].
    """
    layers, heads = scores.shape[:2]
    if fixed is None:
        fixed = torch.zeros_like(competing)
    stays = fixed_slots(scores, fixed, block_size)
    scores = scores.masked_fill(stays.view(scores.shape), -torch.inf)
    counts = allocator.allocate(
        scores,
        len(compaction.zone) - compaction.fixed_blocks,
        block_size,
        (competing - fixed).view(layers, heads).cpu(),
    )
    counts = counts.to(scores.device).view(-1)
    keep = keep_top(scores.view(layers * heads, -1), counts * block_size)
    return keep | stays, counts + fixed
