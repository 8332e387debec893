"""Coarse spans: one mean key and value for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(frozen=True, slots=True)
class CoarseSpans:
    """All spans of one request in one layer.

    Attributes:
        keys, values: float32 [num_kv_heads, spans, head_dim], weighted means.
        log_sizes: float32 [spans], logarithm of the span lengths. Attention adds it to
            the score of a span, which then weighs as much as all its tokens.
        sizes: int64 [spans], span lengths in tokens; on the CPU. All other tensors are
            on the device of the keys.
        summary: routing features that the policy computes from ``keys``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    log_sizes: torch.Tensor
    sizes: torch.Tensor
    summary: torch.Tensor

    @staticmethod
    def of(
        keys: torch.Tensor,
        values: torch.Tensor,
        segments: Segments,
        summarize: Callable[[torch.Tensor], torch.Tensor],
    ) -> CoarseSpans:
        """Means weighted by surprisal (SeKV, section 3.2).

        Args:
            keys, values: [num_kv_heads, n, head_dim], of ``segments.positions``; on any
                device.
            summarize: computes routing features from the mean keys.
        """
        device, sizes = keys.device, segments.sizes
        weights, span = moved(segments.weights, device), moved(segments.span, device)

        def mean(rows: torch.Tensor) -> torch.Tensor:
            weighted = rows.float() * weights[:, None]
            heads, _, dim = rows.shape
            means = torch.zeros(heads, segments.num_spans, dim, device=device)
            return means.index_add_(1, span, weighted)

        mean_keys, log_sizes = mean(keys), moved(sizes.float().log(), device)
        return CoarseSpans(
            mean_keys, mean(values), log_sizes, sizes, summarize(mean_keys)
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are on the device of the keys."""
        tensors = (self.keys, self.values, self.log_sizes, self.summary)
        return sum(tensor.nbytes for tensor in tensors)
