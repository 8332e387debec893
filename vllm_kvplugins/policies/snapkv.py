"""SnapKV: the newest queries vote for the tokens that they attend to."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.votes import window_votes
from vllm_kvplugins.scoring.attention_votes import mark_window, pool_votes


class SnapKV(Compressor):
    """Pooled attention of the observation window (arXiv:2404.14469).

    Equations 3 to 5 of the ProtoKV paper.

    Differs from the paper: votes are averaged over the queries that share a KV head
    (the paper has no GQA). Pooling is the average, as in SnapKV's published code and in
    kvpress; ``pooling="max"`` is equation 5.
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = (
        "keeps tokens that the last queries of the prompt attend to"
    )

    window: int = Field(
        default=64, ge=1, description="Number of newest queries that vote."
    )
    kernel_size: int = Field(default=5, ge=1, description="Width of the pooling; odd.")
    pooling: Literal["avg", "max"] = Field(
        default="avg",
        description="avg, as in the authors' code; or max, as in the paper.",
    )

    @property
    def queries_needed(self) -> int:
        return self.window

    @property
    def minimum_budget_tokens(self) -> int:
        return self.window + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        votes = window_votes(view)
        votes = pool_votes(votes, self.kernel_size, self.pooling)
        return mark_window(votes.mean(dim=1), view.positions.shape[1])

    def problems(self) -> list[str]:
        reasons = super().problems()
        if self.kernel_size % 2 == 0:
            reasons.append(f"kernel_size {self.kernel_size} must be odd")
        return reasons
