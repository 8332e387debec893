"""ChunkKV: keeps or evicts whole chunks."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.snapkv import SnapKV
from vllm_kvplugins.scoring.attention_votes import (
    drop_invalid,
    mark_window,
    mean_over_heads,
)


class ChunkKV(SnapKV):
    """Average SnapKV's scores over heads and chunks.

    arXiv:2502.00299, algorithm 1. Chunks start at position 0. All KV heads of a layer
    keep the same chunks. Only the last chunk within the budget is cut; its first slots
    stay.

    Follows kvpress where the paper is silent or differs:

    - Scores are pooled first. Algorithm 1 has no pooling, like ``kernel_size=1``.
    - A short last chunk is compared by its mean. Algorithm 1 compares sums, in which
      short chunks always lose.
    - In the mean of its chunk, a slot of the window counts more than the best score, so
      the slots next to the window stay too.

    Differs from both: the window itself always stays. Not implemented: reuse of one
    layer's selection in the next layers (section 3.3). Under tensor parallelism, the
    average runs over the heads of one rank.

    Cost: SnapKV's cost, and one pass over the scores.
    """

    name: ClassVar[str] = "chunkkv"
    summary: ClassVar[str] = "keeps whole chunks that the last queries attend to"

    chunk_length: int = Field(
        default=20, ge=1, description="Tokens per chunk, from position 0 on."
    )

    @property
    def scores_heads_separately(self) -> bool:
        return False  # all heads of a rank keep the same chunks

    def score(self, view: LayerView) -> torch.Tensor:
        num_slots = view.positions.shape[1]
        prefix = num_slots - view.queries.shape[1]
        valid = view.valid
        scores = super().score(view)
        finite = scores[:, :prefix] if valid is None else scores[valid]
        best = finite.masked_fill(finite.isinf(), 0).max() + 1
        scores = scores.masked_fill(scores.isposinf(), best)
        means = mean_over_heads(scores, view.positions // self.chunk_length, valid)
        return mark_window(drop_invalid(means, valid)[:, :prefix], num_slots)
