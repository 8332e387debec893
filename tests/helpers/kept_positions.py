"""Positions that a policy kept, compared with scores of a reference."""

from __future__ import annotations

import torch

BLOCK = 32


def agreement(
    kept: list, scores: list, tokens: int, sinks: int = 4, window: int = 32
) -> float:
    """Share of positions on which policy and reference agree, kept or not.

    The tokens of the partial last block stay, whatever their scores.

    Args:
        kept: [layers][kv_heads][positions].
        scores: [layers][kv_heads][tokens].
        sinks, window: first and newest tokens that the policy always keeps.
    """
    wanted = torch.tensor(scores)
    wanted[..., :sinks] = torch.inf
    wanted[..., tokens - window :] = torch.inf
    tail = tokens % BLOCK
    is_kept = torch.zeros_like(wanted, dtype=torch.bool)
    for layer, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            is_kept[layer, head, positions] = True
    count = int(is_kept.sum()) // is_kept[..., 0].numel() - tail
    best = wanted[..., : tokens - tail].topk(count, dim=-1).indices
    expected = torch.zeros_like(is_kept).scatter(-1, best, True)
    expected[..., tokens - tail :] = True
    return float((is_kept == expected).float().mean())
