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
    required_pages,
    round_to_pages,
    within_layers,
)
from vllm_kvplugins.budgets.sensitivity_profile import (
    SensitivityProfile,
    read_profile,
    shipped_profile,
)
from vllm_kvplugins.errors import coded

# With this safeguard, the heads of a layer get equal shares.
_EQUAL_HEADS = 1.0


class Sensitivity(PageAllocator):
    """More pages for layers whose keys change most under eviction (EpiCache).

    Section 3.2, equation 10: layer l gets ``s_l^alpha / sum(s^alpha)`` of all pages.
    ``kvplugins research calibrate`` measures s_l and writes it into a profile. The
    heads of a layer share its pages as with the allocator ``head-adaptive``, or
    equally.

    Differs from the paper:

    - Shares are whole pages.
    - Every layer keeps the tokens that must stay, and at least a page per KV head.
      Layer 0 would get nothing otherwise: its keys come from the embeddings alone, so
      its sensitivity is 0.
    - If a layer has fewer pages than its share, the others get the rest in the same
      proportion.
    - Every layer gets ``floor`` of the average before equation 10 distributes the rest.
    """

    name: ClassVar[str] = "sensitivity"
    profile: Path | None = Field(
        default=None,
        description="JSON file of `kvplugins research calibrate`; null: the shipped "
        "profile of this model, or equal layers without one.",
    )
    alpha: float = Field(
        default=1.1,
        ge=0.0,
        description="Preference for sensitive layers; 0: equal layers.",
    )
    floor: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="Minimum of every layer, as a share of the average.",
    )
    heads: Literal["head-adaptive", "uniform"] = Field(
        default="head-adaptive", description="How the heads of a layer share its pages."
    )

    @cached_property
    def measured(self) -> SensitivityProfile | None:
        """The content of the profile; None without a profile.

        Raises:
            KVPolicyError: the file cannot be read or is not a profile.
        """
        return None if self.profile is None else read_profile(self.profile)

    def model_post_init(self, context: Any) -> None:
        _ = self.measured  # read the file now, to refuse a bad one at start-up

    def facts(self) -> dict[str, Any]:
        options = self.model_dump(
            mode="json", exclude={"profile"}, exclude_defaults=True
        )
        if self.measured is None:
            return options
        return options | {"sensitivity": self.measured.sensitivity}

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        if self.measured is None or len(self.measured.sensitivity) == num_layers:
            return []
        return [
            coded(
                "KVP116",
                f"{self.profile} is a profile of {len(self.measured.sensitivity)} "
                f"layers, the model has {num_layers}; make one with `kvplugins "
                "research calibrate`",
            )
        ]

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        if self.measured is None:
            return []
        different = self.measured.fingerprint.differences(model())
        if not different:
            return []
        return [
            coded(
                "KVP116",
                f"{self.profile} is a profile of {self.measured.model}, another model "
                f"than this one ({'; '.join(different)}); make one with `kvplugins "
                "research calibrate`",
            )
        ]

    def resolve(self, model: LoadFingerprint) -> tuple[PageAllocator, str | None]:
        path = self.profile or shipped_profile(model())
        if path is None:
            return self, (
                "no sensitivity profile is shipped for this model, so all layers get "
                "the same budget; make one with `kvplugins research calibrate`"
            )
        # not model_copy, which would copy the cached profile too
        resolved = Sensitivity.model_validate(self.model_dump() | {"profile": path})
        return resolved, (
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
        minimum = required_pages(scores, block_size).sum(1)
        maximum = available.sum(1)
        shares = in_proportion(self._weights(layers), total, maximum, minimum)
        pages = round_to_pages(shares, total, maximum, minimum)
        is_adaptive = self.heads == HeadAdaptive.name
        safeguard = HeadAdaptive().safeguard if is_adaptive else _EQUAL_HEADS
        return within_layers(scores, pages, block_size, available, safeguard)

    def _weights(self, layers: int) -> torch.Tensor:
        """Shares of all pages before bounds: float64 [layers], with the sum 1."""
        equal = torch.full((layers,), 1 / layers, dtype=torch.float64)
        if self.measured is None:
            return equal
        sensitivity = torch.tensor(self.measured.sensitivity, dtype=torch.float64)
        largest = sensitivity.max()
        if largest == 0:
            return equal
        weights = (sensitivity / largest).pow(self.alpha)
        return self.floor * equal + (1 - self.floor) * weights / weights.sum()
