"""Matrices with a known spectrum, and spans of them."""

from __future__ import annotations

import torch


def make_rows(
    kind: str, planes: int, tokens: int, dim: int, random: torch.Generator
) -> torch.Tensor:
    """float32 [planes, tokens, dim] with a flat, low-rank or decaying spectrum."""
    if kind == "low-rank":
        left_factors = torch.randn(planes, tokens, 5, generator=random)
        return left_factors @ torch.randn(planes, 5, dim, generator=random)
    rows = torch.randn(planes, tokens, dim, generator=random)
    return rows * 0.85 ** torch.arange(dim) if kind == "decaying" else rows


def spans_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Spans with two tokens between them that belong to no span."""
    sizes = torch.tensor(lengths)
    return (sizes + 2).cumsum(0) - sizes - 2, sizes


def whole(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0]), torch.tensor([tokens])
