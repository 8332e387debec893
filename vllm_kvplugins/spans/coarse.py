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
    """

    keys: torch.Tensor
    log_sizes: torch.Tensor
    sizes: torch.Tensor
    summary: torch.Tensor | None = None

    @staticmethod
    def of(
        keys: torch.Tensor,
        segments: Segments,
        summarize: Callable[[torch.Tensor], torch.Tensor | None],
    ) -> CoarseSpans:
        """Summaries of spans (SeKV, section 3.2).

        Args:
            keys: [num_kv_heads, n, head_dim], of ``segments.positions``; on any device.
            summarize: computes routing features from the mean keys.
        """
        means, sizes = weighted_means(keys, segments), segments.sizes
        log_sizes = moved(sizes.float().log(), keys.device)
        return CoarseSpans(means, log_sizes, sizes, summarize(means))


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
