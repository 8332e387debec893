"""Expected attention: scores tokens by the attention expected from future queries."""

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
    """Sums over all observed queries, before RoPE.

    Attributes:
        count: number of queries.
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
        sinks: number of first tokens whose queries do not count.
    """

    triggers: Trigger
    sinks: int

    def observe(self, view: LayerView) -> QueryStatistics:
        counts = view.query_positions >= self.sinks
        assert view.rotary is not None
        queries = view.rotary.undo(
            view.queries[:, counts], view.query_positions[counts]
        ).double()
        sums = view.observed or QueryStatistics(
            0,
            queries.new_zeros(queries.shape[0], queries.shape[2]),
            queries.new_zeros(queries.shape[0], *queries.shape[2:] * 2),
        )
        return QueryStatistics(
            sums.count + queries.shape[1],
            sums.total + queries.sum(1),
            sums.outer + queries.transpose(1, 2) @ queries,
        )

    def pack(self, observed: QueryStatistics) -> dict[str, torch.Tensor]:
        count = torch.tensor(observed.count)
        return {"count": count, "total": observed.total, "outer": observed.outer}

    def unpack(self, packed: dict[str, torch.Tensor]) -> QueryStatistics:
        return QueryStatistics(int(packed["count"]), packed["total"], packed["outer"])


class ExpectedAttention(Compressor):
    """Attention expected from Gaussian future queries (arXiv:2510.00636).

    Future queries before RoPE are modeled as Gaussian, with the mean and covariance of
    the prompt's queries; RoPE is averaged over the next positions. The expected
    exponential of a logit is then ``exp(s mu k + s^2 k Sigma k / 2)``, where s is the
    model's softmax scale. It is normalized over the keys and multiplied by the norm of
    the value. Constants and the treatment of sinks follow the authors' code in kvpress,
    and kept positions are the same.

    With a ``decode_budget``, the queries of generated tokens count as well, with equal
    weight. kvpress uses only those of the newest tokens.

    Cost: O(num_q_heads * head_dim^2) per query for the covariance. Prompts do not use
    the prefix cache, because cached tokens have no queries.
    """

    name: ClassVar[str] = "expected-attention"
    summary: ClassVar[str] = "tokens that future queries are expected to attend to"

    future: int = Field(
        default=512,
        ge=1,
        description="Number of future positions to average RoPE over.",
    )
    sinks: int = Field(
        default=4,
        ge=0,
        description="First tokens; they always stay, and their queries do not count.",
    )
    use_covariance: bool = Field(
        default=True, description="Use the covariance of queries (second-order term)."
    )
    use_value_norm: bool = Field(
        default=True, description="Multiply scores by the norm of the value."
    )
    epsilon: float = Field(
        default=0.0,
        ge=0.0,
        description="Constant added to scores before that multiplication.",
    )

    @property
    def applies_softcap(self) -> bool:
        return False  # the expectation is that of an exponential, without a cap

    @property
    def needs_rotary(self) -> bool:
        return True

    @property
    def observation(self) -> QueryMoments:
        return QueryMoments(self.observed_steps, self.sinks)

    @property
    def minimum_budget_tokens(self) -> int:
        return self.sinks + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        keys = view.keys.to(torch.float32)
        num_kv_heads, _, dim = keys.shape
        mean, covariance = self._future(view, dim)
        group = mean.shape[0] // num_kv_heads
        mean = mean.view(num_kv_heads, group, dim)
        logits = torch.einsum("hgd,hnd->hgn", mean, keys) * view.scale
        if self.use_covariance:
            covariance = covariance.view(num_kv_heads, group, dim, dim)
            # [.., n, dim] for every query head; freed before the values are read.
            spread = torch.einsum("hnd,hgde->hgne", keys, covariance)
            spread = torch.einsum("hgne,hne->hgn", spread, keys)
            logits += spread * (view.scale**2 / 2)
            del spread
        first = view.positions < self.sinks  # invalid slots have position -1
        logits.masked_fill_(first[:, None], -torch.inf)
        scores = view.rules.softmax(logits[:, :, None])[:, :, 0].mean(1)
        if self.use_value_norm:
            norms = view.values.to(torch.float32).norm(dim=-1)
            scores = (scores + self.epsilon) * norms
        return scores.masked_fill(first, torch.inf)

    def _future(self, view: LayerView, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and covariance of future queries, after the average RoPE.

        Returns:
            float32 [num_q_heads, head_dim], [num_q_heads, head_dim, head_dim].
        """
        sums, rotary = view.observed, view.rotary
        assert rotary is not None
        mean = sums.total / sums.count
        covariance = sums.outer / sums.count - mean[:, :, None] * mean[:, None, :]
        newest = int(view.positions.max())
        rotation = rotary.mean_rotation(newest + 1, self.future, dim)
        mean, covariance = mean.float(), covariance.float()
        return mean @ rotation.T, rotation @ covariance @ rotation.T
