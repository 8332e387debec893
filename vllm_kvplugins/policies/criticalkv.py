"""CriticalKV: attention first, then attention times the size of what a value adds."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.snapkv import SnapKV
from vllm_kvplugins.scoring.attention_votes import (
    drop_invalid,
    mark_window,
    slot_tiles,
    valid_keys,
)
from vllm_kvplugins.scoring.selection import keep_top


class CriticalKV(SnapKV):
    """SnapKV's scores, in the second stage times the norm of the projected value.

    arXiv:2502.03805, algorithm 1. Evicting a token changes the output of the layer by
    at most its attention times the L1 norm of its value behind the output projection.
    The first stage keeps ``first_stage`` of the budget by attention; the window is
    part of it. The second stage keeps the tokens with the largest
    ``(attention + epsilon) * norm``.

    Follows kvpress where the paper is silent: norms are averaged over the query heads
    that share a KV head.

    Differs from both: the first stage takes its share of the average budget of a head.
    An allocator that divides pages by scores (Ada-KV) therefore divides those of the
    second stage; kvpress divides first, by attention. The window always stays. With
    LoRA, the projection is that of the model without adapters. What a model does to
    the output of attention before the projection (a gate, a norm) does not count.

    Cost: SnapKV's cost; the output projection of every token of the cache, in every
    layer; and that of as many more tokens as the layer's query heads have elements, to
    read the projection's weights, which may be packed or quantized. Memory: these
    weights of one layer, and 16 MiB.
    """

    name: ClassVar[str] = "criticalkv"
    summary: ClassVar[str] = (
        "keeps tokens whose attention and projected values are large"
    )

    first_stage: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Share of the budget that attention alone decides.",
    )
    epsilon: float = Field(
        default=1e-4,
        ge=0.0,
        description="Constant added to attention before it is multiplied.",
    )

    @property
    def needs_output_weights(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        num_slots = view.positions.shape[1]
        prefix = num_slots - view.queries.shape[1]
        attention = super().score(view)[:, :prefix]
        second = (attention + self.epsilon) * projected_norms(view)[:, :prefix]
        valid = None if view.valid is None else view.valid[:, :prefix]
        scores = drop_invalid(second, valid)
        first = self._first_stage(drop_invalid(attention, valid), view)
        finite = scores.masked_fill(~scores.isfinite(), 0)
        scores = torch.where(first, finite.amax() + 1 + attention, scores)
        return mark_window(scores, num_slots)

    def _first_stage(self, attention: torch.Tensor, view: LayerView) -> torch.Tensor:
        """Mark the slots before the window that attention alone decides to keep.

        Args:
            attention: float32 [num_kv_heads, slots], -inf where there is no token.

        Returns:
            bool, same shape.
        """
        # NaN, from a model that overflowed, stays the lowest score.
        attention = attention.masked_fill(attention.isnan(), -torch.inf)
        window = view.queries.shape[1]
        count = max(int(view.budget_tokens * self.first_stage) - window, 0)
        tokens = attention.isfinite().sum(1)
        return keep_top(attention, tokens.clamp(max=count))


def projected_norms(view: LayerView) -> torch.Tensor:
    """L1 norm of each value behind the output projection, mean over a head's group.

    Returns:
        float32 [num_kv_heads, num_slots]; 0 where there is no token.
    """
    weights = view.output_weights
    values = valid_keys(view.values, view.valid).to(weights.dtype)
    num_kv_heads, num_slots, _ = values.shape
    num_q_heads, _, hidden = weights.shape
    group = num_q_heads // num_kv_heads
    norms = torch.zeros(
        num_kv_heads, num_slots, dtype=torch.float32, device=values.device
    )
    for head in range(num_q_heads):
        for tile in slot_tiles(num_slots, hidden):
            projected = values[head // group, tile] @ weights[head]
            norms[head // group, tile] += projected.abs().sum(1, dtype=torch.float32)
    return norms / group
