"""Layer budgets by sensitivity to eviction (EpiCache)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.budgets.allocators import HeadAdaptive
from vllm_kvplugins.budgets.base import LoadFingerprint, PageAllocator
from vllm_kvplugins.budgets.profile_cache import cached_profile
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
from vllm_kvplugins.calibration_job import is_enabled
from vllm_kvplugins.errors import KVPolicyError, coded

# With this safeguard, the heads of a layer get equal shares.
_EQUAL_HEADS = 1.0
_NOT_SHIPPED = "no sensitivity profile of this model is shipped"
_REMEDY = "make one with `kvplugins research calibrate MODEL`"


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
    profile: Path | SensitivityProfile | None = Field(
        default=None,
        description="JSON file of `kvplugins research calibrate`, or its content; "
        "null: the shipped profile of this model, else the one in the user's cache, "
        "else equal layers.",
    )
    calibrate: bool = Field(
        default=True,
        description="Without any profile, measure the model in the background for the "
        "next start. KVP_CALIBRATE=0 in the environment turns this off too.",
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
        if isinstance(self.profile, Path):
            return read_profile(self.profile)
        return self.profile

    def model_post_init(self, context: Any) -> None:
        _ = self.measured  # read the file now, to refuse a bad one at start-up

    @property
    def _source(self) -> str:
        """Where the profile is from, for messages."""
        return str(self.profile) if isinstance(self.profile, Path) else "profile"

    @property
    def wants_calibration(self) -> bool:
        return self.profile is None and self.calibrate and is_enabled()

    def facts(self) -> dict[str, Any]:
        options = self.model_dump(
            mode="json", exclude={"profile", "calibrate"}, exclude_defaults=True
        )
        if self.measured is None:
            return options
        return options | {"sensitivity": self.measured.sensitivity}

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        try:
            is_enabled()
        except KVPolicyError as error:
            return [str(error)]
        if self.measured is None or len(self.measured.sensitivity) == num_layers:
            return []
        return [
            coded(
                "KVP116",
                f"{self._source} has {len(self.measured.sensitivity)} layers, the "
                f"model has {num_layers}; make one with `kvplugins research calibrate`",
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
                f"{self._source} was measured on {self.measured.model}, another model "
                f"than this one ({'; '.join(different)}); make one with `kvplugins "
                "research calibrate`",
            )
        ]

    def resolve(
        self, model: LoadFingerprint, one_machine: bool = True
    ) -> tuple[PageAllocator, list[str]]:
        if self.measured is not None:
            return self, [self._following(self._source)]
        try:
            fingerprint = model()
        except KVPolicyError as error:
            # Its profile cannot be found, nor measured.
            equal = self.model_copy(update={"calibrate": False})
            return equal, [f"all layers get the same budget: {error}"]
        path = shipped_profile(fingerprint)
        if path is not None:
            resolved = self._with_profile(path)
            return resolved, [resolved._following(str(path))]
        if not one_machine:
            return self.model_copy(update={"calibrate": False}), [
                f"{_NOT_SHIPPED}, so all layers get the same budget; caches of several "
                "nodes may differ: give the same `profile` to all of them"
            ]
        found = cached_profile(fingerprint)
        if found.profile is not None:
            # Its content and not its path: all processes and nodes of the engine use
            # the same values, even if the file changes.
            resolved = self._with_profile(found.profile)
            return resolved, [*found.problems, resolved._following(str(found.path))]
        remedy = "" if self.wants_calibration else f"; {_REMEDY}"
        return self, [
            *found.problems,
            f"{_NOT_SHIPPED} or in the user's cache, so all layers get the same "
            f"budget{remedy}",
        ]

    def _with_profile(self, profile: Path | SensitivityProfile) -> Sensitivity:
        # not model_copy, which would copy the cached content too
        return Sensitivity.model_validate(self.model_dump() | {"profile": profile})

    def _following(self, source: str) -> str:
        assert self.measured is not None
        return (
            f"layer budgets follow the sensitivity of {self.measured.model} in "
            f"{source}, alpha {self.alpha:g}"
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
