"""Allocators that look at scores, at the layer's place, or into a file."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.budgets.base import PageAllocator
from vllm_kvplugins.budgets.rounding import (
    pages_that_must_stay,
    round_to_pages,
    share_of_top,
    within_layers,
)


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

    PyramidKV, section 3.2: budgets fall linearly from layer to layer; the top
    layer gets ``1 / beta`` of the average, the bottom one what balances it. As in
    its published code, what must stay (the window) comes on top of the shares.
    """

    name: ClassVar[str] = "pyramid"
    beta: float = Field(default=20.0, gt=1.0, description="Average over top layer.")

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers, heads = scores.shape[:2]
        must = torch.isposinf(scores).sum(-1).double().mean().item() / block_size
        free = max(pages_per_head - must, 0.0)
        top = free / self.beta
        share = must + torch.linspace(2 * free - top, top, layers).double()
        wanted = share[:, None].expand(layers, heads).contiguous()
        total = pages_per_head * layers * heads
        least = pages_that_must_stay(scores, block_size)
        return round_to_pages(wanted, total, available, least)


class HeadAdaptive(PageAllocator):
    """Within a layer, pages go where the best scores are (Ada-KV).

    arXiv:2407.11550, algorithm 1: the layer's top tokens over all its heads
    decide the heads' shares; each head is sure of ``safeguard`` of the average, and
    the rest is shared. Differs from kvpress, where the top tokens decide alone and
    only heads below the safeguard are lifted to it.
    """

    name: ClassVar[str] = "head-adaptive"
    safeguard: float = Field(
        default=0.2, ge=0.0, le=1.0, description="Share that every head is sure of."
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
    """One ranking over all layers and KV heads, each sure of ``safeguard``."""

    name: ClassVar[str] = "cross-layer"
    safeguard: float = Field(
        default=0.2, ge=0.0, le=1.0, description="Share that every head is sure of."
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
        wanted = share_of_top(flat, torch.tensor([total]), block_size, self.safeguard)
        least = pages_that_must_stay(scores, block_size).reshape(-1)
        counts = round_to_pages(wanted[0], total, available.reshape(-1), least)
        return counts.view(layers, heads)


class FileWeights(PageAllocator):
    """Pages in proportion to weights from a JSON file.

    ``{"layer_weights": [w, ...]}``, one per layer, or ``{"head_weights":
    [[w, ...], ...]}``, one per KV head of each layer.
    """

    name: ClassVar[str] = "file"
    path: Path = Field(description="JSON file with layer_weights or head_weights.")

    @cached_property
    def weights(self) -> list[list[float]]:
        """One list per layer: a weight per KV head, or a single one for all.

        Raises:
            ValueError: the file cannot be read or does not hold weights.
        """
        return _read_weights(self.path)

    def model_post_init(self, context: Any) -> None:
        assert self.weights  # a bad file is refused when it is named, not used

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        widths = {len(row) for row in self.weights}
        found = []
        if len(self.weights) != num_layers:
            found.append(
                f"{self.path} has weights for {len(self.weights)} layers, the model "
                f"has {num_layers}; make a file for this model"
            )
        if widths not in ({1}, {num_kv_heads}):
            found.append(
                f"{self.path} has weights for {sorted(widths)} KV heads per layer, "
                f"this rank has {num_kv_heads}; give one per head, or layer_weights"
            )
        return found

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
        least = pages_that_must_stay(scores, block_size)
        wanted = weights * (total / weights.sum())
        return round_to_pages(wanted, total, available, least)


def _read_weights(path: Path) -> list[list[float]]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read weights from {path}: {error}") from error
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
        raise ValueError(
            f"{path} must hold positive numbers as 'layer_weights' (a list) or "
            "'head_weights' (a list of lists)"
        )
    return weights
