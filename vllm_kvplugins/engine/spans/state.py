"""State of one request whose prompt is cut into spans, and of one step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.engine.nth_tokens import NthTokens
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.svd import LowRank
from vllm_kvplugins.ops.zoom import ZoomEntries, ZoomRegions
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(slots=True, eq=False)
class LayerSpans:
    """One layer of a request.

    Attributes:
        summary: routing features of its spans, if the policy computes some.
        key_variance: variance of its spans' keys, if the policy reads it.
        factors: the low-rank factors of all spans' keys, one KV head after the other,
            then of all values. None if they failed: the layer cannot zoom.
    """

    summary: torch.Tensor | None
    key_variance: torch.Tensor | None
    factors: Future[LowRank] | None


@dataclass(slots=True, eq=False)
class RequestSpans:
    """A request whose prompt is cut into spans.

    Attributes:
        room: maximum number of zoomed tokens per KV head.
        first: its first entry, in every layer. Each KV head has ``num_spans + room``
            entries, one head after the other.
        log_sizes: float32 [spans], logarithms of the span lengths, on the device.
        layers: one per layer.
    """

    segments: Segments
    room: int
    first: int
    log_sizes: torch.Tensor
    layers: list[LayerSpans] = field(default_factory=list)

    @property
    def entries_per_head(self) -> int:
        """Entries for means and for zoomed tokens."""
        return self.segments.num_spans + self.room

    @property
    def routing_tensors(self) -> list[torch.Tensor]:
        """All tensors on the device except entries."""
        tensors = [self.log_sizes]
        for layer in self.layers:
            own = layer.summary, layer.key_variance
            tensors += [each for each in own if each is not None]
        return tensors

    def put_means(
        self, entries: ZoomEntries, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the means of all spans of a layer, and switch them on.

        Args:
            keys, values: float32 [num_kv_heads, spans, head_dim].
        """
        heads, count, _ = keys.shape
        head = torch.arange(heads)[:, None]
        place = self.first + head * self.entries_per_head + torch.arange(count)
        entries.bias[place] = self.segments.sizes.float().log()
        place = moved(place, keys.device)
        entries.keys[place] = keys.to(entries.keys.dtype)
        entries.values[place] = values.to(entries.values.dtype)
        entries.attended_bias[place] = self.log_sizes

    def coarse(self, layer: int, entries: ZoomEntries, heads: int) -> CoarseSpans:
        """The spans of a layer. The mean keys are a view of the entries.

        Attention reads the same keys, so routing needs no copy of them.
        """
        run = entries.keys[self.first : self.first + heads * self.entries_per_head]
        keys = run.view(heads, self.entries_per_head, -1)
        means, own = keys[:, : self.segments.num_spans], self.layers[layer]
        return CoarseSpans(
            means,
            self.log_sizes,
            self.segments.sizes,
            own.summary,
            own.key_variance,
        )

    def check_integrity(self, entries: ZoomEntries, heads: int) -> None:
        """Check that each span has either its mean or its tokens as entries."""
        count, sizes = self.segments.num_spans, self.segments.sizes
        run = slice(self.first, self.first + heads * self.entries_per_head)
        is_on = entries.bias[run].view(heads, -1) > -torch.inf
        owner = entries.owner[run].view(heads, -1)[:, count:]
        owned = torch.zeros(heads, count + 1, dtype=torch.int64)
        owned.scatter_add_(1, owner + 1, torch.ones_like(owner))
        expected = ~is_on[:, :count] * sizes
        assert torch.equal(owned[:, 1:], expected), "a zoomed span lacks tokens"
        assert torch.equal(is_on[:, count:], owner >= 0), "a bias without a span"


@dataclass(slots=True, eq=False)
class QueryRound:
    """The n-th new token of each row with spans; the same in all layers of a step.

    Attributes:
        states: one per row.
        tokens: the n-th new tokens.
        regions: the rows' entries; on the host.
        starts, counts: int64 [rows * num_kv_heads], the same on the device.
        places: int64, all entries of the rows, on the host and on the device; None on
            a CPU.
    """

    states: list[RequestSpans]
    names: list[str]
    tokens: NthTokens
    regions: ZoomRegions
    starts: torch.Tensor
    counts: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    def of(
        tokens: NthTokens,
        names: Sequence[str],
        states: Sequence[RequestSpans],
        device: torch.device,
    ) -> QueryRound:
        """The round of some rows.

        Args:
            names, states: one per row.
        """
        heads = tokens.num_kv_heads
        sizes = torch.cat([state.segments.sizes for state in states])
        table = torch.tensor(
            [[state.first, state.segments.num_spans, state.room] for state in states]
        )
        regions = ZoomRegions(table, heads, sizes, sizes.float().log())
        places = None
        if device.type != "cpu":
            places = regions.places, moved(regions.places, device)
        return QueryRound(
            list(states),
            list(names),
            tokens,
            regions,
            moved(regions.starts, device),
            moved(regions.counts, device),
            places,
        )
