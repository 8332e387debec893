"""A span as a whole: one key and one value, and how many tokens it stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvplugins.spans.segmentation import Segments


@dataclass(frozen=True, slots=True)
class CoarseSpans:
    """All spans of one request and layer.

    Attributes:
        keys: float32 [num_kv_heads, spans, head_dim], the weighted mean key.
        values: float32 [num_kv_heads, spans, head_dim].
        log_sizes: float32 [spans], what a span's score gets on top, so that it
            competes like the tokens that it stands for.
        sizes: int64 [spans], tokens.
        summary: what the policy routes by, as it made it of ``keys``.
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
            keys, values: [num_kv_heads, n, head_dim], of ``segments.positions``.
            summarize: mean keys -> what is routed by.
        """

        def mean(rows: torch.Tensor) -> torch.Tensor:
            weighted = rows.float() * segments.weights[:, None]
            heads, _, dim = rows.shape
            means = torch.zeros(heads, segments.num_spans, dim)
            return means.index_add_(1, segments.span, weighted)

        sizes = segments.sizes
        middle = mean(keys)
        return CoarseSpans(
            middle, mean(values), sizes.float().log(), sizes, summarize(middle)
        )
