"""What stays in a compaction, from scores and an allocator."""

from __future__ import annotations

import torch

from vllm_kvplugins.budgets import PageAllocator
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.scoring.selection import keep_top


def choose_slots(
    allocator: PageAllocator,
    compaction: Compaction,
    scores: torch.Tensor,
    competing: torch.Tensor,
    fixed: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slots stay, and how many pages each row has then.

    Args:
        scores: float32 [layers, kv_heads, slots]; -inf in pages that stay whole.
        competing: int64 [layers * kv_heads], pages that each row has; the landing
            zone before this one first.
        fixed: int64 of that shape, pages of it that stay whole.

    Returns:
        bool [rows, slots] and int64 [rows].
    """
    layers, heads, slots = scores.shape
    counts = allocator.allocate(
        scores,
        len(compaction.retained) - compaction.fixed_blocks,
        block_size,
        (competing - fixed).view(layers, heads).cpu(),
    )
    counts = counts.to(scores.device).view(-1)
    keep = keep_top(scores.view(layers * heads, -1), counts * block_size)
    stays = torch.arange(slots, device=scores.device) < fixed[:, None] * block_size
    return keep | stays, counts + fixed
