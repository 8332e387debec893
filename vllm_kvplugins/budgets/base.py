"""What every allocator owes: whole pages with an exact sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from vllm_kvplugins.model_config import ModelFingerprint

# Called by allocators that look at the model; not every configuration has one.
LoadFingerprint = Callable[[], ModelFingerprint]


class PageAllocator(BaseModel, ABC):
    """Shares M * L * H pages between layers and KV heads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    # Whether every (layer, KV head) always gets the same number of pages.
    uniform: ClassVar[bool] = False

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        """Why this allocator does not fit a model of this shape, if so."""
        return []

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        """Why this allocator does not fit this very model, if so."""
        return []

    def resolve(self, model: LoadFingerprint) -> tuple[PageAllocator, str | None]:
        """This allocator with what it leaves open filled in for a model.

        Returns:
            The allocator, and one line for the log that says what it goes by.
        """
        return self, None

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
                choose from; an upper limit.

        Returns:
            int64 [layers, kv_heads], each in [1, available], with sum exactly
            ``M * layers * kv_heads``.
        """
