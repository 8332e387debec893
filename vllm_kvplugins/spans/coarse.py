"""Coarse spans: one mean key and value for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(frozen=True, slots=True)
class CoarseSpans:
    """What routing knows about all spans of one request in one layer.

    Attributes:
        keys: [num_kv_heads, spans, head_dim], weighted mean keys; float32 when they are
            computed, later those that attention reads, in the dtype of the cache.
        log_sizes: float32 [spans], logarithm of the span lengths. Attention adds it to
            the score of a span, which then weighs as much as all its tokens.
        sizes: int64 [spans], span lengths in tokens; on the CPU. All other tensors are
            on the device of the keys.
        summary: routing features that the policy computes from ``keys``; None: it needs
            no more than the keys.
        key_variance: bfloat16 [num_kv_heads, spans, head_dim], see
            :func:`weighted_variance`; None: routing is of first order.
    """

    keys: torch.Tensor
    log_sizes: torch.Tensor
    sizes: torch.Tensor
    summary: torch.Tensor | None = None
    key_variance: torch.Tensor | None = None

    @staticmethod
    def of(
        keys: torch.Tensor,
        segments: Segments,
        summarize: Callable[[torch.Tensor], torch.Tensor | None],
        with_variance: bool = False,
    ) -> CoarseSpans:
        """Summaries of spans (SeKV, section 3.2).

        Args:
            keys: [num_kv_heads, n, head_dim], of ``segments.positions``; on any device.
            summarize: computes routing features from the mean keys.
            with_variance: whether the policy ranks spans by the variance of keys, too.
        """
        means, sizes = weighted_means(keys, segments), segments.sizes
        log_sizes = moved(sizes.float().log(), keys.device)
        variance = weighted_variance(keys, means, segments) if with_variance else None
        return CoarseSpans(means, log_sizes, sizes, summarize(means), variance)


def weighted_means(rows: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Mean of the keys or values of each span, weighted by surprisal.

    Args:
        rows: [num_kv_heads, n, head_dim], of ``segments.positions``; on any device.

    Returns:
        float32 [num_kv_heads, spans, head_dim], on the device of the rows.
    """
    device, (heads, _, dim) = rows.device, rows.shape
    weights, span = moved(segments.weights, device), moved(segments.span, device)
    means = torch.zeros(heads, segments.num_spans, dim, device=device)
    return means.index_add_(1, span, rows.float() * weights[:, None])


def weighted_variance(
    keys: torch.Tensor, means: torch.Tensor, segments: Segments
) -> torch.Tensor:
    """Variance of the keys of each span in each dimension, with the weights of means.

    Args:
        keys: [num_kv_heads, n, head_dim], of ``segments.positions``; on any device.
        means: result of :func:`weighted_means` for these keys.

    Returns:
        bfloat16 [num_kv_heads, spans, head_dim]. It is only added to the logarithm of a
        mass, so a rounding of 0.4 % matters little.
    """
    span = moved(segments.span, keys.device)
    from_mean = keys.float() - means[:, span]
    return weighted_means(from_mean.square(), segments).bfloat16()
