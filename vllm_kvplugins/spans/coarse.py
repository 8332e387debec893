"""Coarse spans: one key and one value that stand for many tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(frozen=True, slots=True)
class CoarseSpans:
    """All spans of one request and layer.

    Attributes:
        keys: float32 [num_kv_heads, spans, head_dim], the weighted mean key.
        values: float32 [num_kv_heads, spans, head_dim].
        log_sizes: float32 [spans], added to a span's score, so that the span competes
            like the tokens that it stands for.
        sizes: int64 [spans], tokens; on the CPU. All other tensors are on the keys'
            device.
        summary: the policy's routing features, computed from ``keys``.
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
        """The surprisal-weighted means of SeKV, section 3.2.

        Args:
            keys, values: [num_kv_heads, n, head_dim], at ``segments.positions``; on
                any device.
            summarize: computes routing features from the mean keys.
        """
        device, sizes = keys.device, segments.sizes
        weights, span = moved(segments.weights, device), moved(segments.span, device)

        def mean(rows: torch.Tensor) -> torch.Tensor:
            weighted = rows.float() * weights[:, None]
            heads, _, dim = rows.shape
            means = torch.zeros(heads, segments.num_spans, dim, device=device)
            return means.index_add_(1, span, weighted)

        middle, log_sizes = mean(keys), moved(sizes.float().log(), device)
        return CoarseSpans(middle, mean(values), log_sizes, sizes, summarize(middle))
