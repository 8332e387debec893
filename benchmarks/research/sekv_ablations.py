"""SeKV with one component removed (SeKV, table 5), as separate policies.

    import sekv_ablations

    sekv_ablations.register()

Call this before an engine starts in the same process, as ``needle.py`` does. All have
the budget and plan of ``sekv``; freed tokens go to the newest tokens. To remove the
zoom use ``{"name": "sekv", "zoom_share": 0}``, which gives its tokens to anchors.
``sekv`` without ``router`` has no trained router.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.registry import register_policy
from vllm_kvplugins.policies.sekv import SeKV, mean_key_shares, zoom_gates
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments, cut_evenly


class FixedChunks(SeKV):
    """Spans of equal length; surprising tokens are kept, but do not end spans."""

    name: ClassVar[str] = "sekv-fixed-chunks"
    summary: ClassVar[str] = "sekv whose spans are chunks of one length"

    def segment(
        self, surprisal: torch.Tensor, resident_tokens: int, geometry: Geometry
    ) -> Segments:
        unlimited = self.model_copy(update={"sensitivity": float("inf")})
        return SeKV.segment(unlimited, surprisal, resident_tokens, geometry)


class NoAnchors(SeKV):
    """Surprising tokens end spans, but are not kept; more of the newest tokens are."""

    name: ClassVar[str] = "sekv-no-anchors"
    summary: ClassVar[str] = "sekv whose surprising tokens do not stay"

    def segment(
        self, surprisal: torch.Tensor, resident_tokens: int, geometry: Geometry
    ) -> Segments:
        whole = super().segment(surprisal, resident_tokens, geometry)
        spans, tokens = whole.num_spans, surprisal.numel()
        resident = torch.zeros(tokens, dtype=torch.bool)
        sinks = min(self.sinks, resident_tokens - 1)
        resident[:sinks] = True
        resident[tokens - (resident_tokens - sinks) :] = True
        positions = (~resident).nonzero().squeeze(1)
        cut = torch.searchsorted(whole.anchors, positions, right=True)
        _, span, sizes = cut.unique_consecutive(return_inverse=True, return_counts=True)
        # because cut_evenly computes shares of a span's surprisal from it
        worth = surprisal[positions].clamp(min=0)
        divided = Segments(resident, positions, span, sizes, worth, whole.anchors)
        return cut_evenly(divided, self.least_span, spans)


class PlainMeans(SeKV):
    """All tokens of a span have equal weight in its mean."""

    name: ClassVar[str] = "sekv-plain-means"
    summary: ClassVar[str] = "sekv whose means are not weighted by surprisal"

    def segment(
        self, surprisal: torch.Tensor, resident_tokens: int, geometry: Geometry
    ) -> Segments:
        segments = super().segment(surprisal, resident_tokens, geometry)
        even = (1 / segments.sizes.float())[segments.span]
        return replace(segments, weights=even)


class OneThreshold(SeKV):
    """All heads zoom at the same gate: the mean of a router's thresholds."""

    name: ClassVar[str] = "sekv-one-threshold"
    summary: ClassVar[str] = "sekv whose router has one threshold"

    def gates(
        self, layer: int, queries: torch.Tensor, spans: CoarseSpans, scale: float
    ) -> torch.Tensor:
        router = self.trained
        if router is None:
            raise ValueError(f"{self.name} needs a router; name its file as `router`")
        flat = torch.full_like(router.threshold, float(router.threshold.mean()))
        same = replace(router, threshold=flat)
        shares = mean_key_shares(queries, spans, scale)
        return zoom_gates(same, layer, queries, spans, shares)


ABLATIONS = (FixedChunks, NoAnchors, PlainMeans, OneThreshold)


def register() -> None:
    """Register the policies under their names."""
    for policy in ABLATIONS:
        register_policy(policy.name, f"{__name__}:{policy.__name__}")
