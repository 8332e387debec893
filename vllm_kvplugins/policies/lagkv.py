"""LagKV: keeps tokens that differ from the tokens that follow them."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor


class LagKV(Compressor):
    """Spread relative to the next partition (LagKV, arXiv:2504.04704).

    Behind the sinks, the slots of a KV head are divided into partitions of ``lag``
    slots. Keys and values of a partition are scaled per element by the minimum and
    maximum of the next partition. The score of a slot is the standard deviation of its
    scaled elements, after a softmax over the partition, averaged over keys and values.
    Needs no queries and no attention.

    As in the paper and in kvpress, each partition keeps the same share: slots are
    compared by their rank in their own partition. The last partition, whose successor
    is not complete, and what follows it stay.

    Differs from kvpress: if the budget cannot hold all tokens that stay, the oldest of
    them go first; kvpress leaves the choice to its top-k. An element that is equal in
    the whole next partition counts as 0.

    Cost: one pass over keys and values; float32 copies of one KV head.
    """

    name: ClassVar[str] = "lagkv"
    summary: ClassVar[str] = "keeps tokens that differ from those that follow them"

    lag: int = Field(default=128, ge=1, description="Slots per partition.")
    sinks: int = Field(default=4, ge=0, description="First tokens; they always stay.")

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        scores = torch.full(
            view.positions.shape, -torch.inf, device=view.positions.device
        )
        values = view.values
        for head, positions in enumerate(view.positions):
            start = int((positions < self.sinks).sum())  # padding comes first
            tokens = slice(start, None)
            states = view.keys[head, tokens], values[head, tokens]
            scores[head, tokens] = self._score_head(*states)
        stays = (view.positions >= 0) & (view.positions < self.sinks)
        return scores.masked_fill_(stays, torch.inf)

    def _score_head(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Scores of the slots of one KV head behind its sinks.

        Args:
            keys, values: [num_slots, head_dim].

        Returns:
            float32 [num_slots]: the rank in the partition, from 0 to less than 1; for
            slots that stay 1 and more, larger for newer ones.
        """
        num_slots = keys.shape[0]
        scored = max(num_slots // self.lag - 1, 0) * self.lag
        newest = torch.arange(num_slots - scored, device=keys.device) / num_slots
        spread = (
            _spread(keys, scored, self.lag) + _spread(values, scored, self.lag)
        ) / 2
        order = spread.argsort(dim=1, descending=True, stable=True)
        rank = self.lag - 1 - order.argsort(dim=1)
        return torch.cat([(rank / self.lag).flatten(), 1 + newest])


def _spread(states: torch.Tensor, scored: int, lag: int) -> torch.Tensor:
    """Standard deviation of states scaled by the next partition.

    Args:
        states: [num_slots, dim], at least ``scored + lag`` slots if any is scored.
        scored: number of first slots to score, a multiple of ``lag``.

    Returns:
        float32 [scored / lag, lag], after a softmax over each row.
    """
    following = states[lag : scored + lag] if scored else states[:0]
    following = following.to(torch.float32).view(-1, lag, states.shape[1])
    own = states[:scored].to(torch.float32).view(-1, lag, states.shape[1])
    if not scored:
        return own.sum(-1)
    low, high = following.amin(1, keepdim=True), following.amax(1, keepdim=True)
    width = high - low
    scaled = ((own - low) / width).masked_fill(width == 0, 0)
    return scaled.std(dim=-1).softmax(dim=-1)
