"""H2O: heavy hitters by accumulated attention, and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import Observation, Trigger
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.votes import attention_mass


@dataclass(frozen=True, slots=True)
class ReceivedAttention(Observation):
    """Attention that each token has received from all observed queries."""

    triggers: Trigger

    def observe(self, view: LayerView) -> torch.Tensor:
        """float32 [num_kv_heads, at least newest position + 1], by position."""
        mass = attention_mass(view)
        newest = int(view.query_positions[-1])
        total = view.observed
        if total is None or total.shape[1] <= newest:
            # twice the size, so that decoding does not copy at every token
            room = mass.new_zeros(mass.shape[0], 2 * (newest + 1))
            if total is not None:
                room[:, : total.shape[1]] = total
            total = room
        return total.scatter_add_(1, view.positions.clamp(min=0), mass)


class H2O(Compressor):
    """Heavy-hitter oracle (arXiv:2306.14048, algorithm 1).

    Every query of the prompt, and with a ``decode_budget`` every generated one,
    adds its attention to what a token has received so far; the tokens that got
    most stay, and the newest ones. Differs from the paper: sums are averaged over
    the queries that share a KV head (the paper has no GQA), and tokens go when
    the request is compacted, not one at every step. Differs from
    kvpress's observed attention, which divides each sum by the number of its
    queries and keeps no newest tokens; algorithm 1 sums, and has a recent window.

    Cost: as much again as the attention of the prompt, since the kernel does not
    hand out its weights; while generating, one more pass over the resident keys
    per token.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "tokens that received most attention so far"

    recent: int | None = Field(
        default=None,
        ge=0,
        description="Newest tokens that stay; null: half of the budget, as in the "
        "paper.",
    )

    @property
    def observation(self) -> ReceivedAttention:
        return ReceivedAttention(self.observed_steps)

    @property
    def minimum_budget_tokens(self) -> int:
        return (self.recent or 0) + 1

    def score(self, view: LayerView) -> torch.Tensor:
        scores = view.observed.gather(1, view.positions.clamp(min=0))
        recent = view.budget_tokens // 2 if self.recent is None else self.recent
        newest = view.positions.max()
        return scores.masked_fill(view.positions > newest - recent, torch.inf)
