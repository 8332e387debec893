"""TriAttention: scores keys by the attention that mean queries will pay to them."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import drop_invalid, slot_tiles, valid_keys


class TriAttention(Compressor):
    """Trigonometric series of centers and norms (TriAttention, arXiv:2604.04921).

    Queries before RoPE concentrate around a center. With q and k as complex numbers per
    frequency f, before RoPE, the score of a key at distance D from a query is

        sum over f of |E q_f| |k_f| cos(w_f D + arg(E q_f) - arg(k_f))
        + sum over f of (E|q_f| - |E q_f|) |k_f|

    The first sum is the logit of the center. The second one counts norms, the more the
    less the queries of this frequency concentrate. Scores are averaged over future
    queries at distances 1, 2, 4, ... ``future`` from the newest token, normalized to
    mean 0 and deviation 1 per query head, and each KV head takes the maximum over its
    query heads, as in the authors' code. The first sum equals a product of the stored
    key and the center, rotated to the mean of these future positions; this is how it is
    computed.

    Differs from the paper: the paper takes E from a calibration of the model on any
    text. Here E is the mean over the newest ``window`` queries of the request, so
    nothing must be calibrated. Distances beyond the model's positions do not count. Of
    a head that is rotated in part, each other element counts as a frequency of 0.

    Cost: one pass over the keys, two products per query head.
    """

    name: ClassVar[str] = "triattention"
    summary: ClassVar[str] = (
        "keeps tokens that mean queries attend to from future positions"
    )

    window: int = Field(
        default=128, ge=1, description="Number of newest queries whose means count."
    )
    future: int = Field(
        default=65536,
        ge=1,
        description="Largest distance of a future query; distances are powers of 2.",
    )
    recent: int = Field(
        default=32, ge=0, description="Newest tokens; they always stay."
    )

    @property
    def applies_softcap(self) -> bool:
        return False  # the series is of logits without a cap

    @property
    def needs_rotary(self) -> bool:
        return True

    @property
    def queries_needed(self) -> int:
        return self.window

    @property
    def minimum_budget_tokens(self) -> int:
        return self.recent + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        scores = self._series(view)
        if view.valid is not None:
            scores = scores.masked_fill(~view.valid[:, None], torch.nan)
        mean = scores.nanmean(-1, keepdim=True)
        deviation = (scores - mean).square().nanmean(-1, keepdim=True).sqrt()
        scores = ((scores - mean) / deviation.clamp(min=1e-6)).amax(1)
        scores = drop_invalid(scores, view.valid)
        newest = view.positions.max()
        return scores.masked_fill(view.positions > newest - self.recent, torch.inf)

    def _series(self, view: LayerView) -> torch.Tensor:
        """float32 [num_kv_heads, group, num_slots], before normalization."""
        centers, spreads = self._statistics(view)
        keys = valid_keys(view.keys, view.valid)
        num_kv_heads, num_slots, head_dim = keys.shape
        centers = centers.view(num_kv_heads, -1, head_dim)
        spreads = spreads.view(num_kv_heads, centers.shape[1], -1)
        scores = centers.new_empty(*centers.shape[:2], num_slots)
        assert view.rotary is not None
        for tile in slot_tiles(num_slots, num_kv_heads * head_dim):
            part = keys[:, tile].to(torch.float32)
            norms = view.rotary.pair_norms(part)
            scores[..., tile] = torch.bmm(centers, part.mT)
            scores[..., tile] += torch.bmm(spreads, norms.mT)
        return scores

    def _statistics(self, view: LayerView) -> tuple[torch.Tensor, torch.Tensor]:
        """Centers at the mean of the future positions, and what norms count.

        Returns:
            float32 [num_q_heads, head_dim], [num_q_heads, frequencies].
        """
        rotary, head_dim = view.rotary, view.keys.shape[2]
        assert rotary is not None
        queries = rotary.undo(view.queries, view.query_positions)
        center = queries.mean(1)
        newest = int(view.query_positions[-1])
        distances = [1 << power for power in range(self.future.bit_length())]
        rotation = rotary.mean_rotation_at([newest + d for d in distances], head_dim)
        spread = rotary.pair_norms(queries).mean(1) - rotary.pair_norms(center)
        return center @ rotation.T, spread * rotary.pair_scales(head_dim)
