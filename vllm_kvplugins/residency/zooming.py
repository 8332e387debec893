"""Zooming: spans of a prompt as means, and some of them token by token.

One request, one layer::

    compaction ── tokens that do not stay ──> their spans' means, and on another
                                              thread factors in host memory
    every step ── query ──> policy.gates ──> which spans are zoomed now?
                             tokens of those that were not before: made from factors

Means and zoomed tokens are *entries*: keys and values beside the request's pages,
each with a bias on its score. A mean whose span is zoomed is off, as is an entry for
zoomed tokens that has none: their bias is ``-inf``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.components import keep_components
from vllm_kvplugins.ops.mixed_attention import CoarseEntries, attend_mixed
from vllm_kvplugins.ops.svd import LowRank, reconstruct, truncated_svd
from vllm_kvplugins.policies.base import Geometry
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.offloaded import Traffic
from vllm_kvplugins.residency.requests import Due, PageList, Row
from vllm_kvplugins.residency.surprisal import Surprisals, TokenLosses
from vllm_kvplugins.spans.coarse import CoarseSpans, within_room
from vllm_kvplugins.spans.segmentation import Segments

if TYPE_CHECKING:
    from vllm_kvplugins.policies.resolution import Resolver

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")


@dataclass(slots=True, eq=False)
class ZoomedLayer:
    """One layer of a request.

    Attributes:
        spans: their means.
        factors: when they are there; of all spans' keys, KV head by KV head, and
            then of all values.
        keys, values: [num_kv_heads, spans + room, head_dim], entries: first the
            means, then zoomed tokens.
        bias: float32 [num_kv_heads, spans + room].
        zoomed: bool [num_kv_heads, spans].
        owner: int64 [num_kv_heads, room], span of each zoomed token, -1 = none.
        room: tokens that can be zoomed; 0 if that has failed.
    """

    spans: CoarseSpans
    factors: Future[LowRank]
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    zoomed: torch.Tensor
    owner: torch.Tensor
    room: int

    @staticmethod
    def of(
        spans: CoarseSpans,
        factors: Future[LowRank],
        room: int,
        dtype: torch.dtype,
    ) -> ZoomedLayer:
        """Nothing is zoomed yet."""
        heads, count, dim = spans.keys.shape
        keys = torch.zeros(heads, count + room, dim, dtype=dtype)
        values = torch.zeros_like(keys)
        keys[:, :count], values[:, :count] = spans.keys, spans.values
        bias = torch.full((heads, count + room), -torch.inf)
        bias[:, :count] = spans.log_sizes
        zoomed = torch.zeros(heads, count, dtype=torch.bool)
        owner = torch.full((heads, room), -1)
        return ZoomedLayer(spans, factors, keys, values, bias, zoomed, owner, room)

    def zoom(self, chosen: torch.Tensor, factors: LowRank | None) -> int:
        """See these spans token by token from now on, and no others.

        Args:
            chosen: bool [num_kv_heads, spans]; they fit.
            factors: None if none is chosen.

        Returns:
            How many tokens had to be made.
        """
        new, gone = chosen & ~self.zoomed, self.zoomed & ~chosen
        self.zoomed = chosen
        count = chosen.shape[1]
        if bool(gone.any()):
            left = (self.owner >= 0) & gone.gather(1, self.owner.clamp(min=0))
            self.owner[left] = -1
            self.bias[:, count:][left] = -torch.inf
        self.bias[:, :count] = self.spans.log_sizes.masked_fill(chosen, -torch.inf)
        if not bool(new.any()):
            return 0
        head, span = new.nonzero(as_tuple=True)
        sizes = self.spans.sizes[span]
        free = self.owner < 0
        tokens = torch.zeros(len(free), dtype=torch.int64).index_add_(0, head, sizes)
        free &= free.cumsum(1) <= tokens[:, None]
        row, slot = free.nonzero(as_tuple=True)
        self.owner[row, slot] = span.repeat_interleave(sizes)
        self.bias[row, count + slot] = 0.0
        assert factors is not None
        which = head * count + span
        dtype, values = self.keys.dtype, chosen.numel()
        self.keys[row, count + slot] = reconstruct(factors, which, dtype)
        self.values[row, count + slot] = reconstruct(factors, which + values, dtype)
        return row.numel()

    def check_integrity(self) -> None:
        """A span's tokens are entries if and only if it is zoomed; else its mean."""
        heads, count = self.zoomed.shape
        owned = torch.zeros(heads, count + 1, dtype=torch.int64)
        owned.scatter_add_(1, self.owner + 1, torch.ones_like(self.owner))
        wanted = self.zoomed * self.spans.sizes
        assert torch.equal(owned[:, 1:], wanted), "a zoomed span lacks tokens"
        on = self.bias > -torch.inf
        assert torch.equal(on[:, :count], ~self.zoomed), "a span counts twice"
        assert torch.equal(on[:, count:], self.owner >= 0), "an entry of nobody"


