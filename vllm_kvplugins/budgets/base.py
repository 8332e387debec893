"""The contract of allocators: whole pages with an exact sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict

from vllm_kvplugins.model_config import ModelFingerprint

# Reads the model's fingerprint. Called only when needed, because some models have none.
LoadFingerprint = Callable[[], ModelFingerprint]


class PageAllocator(BaseModel, ABC):
    """Distributes M * L * H pages over layers and KV heads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    # Whether every (layer, KV head) always gets the same number of pages.
    uniform: ClassVar[bool] = False

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        """Why this allocator does not fit a model of this shape; empty if it does.

        Each reason has a code.
        """
        return []

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        """Why this allocator belongs to another model; empty if it does not.

        Each reason has a code.
        """
        return []

    def resolve(
        self, model: LoadFingerprint, one_machine: bool = True
    ) -> tuple[PageAllocator, list[str]]:
        """Complete settings whose defaults depend on the model.

        Args:
            one_machine: False if the engine runs on several nodes, each of which
                resolves the settings and must find the same.

        Returns:
            The allocator, and lines for the log about the chosen values. A line with a
            code is a warning.
        """
        return self, []

    @property
    def wants_calibration(self) -> bool:
        """Whether the model should be measured in the background, for the next start.

        Asked after ``resolve``.
        """
        return False

    def facts(self) -> dict[str, Any]:
        """What the distribution depends on besides the name and the scores.

        Engines with other facts do not continue each other's sessions. Files count by
        their content. Options at their default are left out.
        """
        return self.model_dump(mode="json", exclude_defaults=True)

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
            scores: float32 [layers, kv_heads, slots]. The number of slots is a
                multiple of ``block_size``; ``inf`` marks tokens that must stay.
            pages_per_head: M, the average number of pages per (layer, KV head).
            block_size: slots per page.
            available: int64 [layers, kv_heads], largest number of pages of each.

        Returns:
            int64 [layers, kv_heads], each in [1, available], with sum exactly
            ``M * layers * kv_heads``.
        """
