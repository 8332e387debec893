"""Policies that keep spans of tokens at two resolutions, and zoom in on some.

Per (layer, KV head), for each query::

    [ sinks, anchors, window ] [ a mean per span ] [ tokens of zoomed spans ] [ tail ]
      pages of the request       entries outside the pages, in the same softmax

Other tokens are in host memory as low-rank factors, from which zoomed
spans are reconstructed.
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
from vllm_kvplugins.spans.segmentation import Segments


class SpanPolicy(KVCachePolicy):
    """Base of policies that divide a prompt into spans when it is in.

    Subclasses say where spans begin, how many tokens are zoomed, and on which spans.
    """

    @property
    def spans(self) -> SpanPolicy:
        return self

    @property
    def uses_query_heads(self) -> bool:
        """Whether it has separate numbers for each of the model's query heads."""
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
            resident_tokens: how many stay, the ones in the tail among them.
        """

    @abstractmethod
    def zoom_tokens(self, prompt_tokens: int, geometry: Geometry) -> int:
        """Tokens of spans that a query sees one by one, per KV head, at most."""

    @property
    @abstractmethod
    def max_rank(self) -> int:
        """Largest rank of a span's factors."""

    def summarize(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """What ``gates`` wants to know of spans, made once, when they are.

        Args:
            keys: float32 [num_kv_heads, spans, head_dim], their weighted means.

        Returns:
            Anything; ``CoarseSpans.summary``.
        """
        return keys

    def component_gates(
        self, layer: int, factors: LowRank, spans: CoarseSpans
    ) -> torch.Tensor | None:
        """How much of each component of a span's factors counts (equation 7).

        Args:
            factors: of all spans' keys, KV head by KV head, and then of all values.
            spans: what the factors are of.

        Called on another thread than the rest.

        Returns:
            float32 in [0, 1], a number per singular value, matrix by matrix; None:
            all count as they are.
        """
        return None

    @property
    def min_gate(self) -> float:
        """Components that count less are dropped: "negligible gates" of SeKV,
        section 3.2, which names no number."""
        return 0.05

    def decompose(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, spans: CoarseSpans
    ) -> LowRank:
        """The factors of a layer's spans, without components that count little
        (equations 6 to 8).

        Args:
            keys, values: [num_kv_heads, tokens, head_dim], span by span.
        """
        starts = spans.sizes.cumsum(0) - spans.sizes
        rows = torch.cat([keys, values])
        factors = truncated_svd(rows, starts, spans.sizes, self.max_rank)
        gates = self.component_gates(layer, factors, spans)
        if gates is None:
            return factors
        return keep_components(factors, gates, self.min_gate)

    @abstractmethod
    def gates(
        self, layer: int, queries: torch.Tensor, spans: CoarseSpans, scale: float
    ) -> torch.Tensor:
        """How much a query wants to see of each span.

        Args:
            queries: [num_kv_heads, group, head_dim], of one token, after RoPE.
            scale: softmax scale of the layer.

        Returns:
            float32 [num_kv_heads, spans], larger = sooner, ``-inf`` = not at all.
        """

    def score(self, view: LayerView) -> torch.Tensor:
        """What the segments say: they are ``view.observed``."""
        segments: Segments = view.observed
        resident = moved(segments.resident, view.positions.device)
        return resident[view.positions.clamp(min=0)].float()