@dataclass(slots=True, eq=False)
class Zoomed:
    """A request whose prompt has been divided."""

    segments: Segments
    room: int
    layers: list[ZoomedLayer] = field(default_factory=list)


class Zooming:
    """Spans of all requests on one worker.

    Args:
        scales: softmax scale per layer.
        losses: of the step that has just run.
    """

    def __init__(
        self,
        policy: Resolver,
        heap: Heap,
        geometry: Geometry,
        scales: Sequence[float],
        losses: TokenLosses,
    ) -> None:
        self.policy = policy
        self._heap = heap
        self._geometry = geometry
        self._scales = list(scales)
        self._surprisals = Surprisals(losses)
        self._watched: list[Row] = []
        self._num_rows = 0
        self._requests: dict[str, Zoomed] = {}
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="kvp-spans")
        self._rows: list[tuple[int, Row]] = []
        self._traffic = Traffic()

    # -- compactions --------------------------------------------------------------

    def end_step(self, prompts: Mapping[str, tuple[Sequence[int], object]]) -> None:
        """The step's forward pass is over: see how surprising its tokens were.

        Args:
            prompts: token ids of live requests, and what else they asked.
        """
        for row in self._watched:
            self._surprisals.note(row, prompts[row.request_id][0])
        self._watched = []

    def divide(self, due: Due, owned: PageList) -> dict[int, Segments]:
        """Cut a prompt into spans, and take in the tokens that leave with the
        compaction that comes next.

        Args:
            owned: the request's pages.

        Returns:
            For every layer, what the policy scores by.
        """
        row, size = due.row, self._heap.layout.block_size
        stays = len(due.compaction.zone) * size + row.after_tokens % size
        surprisal = self._surprisals.take(row.request_id)
        segments = self.policy.segment(surprisal, stays, self._geometry)
        if segments.num_spans:
            self._take_in(row.request_id, owned, segments)
        return dict.fromkeys(range(self._heap.num_layers), segments)

    def _take_in(self, request_id: str, owned: PageList, segments: Segments) -> None:
        room = self.policy.zoom_tokens(segments.resident.numel(), self._geometry)
        state = self._requests[request_id] = Zoomed(segments, room)
        for layer in range(self._heap.num_layers):
            keys, values = self._read(layer, owned, segments.positions)
            spans = CoarseSpans.of(
                keys, values, segments, partial(self.policy.summarize, layer)
            )
            factors = self._helper.submit(self._decompose, layer, keys, values, spans)
            dtype = self._heap.pages.dtype
            state.layers.append(ZoomedLayer.of(spans, factors, room, dtype))

    def _read(
        self, layer: int, owned: PageList, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_kv_heads, n, head_dim] of a request that has never
        been compacted: its pages are in order."""
        heads, size = self._heap.num_kv_heads, self._heap.layout.block_size
        pages = owned.pages[layer * heads : (layer + 1) * heads]
        page = pages[:, positions // size].flatten()
        slot = (positions % size).repeat(heads)
        found = ops.gather_tokens(self._heap.pages, page, slot, self._heap.layout)
        keys, values = (rows.view(heads, positions.numel(), -1) for rows in found)
        return keys, values

    @torch.inference_mode()
    def _decompose(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        spans: CoarseSpans,
    ) -> LowRank:
        starts = spans.sizes.cumsum(0) - spans.sizes
        rows = torch.cat([keys, values])
        factors = truncated_svd(rows, starts, spans.sizes, self.policy.most_rank)
        gates = self.policy.component_gates(layer, factors, spans.summary)
        if gates is None:
            return factors
        return keep_components(factors, gates, self.policy.least_gate)

    # -- steps --------------------------------------------------------------------

    def begin_step(self, rows: Sequence[Row]) -> None:
        """Note which rows of a step have spans."""
        self._watched, self._num_rows = [], len(rows)
        self._rows = [
            (index, row)
            for index, row in enumerate(rows)
            if row.request_id in self._requests
        ]

    def watch(self, row: Row) -> None:
        """A row of the step whose prompt is divided when it is in."""
        self._watched.append(row)

    @property
    def takes_any(self) -> bool:
        """Whether a row of this step has spans."""
        return bool(self._rows)

    @property
    def takes_all(self) -> bool:
        """Whether all have, so that nobody else need attend."""
        return len(self._rows) == self._num_rows > 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attention of the rows that have spans, over pages and entries in one
        softmax. Of several new tokens (computed anew after a preemption) each zooms
        for itself, one after the other.

        Args:
            queries: [step tokens, num_q_heads, head_dim].
            pages: int32 [rows * num_kv_heads, most], relative to the layer.
            lengths: int32 [rows * num_kv_heads], tokens there.
            output: as ``queries``; written where a row has spans.
        """
        flat = output.view(-1, *queries.shape[1:])
        for turn in range(max(row.new_tokens for _, row in self._rows)):
            rows = [(i, row) for i, row in self._rows if row.new_tokens > turn]
            at = torch.tensor([row.first_query + turn for _, row in rows])
            asking = queries[at]
            entries = [
                self._entries(layer, row.request_id, query)
                for (_, row), query in zip(rows, asking, strict=True)
            ]
            index = torch.tensor([i for i, _ in rows])
            later = torch.tensor([row.new_tokens - 1 - turn for _, row in rows])
            heads = self._heap.num_kv_heads
            flat[at], _ = attend_mixed(
                asking,
                self._heap.layer_pages(layer),
                self._heap.layout,
                pages.unflatten(0, (-1, heads))[index].flatten(0, 1),
                (lengths.view(-1, heads)[index] - later[:, None]).flatten().int(),
                self._scales[layer],
                _together(entries),
            )

    def _entries(self, layer: int, request_id: str, query: torch.Tensor) -> ZoomedLayer:
        """What a query [num_q_heads, head_dim] attends to beside pages."""
        here = self._requests[request_id].layers[layer]
        if here.room:
            queries = query.view(self._heap.num_kv_heads, -1, query.shape[1])
            gates = self.policy.gates(layer, queries, here.spans, self._scales[layer])
            chosen = within_room(gates, here.spans.sizes, here.room)
            self._zoom(layer, request_id, here, chosen)
        return here

    def _zoom(
        self, layer: int, request_id: str, here: ZoomedLayer, chosen: torch.Tensor
    ) -> None:
        try:
            factors = here.factors.result() if bool(chosen.any()) else None
        except (RuntimeError, ValueError, MemoryError):
            # the request goes on with what its spans are as a whole
            logger.warning(
                "request %s, layer %d: no zoom, its spans could not be decomposed",
                request_id,
                layer,
                exc_info=True,
            )
            self._traffic.failed += 1
            here.room = 0
            return
        self._traffic.fetched += here.zoom(chosen, factors)
        self._traffic.selected += int((here.owner >= 0).sum())

    def take_traffic(self) -> Traffic:
        """Tokens that queries saw one by one, how many of them had to be made, and
        layers that could not zoom, since the last call."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    # -- requests that go ---------------------------------------------------------

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests; what is being decomposed for them is not waited for."""
        for request_id in request_ids:
            self._surprisals.forget([request_id])
            state = self._requests.pop(request_id, None)
            for layer in state.layers if state else ():
                layer.factors.cancel()

    @property
    def num_requests(self) -> int:
        """Requests that have spans."""
        return len(self._requests)

    def check_integrity(self) -> None:
        """Every zoomed span has its tokens, and nobody else has any."""
        for state in self._requests.values():
            for here in state.layers:
                here.check_integrity()


def _together(layers: Sequence[ZoomedLayer]) -> CoarseEntries:
    """The entries of several requests, KV head by KV head."""
    counts = torch.tensor([here.bias.shape[1] for here in layers for _ in here.bias])
    return CoarseEntries(
        torch.cat([here.keys.flatten(0, 1) for here in layers]),
        torch.cat([here.values.flatten(0, 1) for here in layers]),
        torch.cat([here.bias.flatten() for here in layers]),
        counts.cumsum(0) - counts,
        counts,
    )
