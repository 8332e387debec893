"""ChunkKV: whole chunks stay or go."""

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
    """SnapKV's scores, averaged over heads and per chunk.

    arXiv:2502.00299, algorithm 1. Chunks are cut from position 0 on; all KV
    heads of a layer keep the same ones, and only the last chunk that fits a budget is
    cut (its first slots stay). Follows kvpress where the paper is silent or
    differs: scores are pooled first (algorithm 1 has no pooling:
    ``kernel_size=1`` gives that); a short last chunk is compared by its mean
    (algorithm 1 compares sums, which no short chunk can win); the window counts
    in its chunk's mean with more than the best score, so that the slots next to
    it stay too. Differs from both: the window itself always stays. Not built:
    the paper's reuse of one layer's selection for the next layers (section
    3.3). Under tensor parallelism "all heads" are those of the rank.

    Cost: SnapKV's, and one pass over the scores.
    """

    name: ClassVar[str] = "chunkkv"
    summary: ClassVar[str] = "whole chunks that the last queries attend to"

    chunk_length: int = Field(
        default=20, ge=1, description="Tokens per chunk, from position 0 on."
    )

    def score(self, view: LayerView) -> torch.Tensor:
        num_slots = view.keys.shape[1]
        prefix = num_slots - view.queries.shape[1]
        valid = view.valid
        scores = super().score(view)
        known = scores[:, :prefix] if valid is None else scores[valid]
        best = known.masked_fill(known.isinf(), 0).max() + 1
        scores = scores.masked_fill(scores.isposinf(), best)
        means = mean_over_heads(scores, view.positions // self.chunk_length, valid)
        return mark_window(drop_invalid(means, valid)[:, :prefix], num_slots)
