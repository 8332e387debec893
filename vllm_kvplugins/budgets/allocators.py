"""Allocators that use scores, the index of the layer, or weights from a file."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.budgets.base import PageAllocator
from vllm_kvplugins.budgets.rounding import (
    required_pages,
    round_to_pages,
    share_of_top,
    within_layers,
)
from vllm_kvplugins.errors import KVPolicyError, coded


class Uniform(PageAllocator):
    """The same number of pages for every layer and KV head."""

    name: ClassVar[str] = "uniform"
    uniform: ClassVar[bool] = True

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        shape = scores.shape[:2]
        return torch.full(shape, pages_per_head, dtype=torch.int64)


class Pyramid(PageAllocator):
    """More pages for lower layers, fewer for higher ones (arXiv:2406.02069).

    PyramidKV, section 3.2: budgets fall linearly from layer to layer. The highest layer
    gets ``1 / beta`` of the average, and layer 0 as much more. As in the published
    code, tokens that must stay (the window) are added to every share.
    """

    name: ClassVar[str] = "pyramid"
    beta: float = Field(
        default=20.0, gt=1.0, description="Average share / share of the highest layer."
    )

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers, heads = scores.shape[:2]
        required = torch.isposinf(scores).sum(-1).double().mean().item() / block_size
        free = max(pages_per_head - required, 0.0)
        highest = free / self.beta
        share = required + torch.linspace(2 * free - highest, highest, layers).double()
        shares = share[:, None].expand(layers, heads).contiguous()
        total = pages_per_head * layers * heads
        return round_to_pages(
            shares, total, available, required_pages(scores, block_size)
        )


class HeadAdaptive(PageAllocator):
    """Within a layer, KV heads with high scores get more pages (Ada-KV).

    arXiv:2407.11550, algorithm 1: each head gets ``safeguard`` of the average. The
    highest scores of the layer, over all its heads, determine how the heads share the
    rest. Differs from kvpress, where these scores determine all shares, and only heads
    below the safeguard are raised to it.
    """

    name: ClassVar[str] = "head-adaptive"
    safeguard: float = Field(
        default=0.2,
        ge=0.0,
        le=1.0,
        description="Minimum of every head, as a share of the average.",
    )

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers, heads = scores.shape[:2]
        pages = torch.full((layers,), pages_per_head * heads)
        return within_layers(scores, pages, block_size, available, self.safeguard)


class CrossLayer(PageAllocator):
    """One ranking over all layers and KV heads; each gets at least ``safeguard``."""

    name: ClassVar[str] = "cross-layer"
    safeguard: float = Field(
        default=0.2,
        ge=0.0,
        le=1.0,
        description="Minimum of every head, as a share of the average.",
    )

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers, heads, slots = scores.shape
        flat = scores.reshape(1, layers * heads, slots)
        total = pages_per_head * layers * heads
        shares = share_of_top(flat, torch.tensor([total]), block_size, self.safeguard)
        minimum = required_pages(scores, block_size).reshape(-1)
        pages = round_to_pages(shares[0], total, available.reshape(-1), minimum)
        return pages.view(layers, heads)


class FileWeights(PageAllocator):
    """Pages in proportion to weights from a JSON file.

    ``{"layer_weights": [w, ...]}`` has one weight per layer, ``{"head_weights":
    [[w, ...], ...]}`` one per KV head of each layer.
    """

    name: ClassVar[str] = "file"
    path: Path = Field(description="JSON file with layer_weights or head_weights.")

    @cached_property
    def weights(self) -> list[list[float]]:
        """One list per layer: a weight per KV head, or a single one for all.

        Raises:
            KVPolicyError: the file cannot be read or contains no weights.
        """
        return _read_weights(self.path)

    def model_post_init(self, context: Any) -> None:
        assert self.weights  # read the file now, to refuse a bad one at start-up

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        widths = {len(row) for row in self.weights}
        problems = []
        if len(self.weights) != num_layers:
            problems.append(
                f"{self.path} has weights for {len(self.weights)} layers, the model "
                f"has {num_layers}; make a file for this model"
            )
        if widths not in ({1}, {num_kv_heads}):
            problems.append(
                f"{self.path} has weights for {sorted(widths)} KV heads per layer, "
                f"this rank has {num_kv_heads}; give one per head, or layer_weights"
            )
        return [coded("KVP116", problem) for problem in problems]

    def facts(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers, heads = scores.shape[:2]
        weights = torch.tensor(self.weights, dtype=torch.float64).expand(layers, heads)
        total = pages_per_head * layers * heads
        shares = weights * (total / weights.sum())
        return round_to_pages(
            shares, total, available, required_pages(scores, block_size)
        )


def _read_weights(path: Path) -> list[list[float]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise KVPolicyError(
            coded(
                "KVP115",
                f"cannot read weights from {path}: {error}; give a JSON file with "
                "weights",
            )
        ) from error
    rows: Any = None
    if isinstance(content, dict) and "layer_weights" in content:
        rows = [[weight] for weight in content["layer_weights"]]
    elif isinstance(content, dict):
        rows = content.get("head_weights")
    try:
        weights = [[float(weight) for weight in row] for row in rows]
    except (TypeError, ValueError):
        weights = []
    flat = [weight for row in weights for weight in row]
    if not flat or not all(0 < weight < float("inf") for weight in flat):
        raise KVPolicyError(
            coded(
                "KVP115",
                f"{path} must contain positive numbers as 'layer_weights' (a list) or "
                "'head_weights' (a list of lists)",
            )
        )
    return weights
