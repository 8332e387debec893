"""SnapKV: the newest queries vote for what they look at."""

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

    Equations 3-5 of the ProtoKV paper. Differs from the paper: votes are
    averaged over the queries that share a KV head (the paper has no GQA), and
    pooling is the average that SnapKV's published code and kvpress use
    (``pooling="max"`` gives the paper's equation 5).
    """

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "tokens that the last queries of the prompt attend to"

    window: int = Field(default=64, ge=1, description="Newest queries that vote.")
    kernel_size: int = Field(default=5, ge=1, description="Pooling width; odd.")
    pooling: Literal["avg", "max"] = Field(
        default="avg", description="avg: as in the authors' code; max: in the paper."
    )

    @property
    def queries_needed(self) -> int:
        return self.window

    @property
    def minimum_budget_tokens(self) -> int:
        return self.window + 1

    def score(self, view: LayerView) -> torch.Tensor:
        votes = window_votes(view)
        votes = pool_votes(votes, self.kernel_size, self.pooling)
        return mark_window(votes.mean(dim=1), view.keys.shape[1])

    def problems(self) -> list[str]:
        even = self.kernel_size % 2 == 0
        odd = [f"kernel_size {self.kernel_size} must be odd"] if even else []
        return super().problems() + odd
