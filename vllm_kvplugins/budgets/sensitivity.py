"""Layer budgets by sensitivity to eviction (EpiCache)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.budgets.allocators import HeadAdaptive
from vllm_kvplugins.budgets.base import LoadFingerprint, PageAllocator
from vllm_kvplugins.budgets.rounding import (
    in_proportion,
    pages_that_must_stay,
    round_to_pages,
    within_layers,
)
from vllm_kvplugins.budgets.sensitivity_profile import (
    SensitivityProfile,
    read_profile,
    shipped_profile,
)

# Shares a layer's pages equally: every head is sure of its part.
_EQUAL_HEADS = 1.0


class Sensitivity(PageAllocator):
    """More pages for layers whose keys change most when others evict (EpiCache).

    Section 3.2, equation 10: layer l gets ``s_l^alpha / sum(s^alpha)`` of all pages,
    with s_l from a profile that ``kvplugins calibrate`` measured. Within a layer its
    pages are shared as the allocator ``head-adaptive`` does, or equally.

    Differs from the paper: whole pages; every layer keeps what must stay, and at
    least a page per KV head, as layer 0 has sensitivity 0 by construction (its keys
    come from the embeddings alone) and would get nothing; what a layer could get but
    does not have goes to the others in the same proportion; ``floor`` makes every
    layer sure of a part of the average before equation 10 shares the rest.
    """

    name: ClassVar[str] = "sensitivity"
    profile: Path | None = Field(
        default=None,
        description="JSON file of `kvplugins calibrate`; null: the shipped profile of "
        "this model, or equal layers if there is none.",
    )
    alpha: float = Field(
        default=1.1,
        ge=0.0,
        description="How sharply sensitive layers are preferred; 0: equal layers.",
    )
    floor: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Share of the average that every layer is sure of.",
    )
    heads: Literal["head-adaptive", "uniform"] = Field(
        default="head-adaptive", description="How the KV heads of a layer share."
    )

    @cached_property
    def measured(self) -> SensitivityProfile | None:
        """The profile's content; None without a profile.

        Raises:
            ValueError: the file cannot be read or is no profile.
        """
        return None if self.profile is None else read_profile(self.profile)

    def model_post_init(self, context: Any) -> None:
        _ = self.measured  # a bad file is refused when it is named, not used

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        if self.measured is None or len(self.measured.sensitivity) == num_layers:
            return []
        return [
            f"{self.profile} is a profile of {len(self.measured.sensitivity)} layers, "
            f"the model has {num_layers}; make one with `kvplugins calibrate`"
        ]

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        if self.measured is None:
            return []
        different = self.measured.fingerprint.differences(model())
        if not different:
            return []
        return [
            f"{self.profile} is a profile of {self.measured.model}, another model than "
            f"this one ({'; '.join(different)}); make one with `kvplugins calibrate`"
        ]

    def resolve(self, model: LoadFingerprint) -> tuple[PageAllocator, str | None]:
        path = self.profile or shipped_profile(model())
        if path is None:
            return self, (
                "no sensitivity profile is shipped for this model, so all layers get "
                "as many pages; `kvplugins calibrate` makes one"
            )
        # a copy would keep what this one has read
        found = Sensitivity.model_validate(self.model_dump() | {"profile": path})
        return found, (
            f"layer budgets follow the sensitivity of {read_profile(path).model} in "
            f"{path}, alpha {self.alpha:g}"
        )

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers, heads = scores.shape[:2]
        total = pages_per_head * layers * heads
        least = pages_that_must_stay(scores, block_size).sum(1)
        most = available.sum(1)
        wanted = in_proportion(self._weights(layers), total, most, least)
        pages = round_to_pages(wanted, total, most, least)
        shared = self.heads == HeadAdaptive.name
        safeguard = HeadAdaptive().safeguard if shared else _EQUAL_HEADS
        return within_layers(scores, pages, block_size, available, safeguard)

    def _weights(self, layers: int) -> torch.Tensor:
        """float64 [layers]: shares of all pages, before any bound; the sum is 1."""
        equal = torch.full((layers,), 1 / layers, dtype=torch.float64)
        if self.measured is None:
            return equal
        sensitivity = torch.tensor(self.measured.sensitivity, dtype=torch.float64)
        largest = sensitivity.max()
        if largest == 0:
            return equal
        weights = (sensitivity / largest).pow(self.alpha)
        return self.floor * equal + (1 - self.floor) * weights / weights.sum()
