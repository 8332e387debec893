"""Budgets: how much a request keeps, and how layers and KV heads share it.

A request that keeps M blocks owns M * L * H pages, and any (layer, KV head)
may use any of them. Allocators therefore hand out whole pages whose sum is
exactly M * L * H: what is freed does not depend on who got how much.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from vllm_kvplugins.selection import keep_top

_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_bytes(value: Any) -> int | None:
    """Read an amount of memory: ``"8GiB"``, or bytes as a number; None stays.

    Raises:
        ValueError: anything else.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*", str(value).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f"an amount of memory looks like '8GiB' (B, KiB, MiB, GiB), got {value!r}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens, a share of the prompt, or bytes per request; exactly one is set."""

    tokens: int | None = None
    fraction: float | None = None
    num_bytes: int | None = None

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """Read a budget as a user writes it: ``512``, ``0.25`` or ``"64MiB"``.

        Raises:
            ValueError: anything else, or a budget of nothing.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"a budget is 512, 0.25 or '64MiB', got {value!r}")
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"a budget of {value} tokens keeps nothing; give >= 1")
            return cls(tokens=value)
        if isinstance(value, float):
            if not 0 < value <= 1:
                raise ValueError(
                    f"a fractional budget lies in (0, 1], got {value}; for tokens "
                    "write a whole number"
                )
            return cls(fraction=value)
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*", value.lower())
        if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
            raise ValueError(
                "a budget in bytes looks like '64MiB' (B, KiB, MiB, GiB), got "
                f"{value!r}"
            )
        return cls(num_bytes=int(float(match[1]) * _UNITS[match[2]]))

    @classmethod
    def parse_optional(cls, value: Any) -> Budget | None:
        """As ``parse``, but None stays None."""
        return None if value is None else cls.parse(value)

    def resolve(self, prompt_tokens: int, kv_bytes_per_token: int) -> int:
        """Tokens per KV head for a prompt of ``prompt_tokens``; at least 1."""
        if self.tokens is not None:
            return self.tokens
        if self.fraction is not None:
            return max(int(self.fraction * prompt_tokens), 1)
        assert self.num_bytes is not None
        return max(self.num_bytes // kv_bytes_per_token, 1)

    def __str__(self) -> str:
        if self.tokens is not None:
            return f"{self.tokens} tokens"
        if self.fraction is not None:
            return f"{self.fraction:g} of the prompt"
        return f"{self.num_bytes} bytes"


class PageAllocator(BaseModel, ABC):
    """Shares M * L * H pages between layers and KV heads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    # Whether every (layer, KV head) always gets the same number of pages.
    uniform: ClassVar[bool] = False

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        """Why this allocator does not fit a model of this shape, if so."""
        return []

    @abstractmethod
    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        """Pages per (layer, KV head).

        Args:
            scores: float32 [layers, kv_heads, slots]; slots is a multiple of
                ``block_size``, ``inf`` marks what must stay.
            pages_per_head: M, the average.
            block_size: slots per page.
            available: int64 [layers, kv_heads], pages that each row has to
                choose from; nobody gets more.

        Returns:
            int64 [layers, kv_heads], each in [1, available], with sum exactly
            ``M * layers * kv_heads``.
        """


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
        least = _pages_that_must_stay(scores, block_size)
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
        wanted = _share_of_top(scores, pages_per_head, block_size, self.safeguard)
        per_layer = pages_per_head * scores.shape[1]
        least = _pages_that_must_stay(scores, block_size)
        return torch.stack(
            [
                round_to_pages(layer, per_layer, most, few)
                for layer, most, few in zip(wanted, available, least, strict=True)
            ]
        )


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
        wanted = _share_of_top(flat, pages_per_head, block_size, self.safeguard)
        total = pages_per_head * layers * heads
        least = _pages_that_must_stay(scores, block_size).reshape(-1)
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
        least = _pages_that_must_stay(scores, block_size)
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


ALLOCATORS: dict[str, type[PageAllocator]] = {
    cls.name: cls for cls in (Uniform, Pyramid, HeadAdaptive, CrossLayer, FileWeights)
}


def parse_allocator(value: Any) -> PageAllocator:
    """Read an allocator: a name, or ``{"name": …, options…}``.

    Raises:
        ValueError: no such allocator, or options that it does not have.
    """
    if isinstance(value, PageAllocator):
        return value
    options = {"name": value} if isinstance(value, str) else value
    if not isinstance(options, dict) or options.get("name") not in ALLOCATORS:
        raise ValueError(
            f"unknown allocator {value!r}; available: {', '.join(sorted(ALLOCATORS))}"
        )
    rest = {key: option for key, option in options.items() if key != "name"}
    return ALLOCATORS[options["name"]].model_validate(rest)


def _share_of_top(
    scores: torch.Tensor, pages_per_head: int, block_size: int, safeguard: float
) -> torch.Tensor:
    """Fractional pages per head: the safeguard, then a head's part of the top.

    Args:
        scores: float32 [groups, heads, slots]; ranking is within a group.

    Returns:
        float64 [groups, heads], each group's sum ``pages_per_head * heads``.
    """
    groups, heads, slots = scores.shape
    top_slots = min(pages_per_head * block_size * heads, heads * slots)
    counts = torch.full((groups,), top_slots, device=scores.device)
    best = keep_top(scores.reshape(groups, -1), counts).view(groups, heads, slots)
    votes = best.sum(-1).double().cpu()
    free = votes * (pages_per_head * heads / top_slots)
    return safeguard * pages_per_head + (1 - safeguard) * free


def _pages_that_must_stay(scores: torch.Tensor, block_size: int) -> torch.Tensor:
    """int64 [layers, kv_heads], >= 1: pages for the slots marked ``inf``."""
    slots = torch.isposinf(scores).sum(-1).cpu()
    return (-(-slots // block_size)).clamp(min=1)


def round_to_pages(
    wanted: torch.Tensor, total: int, most: torch.Tensor, least: torch.Tensor
) -> torch.Tensor:
    """Whole pages near ``wanted`` with an exact sum (largest remainder).

    Args:
        wanted: float64, any shape; fractional pages.
        total: the exact sum asked for.
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
