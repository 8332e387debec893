"""From shares to whole pages with an exact sum."""

from __future__ import annotations

import torch

from vllm_kvplugins.scoring.selection import keep_top


def share_of_top(
    scores: torch.Tensor, pages: torch.Tensor, block_size: int, safeguard: float
) -> torch.Tensor:
    """Fractional pages per head: the safeguard, then a head's part of the top.

    Args:
        scores: float32 [groups, heads, slots]; ranking is within a group.
        pages: int64 [groups], what the heads of a group share.
        block_size: slots per page.
        safeguard: part of the group's average that every head is sure of.

    Returns:
        float64 [groups, heads], each group's sum its ``pages``.
    """
    groups, heads, slots = scores.shape
    top_slots = (pages * block_size).clamp(max=heads * slots)
    best = keep_top(scores.reshape(groups, -1), top_slots.to(scores.device))
    votes = best.view(groups, heads, slots).sum(-1).double().cpu()
    free = votes * (pages / top_slots)[:, None].double()
    return safeguard * (pages.double() / heads)[:, None] + (1 - safeguard) * free


def within_layers(
    scores: torch.Tensor,
    layer_pages: torch.Tensor,
    block_size: int,
    available: torch.Tensor,
    safeguard: float,
) -> torch.Tensor:
    """Whole pages per head where the pages of each layer are given.

    Args:
        scores: float32 [layers, kv_heads, slots].
        layer_pages: int64 [layers], their exact sums.
        available: int64 [layers, kv_heads].
        safeguard: as in ``share_of_top``; 1 shares a layer's pages equally.

    Returns:
        int64 [layers, kv_heads].
    """
    wanted = share_of_top(scores, layer_pages, block_size, safeguard)
    least = pages_that_must_stay(scores, block_size)
    return torch.stack(
        [
            round_to_pages(layer, int(total), most, few)
            for layer, total, most, few in zip(
                wanted, layer_pages, available, least, strict=True
            )
        ]
    )


def in_proportion(
    weights: torch.Tensor, total: int, most: torch.Tensor, least: torch.Tensor
) -> torch.Tensor:
    """Fractional pages in proportion to weights, within bounds.

    What a bound takes from an entry or gives to it, the others share by weight.

    Args:
        weights: float64 [n], >= 0.
        total: the requested sum, between the sums of the bounds.
        most, least: int64 [n].

    Returns:
        float64 [n]. The sum is ``total``, unless all entries with a weight are at
        their largest; the others then stay at their smallest.
    """
    positive = weights > 0
    if not bool(positive.any()):
        return least.double()
    low, high = 0.0, float((most[positive] / weights[positive]).max())
    for _ in range(200):  # halvings; a float64 has no more precision
        middle = (low + high) / 2
        given = (weights * middle).clamp(least, most)
        low, high = (middle, high) if float(given.sum()) < total else (low, middle)
    return (weights * high).clamp(least, most)


def pages_that_must_stay(scores: torch.Tensor, block_size: int) -> torch.Tensor:
    """int64 [layers, kv_heads], >= 1: pages for the slots marked ``inf``."""
    slots = torch.isposinf(scores).sum(-1).cpu()
    return (-(-slots // block_size)).clamp(min=1)


def round_to_pages(
    wanted: torch.Tensor, total: int, most: torch.Tensor, least: torch.Tensor
) -> torch.Tensor:
    """Whole pages near ``wanted`` with an exact sum (largest remainder).

    Args:
        wanted: float64, any shape; fractional pages.
        total: the exact requested sum.
        most: int64, shape of ``wanted``; largest entries.
        least: int64, shape of ``wanted``; smallest entries, each >= 1.

    Returns:
        int64, shape of ``wanted``. Deterministic: ties go to the lower index.

    Raises:
        ValueError: no such rounding exists.
    """
    flat, high, low = wanted.reshape(-1).double(), most.reshape(-1), least.reshape(-1)
    if not int(low.sum()) <= total <= int(high.sum()) or bool((low > high).any()):
        raise ValueError(
            f"{total} pages do not fit heads with {low.tolist()} to {high.tolist()} "
            "pages"
        )
    counts = flat.floor().long().maximum(low).minimum(high)
    while (missing := total - int(counts.sum())) != 0:
        # Furthest from its wish first; one page each, as often as needed.
        distance = flat - counts
        movable = counts < high if missing > 0 else counts > low
        order = (distance if missing > 0 else -distance).masked_fill(
            ~movable, -torch.inf
        )
        chosen = order.sort(descending=True, stable=True).indices
        chosen = chosen[: min(abs(missing), int(movable.sum()))]
        counts[chosen] += 1 if missing > 0 else -1
    return counts.view(wanted.shape)
