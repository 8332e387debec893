"""H2O: keeps tokens with the most accumulated attention, and the newest tokens."""

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
            # Double the size, so that decoding does not copy at every token.
            room = mass.new_zeros(mass.shape[0], 2 * (newest + 1))
            if total is not None:
                room[:, : total.shape[1]] = total
            total = room
        return total.scatter_add_(1, view.positions.clamp(min=0), mass)


class H2O(Compressor):
    """Heavy-hitter oracle (arXiv:2306.14048, algorithm 1).

    Every query of the prompt, and with a ``decode_budget`` every generated query, adds
    its attention to the sum of each token. The tokens with the largest sums and the
    newest tokens stay.

    Differs from the paper: sums are averaged over the queries that share a KV head (the
    paper has no GQA). Tokens are evicted at compactions instead of one per step.

    Differs from kvpress's observed attention, which divides each sum by the number of
    its queries and keeps no newest tokens. Algorithm 1 sums, and keeps recent tokens.

    Cost: doubles the attention of the prompt, because the kernel does not return its
    weights. While generating, one additional pass over the resident keys per token.
    """

    name: ClassVar[str] = "h2o"
    summary: ClassVar[str] = "keeps tokens that have received the most attention so far"

    recent: int | None = Field(
        default=None,
        ge=0,
        description="Newest tokens; they always stay. null: half of the budget, as in "
        "the paper.",
    )

    @property
    def observation(self) -> ReceivedAttention:
        return ReceivedAttention(self.observed_steps)

    @property
    def minimum_budget_tokens(self) -> int:
        return (self.recent or 0) + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        scores = view.observed.gather(1, view.positions.clamp(min=0))
        recent = view.budget_tokens // 2 if self.recent is None else self.recent
        newest = view.positions.max()
        return scores.masked_fill(view.positions > newest - recent, torch.inf)
