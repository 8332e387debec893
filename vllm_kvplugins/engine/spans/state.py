"""What is known of one request whose prompt has been divided, and of one step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.ops.device import moved, on_device
from vllm_kvplugins.ops.svd import LowRank
from vllm_kvplugins.ops.zoom import ZoomEntries, ZoomRegions
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments


@dataclass(slots=True, eq=False)
class LayerSpans:
    """One layer of a request.

    Attributes:
        spans: their means.
        factors: when they are there; of all spans' keys, KV head by KV head, and
            then of all values. None if that has failed: there is no zoom.
    """

    spans: CoarseSpans
    factors: Future[LowRank] | None


@dataclass(slots=True, eq=False)
class RequestSpans:
    """A request whose prompt has been divided.

    Attributes:
        room: tokens that can be zoomed, per KV head.
        first: where its entries begin, in every layer; first those of one KV head,
            ``num_spans + room``, then the next one's.
        layers: one per layer.
    """

    segments: Segments
    room: int
    first: int
    layers: list[LayerSpans] = field(default_factory=list)

    @property
    def entries_per_head(self) -> int:
        """Means, and room for tokens."""
        return self.segments.num_spans + self.room

    def put_means(self, entries: ZoomEntries, spans: CoarseSpans) -> None:
        """Let queries see all spans of a layer as a whole."""
        heads, count, _ = spans.keys.shape
        head = torch.arange(heads)[:, None]
        at = self.first + head * self.entries_per_head + torch.arange(count)
        entries.bias[at] = spans.sizes.float().log()
        there = moved(at, spans.keys.device)
        entries.keys[there] = spans.keys.to(entries.keys.dtype)
        entries.values[there] = spans.values.to(entries.values.dtype)
        entries.attended_bias[there] = spans.log_sizes

    def check_integrity(self, entries: ZoomEntries, heads: int) -> None:
        """A span's tokens are entries if and only if it is zoomed; else its mean."""
        count, sizes = self.segments.num_spans, self.segments.sizes
        run = slice(self.first, self.first + heads * self.entries_per_head)
        on = entries.bias[run].view(heads, -1) > -torch.inf
        owner = entries.owner[run].view(heads, -1)[:, count:]
        owned = torch.zeros(heads, count + 1, dtype=torch.int64)
        owned.scatter_add_(1, owner + 1, torch.ones_like(owner))
        wanted = ~on[:, :count] * sizes
        assert torch.equal(owned[:, 1:], wanted), "a zoomed span lacks tokens"
        assert torch.equal(on[:, count:], owner >= 0), "an entry of nobody"


@dataclass(slots=True, eq=False)
class Turn:
    """The n-th new tokens of a step's rows that have spans: the same in all layers.

    Attributes:
        states: one per row.
        queries: int64 [rows], among the step's.
        rows: int64 [rows], among all rows of the step.
        later: int32 [rows], new tokens behind these.
        regions: of the rows' entries; on the host.
        starts, counts: int64 [rows * num_kv_heads], the same.
        places: int64, all entries of the rows, on the host and where they are; None
            where that is the host.
        pages, lengths: of the rows, and ``paged_of``, what they were taken from.
    """

    states: list[RequestSpans]
    names: list[str]
    queries: torch.Tensor
    rows: torch.Tensor
    later: torch.Tensor
    regions: ZoomRegions
    starts: torch.Tensor
    counts: torch.Tensor
    places: tuple[torch.Tensor, torch.Tensor] | None = None
    paged_of: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    @staticmethod
    def of(
        number: int,
        rows: Sequence[tuple[int, Row, RequestSpans]],
        heads: int,
        device: torch.device,
    ) -> Turn:
        """Of rows that have so many new tokens and more."""
        states = [state for *_, state in rows]
        sizes = torch.cat([state.segments.sizes for state in states])
        table = torch.tensor(
            [[state.first, state.segments.num_spans, state.room] for state in states]
        )
        regions = ZoomRegions(table, heads, sizes, sizes.float().log())
        places = None
        if device.type != "cpu":
            places = regions.places, moved(regions.places, device)
        later = [row.new_tokens - 1 - number for _, row, _ in rows]
        return Turn(
            states,
            [row.request_id for _, row, _ in rows],
            on_device([row.first_query + number for _, row, _ in rows], device),
            on_device([index for index, *_ in rows], device),
            on_device(later, device).int(),
            regions,
            moved(regions.starts, device),
            moved(regions.counts, device),
            places,
        )

    def paged(
        self, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' part of page lists and lengths, taken once for all layers."""
        if self.paged_of is not pages or self.pages is None or self.lengths is None:
            heads, self.paged_of = self.regions.num_kv_heads, pages
            self.pages = pages.unflatten(0, (-1, heads))[self.rows].flatten(0, 1)
            own = lengths.view(-1, heads)[self.rows]
            self.lengths = (own - self.later[:, None]).flatten().int()
        return self.pages, self.lengths
