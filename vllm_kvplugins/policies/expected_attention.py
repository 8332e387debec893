"""Expected attention: what future queries will look at, from past ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import Observation, Trigger
from vllm_kvplugins.policies.compressor import Compressor


@dataclass(slots=True)
class QueryStatistics:
    """Sums over all queries so far, before RoPE.

    Attributes:
        count: queries summed.
        total: float64 [num_q_heads, head_dim].
        outer: float64 [num_q_heads, head_dim, head_dim].
    """

    count: int
    total: torch.Tensor
    outer: torch.Tensor


@dataclass(frozen=True, slots=True)
class QueryMoments(Observation):
    """Mean and covariance of all observed queries, as sums.

    Attributes:
        triggers: the steps to observe.
        sinks: queries of this many first tokens do not count.
    """

    triggers: Trigger
    sinks: int

    def observe(self, view: LayerView) -> QueryStatistics:
        chosen = view.query_positions >= self.sinks
        assert view.rotary is not None
        queries = view.rotary.undo(
            view.queries[:, chosen], view.query_positions[chosen]
        ).double()
        seen = view.observed or QueryStatistics(
            0,
            queries.new_zeros(queries.shape[0], queries.shape[2]),
            queries.new_zeros(queries.shape[0], *queries.shape[2:] * 2),
        )
        return QueryStatistics(
            seen.count + queries.shape[1],
            seen.total + queries.sum(1),
            seen.outer + queries.transpose(1, 2) @ queries,
        )

    def pack(self, observed: QueryStatistics) -> dict[str, torch.Tensor]:
        count = torch.tensor(observed.count)
        return {"count": count, "total": observed.total, "outer": observed.outer}

    def unpack(self, packed: dict[str, torch.Tensor]) -> QueryStatistics:
        return QueryStatistics(int(packed["count"]), packed["total"], packed["outer"])


class ExpectedAttention(Compressor):
    """Attention expected from Gaussian future queries (arXiv:2510.00636).

    Queries before RoPE are taken as Gaussian with the mean and covariance that
    the prompt's have; RoPE is averaged over the next positions. The expected
    exponential of a logit is then ``exp(mu k / sqrt(d) + k Sigma k / 2d)``,
    normalised over the keys and weighed by the length of the value. Constants and
    the treatment of sinks are those of the authors' kvpress code, with which kept
    positions agree.

    With a ``decode_budget`` generated queries count as well, all alike. Differs
    from kvpress, which then takes those of the newest tokens only.

    Cost: the covariance needs O(num_q_heads * head_dim^2) per query; its prompts
    take nothing from the prefix cache, because cached tokens have no queries.
    """

    name: ClassVar[str] = "expected-attention"
    summary: ClassVar[str] = "tokens that future queries are expected to attend to"

    future: int = Field(
        default=512, ge=1, description="Positions to come, averaged over."
    )
    sinks: int = Field(
        default=4,
        ge=0,
        description="First tokens that always stay, and whose queries do not count.",
    )
    use_covariance: bool = Field(default=True, description="Second-order term.")
    use_value_norm: bool = Field(
        default=True, description="Weigh by the length of the value vector."
    )
    epsilon: float = Field(
        default=0.0, ge=0.0, description="Added to scores before weighing."
    )

    @property
    def needs_rotary(self) -> bool:
        return True

    @property
    def observation(self) -> QueryMoments:
        return QueryMoments(self.observed_steps, self.sinks)

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + 1

    def score(self, view: LayerView) -> torch.Tensor:
        keys = view.keys.to(torch.float32)
        num_kv_heads, _, dim = keys.shape
        mean, covariance = self._future(view, dim)
        group = mean.shape[0] // num_kv_heads
        mean = mean.view(num_kv_heads, group, dim)
        logits = torch.einsum("hgd,hnd->hgn", mean, keys) / dim**0.5
        if self.use_covariance:
            covariance = covariance.view(num_kv_heads, group, dim, dim)
            # [.., n, dim] for every query head: gone before the values are read
            spread = torch.einsum("hnd,hgde->hgne", keys, covariance)
            logits += torch.einsum("hgne,hne->hgn", spread, keys) / (2 * dim)
            del spread
        first = view.positions < self.sinks  # invalid slots have position -1
        logits.masked_fill_(first[:, None], -torch.inf)
        scores = logits.softmax(-1).mean(1)
        if self.use_value_norm:
            norms = view.values.to(torch.float32).norm(dim=-1)
            scores = (scores + self.epsilon) * norms
        return scores.masked_fill(first, torch.inf)

    def _future(self, view: LayerView, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and covariance of future queries, after the average RoPE.

        Returns:
            float32 [num_q_heads, head_dim], [num_q_heads, head_dim, head_dim].
        """
        seen, rotary = view.observed, view.rotary
        assert rotary is not None
        mean = seen.total / seen.count
        covariance = seen.outer / seen.count - mean[:, :, None] * mean[:, None, :]
        newest = int(view.positions.max())
        turn = rotary.mean_rotation(newest + 1, self.future, dim)
        mean, covariance = mean.float(), covariance.float()
        return mean @ turn.T, turn @ covariance @ turn.T
