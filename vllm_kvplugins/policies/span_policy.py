"""Policies that keep spans of tokens at two resolutions and zoom into some of them.

Entries that a query attends to, per layer and KV head::

    [ sinks, anchors, window ] [ a mean per span ] [ tokens of zoomed spans ] [ tail ]
      pages of the request       entries outside the pages, in the same softmax

All other tokens are in host memory, as low-rank factors where these are smaller than
the tokens. Zoomed spans are reconstructed from them.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from vllm_kvplugins.ops.components import keep_components
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.svd import LowRank, truncated_svd
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.device_memory import SpanMemory
from vllm_kvplugins.spans.segmentation import Segments


class SpanPolicy(KVCachePolicy):
    """Base class of policies that divide a prompt into spans after the prefill.

    Subclasses decide where spans begin, how many tokens are zoomed, and in which spans.
    """

    @property
    def spans(self) -> SpanPolicy:
        return self

    @property
    def uses_query_heads(self) -> bool:
        """Whether the policy has parameters for each query head of the model."""
        return False

    @property
    def host_memory_bytes(self) -> int | None:
        """Maximum host memory of all requests; None: the engine decides."""
        return None

    @abstractmethod
    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Maximum host memory of a request that ends with this many tokens."""

    @abstractmethod
    def segment(
        self, surprisal: torch.Tensor, resident_tokens: int, geometry: Geometry
    ) -> Segments:
        """Divide a prompt.

        Args:
            surprisal: float32 [tokens], in nats; 0 for the first token.
            resident_tokens: number of tokens that stay resident, tail included.
        """

    @abstractmethod
    def zoom_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        """Maximum number of zoomed tokens per KV head."""

    @property
    def uses_key_variance(self) -> bool:
        """Whether ``gates`` reads ``CoarseSpans.key_variance``; then ``device_memory``
        must count it."""
        return False

    def device_memory(self, geometry: Geometry) -> SpanMemory:
        """Sizes on the device, with which the engine accounts for spans."""
        return SpanMemory(geometry.row_bytes)

    @property
    @abstractmethod
    def max_rank(self) -> int:
        """Largest rank of a span's factors."""

    def summarize(self, layer: int, keys: torch.Tensor) -> torch.Tensor | None:
        """Features of spans for ``gates``; computed once, when spans are created.

        ``device_memory`` must count them.

        Args:
            keys: float32 [num_kv_heads, spans, head_dim], weighted means.

        Returns:
            A tensor, stored as ``CoarseSpans.summary``. None: ``gates`` needs no more
            than the mean keys.
        """
        return None

    def component_gates(
        self, layer: int, factors: LowRank, spans: CoarseSpans
    ) -> torch.Tensor | None:
        """Weight of each component of the spans' factors (SeKV, equation 7).

        Runs on another thread than the other hooks.

        Args:
            factors: factors of the keys of all spans, one KV head after the other, then
                of all values.
            spans: the spans, without a summary.

        Returns:
            float32 in [0, 1], one weight per singular value, one matrix after the
            other. None: all components keep their full weight.
        """
        return None

    @property
    def min_gate(self) -> float:
        """Smallest weight of a component that is kept.

        SeKV, section 3.2, drops "negligible gates" and gives no number.
        """
        return 0.05

    def decompose(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, spans: CoarseSpans
    ) -> LowRank:
        """Decompose the spans of a layer (SeKV, equations 6 to 8).

        Drops components whose weight is below ``min_gate``. Keeps the rows of spans
        whose factors would be no smaller.

        Args:
            keys, values: [num_kv_heads, tokens, head_dim], one span after the other.
            spans: the spans, without a summary.
        """
        starts = spans.sizes.cumsum(0) - spans.sizes
        rows = torch.cat([keys, values])
        factors = truncated_svd(
            rows, starts, spans.sizes, self.max_rank, rows_if_smaller=True
        )
        gates = self.component_gates(layer, factors, spans)
        if gates is None:
            return factors
        return keep_components(factors, gates, self.min_gate)

    @abstractmethod
    def gates(
        self, layer: int, queries: torch.Tensor, spans: CoarseSpans, scale: float
    ) -> torch.Tensor:
        """Rank the spans for the queries of one token.

        Args:
            queries: [num_kv_heads, group, head_dim], of one token, after RoPE.
            scale: softmax scale of the layer.

        Returns:
            float32 [num_kv_heads, spans]. Spans are zoomed in descending order; spans
            with ``-inf`` are never zoomed.
        """

    def score(self, view: LayerView) -> torch.Tensor:
        """Keep the resident tokens of the segments, which are ``view.observed``."""
        segments: Segments = view.observed
        resident = moved(segments.resident, view.positions.device)
        return resident[view.positions.clamp(min=0)].float()
