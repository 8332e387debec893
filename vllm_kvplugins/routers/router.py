"""The learned tensors of SeKV, and the gates computed from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from vllm_kvplugins.ops.svd import LowRank

# Hidden width of the network that predicts gates of components.
_HIDDEN = 32
_TINY = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """The learned part of SeKV (section 3.3), in training and in serving.

    Attributes:
        projection: W, float32 [layers, num_q_heads, routing_dim, head_dim].
        threshold: logit of tau, float32 [layers, num_q_heads].
        rank_hidden, rank_hidden_bias: float32 [features, 32] and [32], first layer of
            g_phi, which predicts rank gates.
        rank_out, rank_out_bias: float32 [32, max_rank] and [max_rank], second layer.
    """

    projection: torch.Tensor
    threshold: torch.Tensor
    rank_hidden: torch.Tensor
    rank_hidden_bias: torch.Tensor
    rank_out: torch.Tensor
    rank_out_bias: torch.Tensor

    @staticmethod
    def new(projection: torch.Tensor, tau: float, max_rank: int, seed: int) -> Router:
        """An untrained router: one threshold for all heads, all components kept.

        Args:
            projection: initial value of the attribute.
            tau: threshold in (0, 1).
            max_rank: R, components that the predictor knows.
            seed: of the first layer of g_phi.
        """
        layers, heads, routing_dim, _ = projection.shape
        features = max_rank + routing_dim + 2
        random = torch.Generator().manual_seed(seed)
        hidden = torch.randn(features, _HIDDEN, generator=random) / features**0.5
        return Router(
            projection,
            torch.full((layers, heads), math.log(tau / (1 - tau))),
            hidden,
            torch.zeros(_HIDDEN),
            torch.zeros(_HIDDEN, max_rank),
            torch.full((max_rank,), 3.0),  # gates of 0.95
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def routing_dim(self) -> int:
        """d', size of a summary key."""
        return int(self.projection.shape[2])

    @property
    def max_rank(self) -> int:
        """R, components that the predictor knows."""
        return int(self.rank_out.shape[1])

    @property
    def tau(self) -> torch.Tensor:
        """Thresholds of the gate, [layers, num_q_heads], in (0, 1)."""
        return self.threshold.sigmoid()

    def on(self, device: torch.device) -> Router:
        """A copy on ``device``, detached from gradients."""
        tensors = self.tensors.items()
        return Router(**{k: t.detach().to(device, copy=True) for k, t in tensors})

    # -- routing ------------------------------------------------------------------

    def summarize(self, keys: torch.Tensor, layer: int | slice) -> torch.Tensor:
        """Summary keys (equation 3).

        The projection is linear, so it is applied to the mean key of a span instead of
        to each key.

        Args:
            keys: float32 [..., num_kv_heads, spans, head_dim], weighted mean keys; the
                leading dimensions are those of ``layer``.
            layer: index, or a slice of layers.

        Returns:
            [..., num_q_heads, spans, routing_dim], of length 1.
        """
        weight = self.projection[layer]
        group = weight.shape[-3] // keys.shape[-3]
        projected = keys.repeat_interleave(group, -3) @ weight.mT
        return F.normalize(projected, dim=-1, eps=_TINY)

    def logits(
        self,
        queries: torch.Tensor,
        summary: torch.Tensor,
        log_sizes: torch.Tensor,
        layer: int | slice,
    ) -> torch.Tensor:
        """Routing logits: equation 5 before its sigmoid.

        Args:
            queries: [..., num_q_heads, queries, head_dim], after RoPE.
            summary: from :meth:`summarize`.
            log_sizes: float32 [spans], logarithm of the span lengths.

        Returns:
            [..., num_q_heads, queries, spans].
        """
        projected = queries.float() @ self.projection[layer].mT
        return projected @ summary.float().mT / self.routing_dim**0.5 + log_sizes

    def per_length(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Reciprocal of the norm that equation 3 divides by.

        Args:
            keys: float32 [num_kv_heads, spans, head_dim], weighted mean keys.

        Returns:
            float32 [num_q_heads, spans].
        """
        weight = self.projection[layer]
        group = weight.shape[0] // keys.shape[0]
        projected = keys.repeat_interleave(group, 0) @ weight.mT
        return 1 / projected.norm(dim=-1).clamp(min=_TINY)

    def logits_of_means(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        per_length: torch.Tensor,
        log_sizes: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """:meth:`logits` for the queries of one token, without summary keys.

        ``W q`` times ``W k / |W k|`` equals ``W^T W q`` times ``k / |W k|``, and the
        mean keys are in memory anyway.

        Args:
            queries: [num_kv_heads, group, head_dim], after RoPE.
            keys: [num_kv_heads, spans, head_dim], weighted mean keys.
            per_length: from :meth:`per_length`.
            log_sizes: float32 [spans].

        Returns:
            float32 [num_kv_heads, group, spans].
        """
        weight = self.projection[layer].unflatten(0, queries.shape[:2])
        folded = queries.float()[:, :, None] @ weight.mT @ weight
        scores = (
            folded[:, :, 0]
            @ keys.float().mT
            * per_length.unflatten(0, queries.shape[:2])
        )
        return scores / self.routing_dim**0.5 + log_sizes

    # -- ranks --------------------------------------------------------------------

    def rank_logits(
        self, spectrum: torch.Tensor, summary: torch.Tensor, is_value: torch.Tensor
    ) -> torch.Tensor:
        """Rank-gate logits: equation 7 before its sigmoid.

        The input of the predictor is each component's share of the span's squared
        norm, the logarithm of that norm, and the summary key.

        Args:
            spectrum: float32 [..., max_rank], singular values, padded with 0.
            summary: [..., routing_dim], the mean over the query heads that share a
                KV head.
            is_value: float32 [..., 1], 1 for factors of values, 0 for those of keys.
        """
        energy = spectrum.square()
        total = energy.sum(-1, keepdim=True).clamp(min=_TINY)
        # logarithmic, so that the predictor can distinguish small components
        shares = (energy / total).clamp(min=1e-6).log10() / 6 + 1
        size = total.log10() / 6
        features = torch.cat([shares, summary.float(), is_value, size], -1)
        hidden = F.gelu(features @ self.rank_hidden + self.rank_hidden_bias)
        return hidden @ self.rank_out + self.rank_out_bias

    def component_gates(self, factors: LowRank, summary: torch.Tensor) -> torch.Tensor:
        """Rank gates (equation 7) for the factors of one layer.

        Args:
            factors: of keys, by KV head, followed by those of values.
            summary: [num_q_heads, spans, routing_dim].

        Returns:
            float32, one gate in (0, 1) per singular value, matrix by matrix.

        Raises:
            ValueError: a rank exceeds ``max_rank``.
        """
        if int(factors.ranks.max()) > self.max_rank:
            raise ValueError(
                f"factors have rank {int(factors.ranks.max())}, but the router knows "
                f"{self.max_rank} components"
            )
        spans = summary.shape[1]
        heads = len(factors) // (2 * spans)
        spectrum = spectra(factors, self.max_rank).view(2, heads, spans, -1)
        shared = group_mean(summary, heads)
        is_value = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
        logits = self.rank_logits(
            spectrum,
            shared.expand(2, *shared.shape),
            is_value.expand(2, heads, spans, 1),
        )
        return logits.sigmoid()[spectrum > 0]


def group_mean(summary: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Mean over the query heads that share a KV head.

    [..., num_q_heads, spans, d'] -> [..., num_kv_heads, spans, d'].
    """
    return summary.float().unflatten(-3, (num_kv_heads, -1)).mean(-3)


def spectra(factors: LowRank, max_rank: int) -> torch.Tensor:
    """Singular values of all matrices, float32 [matrices, max_rank], padded with 0."""
    wide = 4 // factors.factors.itemsize
    within = torch.arange(max_rank)[None] < factors.ranks[:, None]
    last = max(factors.factors.numel() - wide, 0)
    at = (factors.offsets[:-1, None] + torch.arange(max_rank) * wide).clamp(max=last)
    if not within.any():
        return torch.zeros(within.shape)
    parts = (at[..., None] + torch.arange(wide)).flatten()
    values = factors.factors[parts].view(torch.float32).view(within.shape)
    return values.where(within, 0.0)
