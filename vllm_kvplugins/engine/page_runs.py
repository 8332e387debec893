"""Page tables as one list of all pages, which some kernels want."""

from __future__ import annotations

import torch


def page_runs(
    lengths: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sequence's pages begin in one list of all, and how full its last is.

    Args:
        lengths: int32 [sequences], on the host.

    Returns:
        int32 [sequences + 1], int32 [sequences]; 0 for an empty sequence.
    """
    used = (lengths + page_size - 1) // page_size
    start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(used, 0, out=start[1:])
    return start, (lengths - (used - 1).clamp_(min=0) * page_size).int()


def page_indices(pages: torch.Tensor, start: torch.Tensor, total: int) -> torch.Tensor:
    """Page lists behind each other.

    Args:
        pages: int32 [sequences, most_pages].
        start: int32 [sequences + 1], of :func:`page_runs`, on the same device.
        total: its last number.

    Returns:
        int32 [total].

    Cost: a few launches; no host sync.
    """
    place = torch.arange(total, dtype=torch.int32, device=pages.device)
    owner = torch.bucketize(place, start[1:], right=True)
    column = place - start[owner]
    return pages.reshape(-1)[owner * pages.shape[1] + column]
