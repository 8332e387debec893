"""Turns shares into whole pages with an exact sum."""

from __future__ import annotations

import torch

from vllm_kvplugins.scoring.selection import keep_top


def share_of_top(
    scores: torch.Tensor, pages: torch.Tensor, block_size: int, safeguard: float
) -> torch.Tensor:
    """Fractional pages per head: the safeguard, and a share of the highest scores.

    Args:
        scores: float32 [groups, heads, slots]; each group has its own ranking.
        pages: int64 [groups], pages that the heads of a group share.
        block_size: slots per page.
        safeguard: minimum of every head, as a share of the average of its group.

    Returns:
        float64 [groups, heads]; the sum of each group is its ``pages``.
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
    """Whole pages per head for given pages per layer.

    Args:
        scores: float32 [layers, kv_heads, slots].
        layer_pages: int64 [layers], exact sums.
        available: int64 [layers, kv_heads], largest number of pages.
        safeguard: see ``share_of_top``; 1 gives all heads of a layer equal shares.

    Returns:
        int64 [layers, kv_heads].
    """
    shares = share_of_top(scores, layer_pages, block_size, safeguard)
    minimum = required_pages(scores, block_size)
    return torch.stack(
        [
            round_to_pages(layer_shares, int(total), high, low)
            for layer_shares, total, high, low in zip(
                shares, layer_pages, available, minimum, strict=True
            )
        ]
    )


def in_proportion(
    weights: torch.Tensor, total: int, maximum: torch.Tensor, minimum: torch.Tensor
) -> torch.Tensor:
    """Fractional pages in proportion to weights, within bounds.

    Entries within their bounds share the rest by weight.

    Args:
        weights: float64 [n], >= 0.
        total: the requested sum, between the sums of the bounds.
        maximum, minimum: int64 [n].

    Returns:
        float64 [n]. The sum is ``total``, unless all entries with a weight are at their
        maximum; the others are then at their minimum.
    """
    positive = weights > 0
    if not bool(positive.any()):
        return minimum.double()
    # Bisect the factor of the weights.
    low, high = 0.0, float((maximum[positive] / weights[positive]).max())
    for _ in range(200):  # more than the precision of a float64 needs
        middle = (low + high) / 2
        pages = (weights * middle).clamp(minimum, maximum)
        low, high = (middle, high) if float(pages.sum()) < total else (low, middle)
    return (weights * high).clamp(minimum, maximum)


def required_pages(scores: torch.Tensor, block_size: int) -> torch.Tensor:
    """Pages for the tokens that must stay: int64 [layers, kv_heads], at least 1."""
    slots = torch.isposinf(scores).sum(-1).cpu()
    return (-(-slots // block_size)).clamp(min=1)


def round_to_pages(
    shares: torch.Tensor, total: int, maximum: torch.Tensor, minimum: torch.Tensor
) -> torch.Tensor:
    """Whole pages near ``shares`` with an exact sum (largest remainder method).

    Args:
        shares: float64, any shape; fractional pages.
        total: the exact sum.
        maximum: int64, same shape.
        minimum: int64, same shape, each at least 1.

    Returns:
        int64, same shape. Deterministic: ties go to the lower index.

    Raises:
        ValueError: no such rounding exists.
    """
    flat, high = shares.reshape(-1).double(), maximum.reshape(-1)
    low = minimum.reshape(-1)
    if not int(low.sum()) <= total <= int(high.sum()) or bool((low > high).any()):
        raise ValueError(
            f"{total} pages do not fit heads that take {low.tolist()} to "
            f"{high.tolist()} pages"
        )
    counts = flat.floor().long().maximum(low).minimum(high)
    while (missing := total - int(counts.sum())) != 0:
        # Change entries by one page, those farthest from their share first. Repeat
        # until the sum is exact.
        distance = flat - counts
        movable = counts < high if missing > 0 else counts > low
        order = (distance if missing > 0 else -distance).masked_fill(
            ~movable, -torch.inf
        )
        chosen = order.sort(descending=True, stable=True).indices
        chosen = chosen[: min(abs(missing), int(movable.sum()))]
        counts[chosen] += 1 if missing > 0 else -1
    return counts.view(shares.shape)
