"""All pages for the heads that look back, few for the others (DuoAttention)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.budgets.base import LoadFingerprint, PageAllocator
from vllm_kvplugins.budgets.head_profile import (
    RANK_HEADS,
    HeadProfile,
    read_head_profile,
    shipped_head_profile,
)
from vllm_kvplugins.budgets.rounding import required_pages
from vllm_kvplugins.errors import KVPolicyError, coded

_REMEDY = f"make one with `{RANK_HEADS}` and give it as `profile`"


class HeadSplit(PageAllocator):
    """Retrieval heads keep everything, the others only what must stay (DuoAttention).

    arXiv:2410.10819, section 2: few heads look back at distant tokens (*retrieval
    heads*); for the others (*streaming heads*), sinks and the newest tokens are enough.
    Which heads these are is a property of the model. As in the context-independent form
    of KVzip (arXiv:2505.23416), a head's rank is how much it looks back at a text while
    the model repeats it; ``kvplugins research rank-heads`` measures that.

    Every head first gets the pages of the tokens that must stay. The rest goes to the
    heads in the order of their scores, all pages that a head can use at a time. The
    last head that gets any may get a part of what it can use.

    Differs from the paper: the budget decides how many heads keep everything. The paper
    trains a gate per head, and a threshold decides.
    """

    name: ClassVar[str] = "head-split"
    profile: Path | HeadProfile | None = Field(
        default=None,
        description="JSON file of `kvplugins research rank-heads`, or its content; "
        "null: the shipped profile of this model.",
    )

    @cached_property
    def measured(self) -> HeadProfile | None:
        """The content of the profile; None without a profile.

        Raises:
            KVPolicyError: the file cannot be read or is not a profile.
        """
        if isinstance(self.profile, Path):
            return read_head_profile(self.profile)
        return self.profile

    def model_post_init(self, context: Any) -> None:
        _ = self.measured  # read the file now, to refuse a bad one at start-up

    def facts(self) -> dict[str, Any]:
        return {} if self.measured is None else {"scores": self.measured.scores}

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        if self.measured is None:
            return []
        scores = self.measured.scores
        if (len(scores), len(scores[0])) == (num_layers, num_kv_heads):
            return []
        return [
            coded(
                "KVP116",
                f"the head profile has {len(scores)} layers of {len(scores[0])} KV "
                f"heads, this rank has {num_layers} of {num_kv_heads}; use data "
                "parallelism instead of tensor parallelism, or another allocator",
            )
        ]

    def model_problems(self, model: LoadFingerprint) -> list[str]:
        try:
            fingerprint = model()
        except KVPolicyError as error:
            return [str(error)]
        if self.measured is None:
            if shipped_head_profile(fingerprint) is not None:
                return []
            return [
                coded("KVP116", f"no head profile of this model is shipped; {_REMEDY}")
            ]
        different = self.measured.fingerprint.differences(fingerprint)
        if not different:
            return []
        return [
            coded(
                "KVP116",
                f"the head profile was measured on {self.measured.model}, another "
                f"model than this one ({'; '.join(different)}); {_REMEDY}",
            )
        ]

    def resolve(
        self, model: LoadFingerprint, one_machine: bool = True
    ) -> tuple[PageAllocator, list[str]]:
        if self.measured is not None:
            return self, []
        try:
            path = shipped_head_profile(model())
        except KVPolicyError:
            return self, []  # ``model_problems`` says why
        if path is None:
            return self, []
        # not model_copy, which would copy the cached content too
        resolved = HeadSplit(profile=path)
        return resolved, [f"retrieval heads are those of {path}"]

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        order = self._order(scores.shape[0] * scores.shape[1])
        minimum = required_pages(scores, block_size)
        wanted = (available - minimum).reshape(-1)[order]
        free = pages_per_head * minimum.numel() - int(minimum.sum())
        # Pages of a head: what is left after the heads before it, if it wants as many.
        left = free - (wanted.cumsum(0) - wanted)
        granted = left.clamp(min=0).minimum(wanted)
        pages = minimum.reshape(-1).clone()
        pages[order] += granted
        return pages.view(minimum.shape)

    def _order(self, heads: int) -> torch.Tensor:
        """Heads of all layers, those that look back most first.

        Without a profile, which start-up refuses, lower layers come first.
        """
        if self.measured is None:
            return torch.arange(heads)
        ranks = torch.tensor(self.measured.scores, dtype=torch.float64).reshape(-1)
        return ranks.argsort(descending=True, stable=True)
