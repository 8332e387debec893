"""Zooming: spans of a prompt as means, and some of them token by token.

One request, one layer::

    compaction ── tokens that do not stay ──> their spans' means, and on another
                                              thread factors in host memory
    every step ── query ──> policy.gates ──> which spans are zoomed now?
                             tokens of those that were not before: made from factors

Means and zoomed tokens are *entries*: keys and values beside the request's pages,
each with a bias on its score. A mean whose span is zoomed is off, as is an entry for
zoomed tokens that has none: their bias is ``-inf``.

With the cache on a GPU, means and entries are there, and gates; their numbers come to
the host, which chooses, and sends the factors of spans that are new.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.engine.spans.entries import EntryArena
from vllm_kvplugins.engine.spans.state import LayerSpans, RequestSpans, Turn
from vllm_kvplugins.engine.spans.surprisal import SurprisalModel, SurprisalTracker
from vllm_kvplugins.engine.step_extension import Step, StepExtension, Traffic
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.device import AsyncHostCopy, moved
from vllm_kvplugins.ops.mixed_attention import attend_mixed
from vllm_kvplugins.ops.svd import LowRank
from vllm_kvplugins.ops.threads import helper
from vllm_kvplugins.ops.zoom import zoom_spans
from vllm_kvplugins.ops.zoom_transfer import fetch_spans
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments

if TYPE_CHECKING:
    from vllm_kvplugins.policies.span_policy import SpanPolicy

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")

_NO_FACTORS = LowRank(
    torch.empty(0),
    torch.zeros(1, dtype=torch.int64),
    torch.empty(0, dtype=torch.int64),
    torch.empty(0, dtype=torch.int64),
    head_dim=1,
)


class SpanController(StepExtension):
    """Spans of all requests on one worker.

    Args:
        scales: softmax scale per layer.
        surprisal: computes the surprisal of a step that has just run.
    """

    def __init__(
        self,
        policy: SpanPolicy,
        heap: Heap,
        geometry: Geometry,
        scales: Sequence[float],
        surprisal: SurprisalModel,
    ) -> None:
        self.policy = policy
        self._heap = heap
        self._geometry = geometry
        self._scales = list(scales)
        self._surprisals = SurprisalTracker(surprisal)
        self._followed: list[Row] = []
        self._num_rows = 0
        self._requests: dict[str, RequestSpans] = {}
        self._helper = helper("kvp-spans")
        self._rows: list[tuple[int, Row]] = []
        self._turns: list[Turn] | None = None
        self._traffic = Traffic()
        device = heap.pages.device
        self._arena = EntryArena(
            heap.num_layers, heap.layout.head_dim, heap.pages.dtype, device
        )

    # -- compactions --------------------------------------------------------------

    def end_step(
        self, prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        """Collect the hidden states that give the surprisal of the step's tokens."""
        for row in self._followed:
            self._surprisals.note(row, prompts[row.request_id][0])
        self._followed = []

    def before_compaction(
        self, due: DueCompaction, owned: PageList
    ) -> dict[int, Segments]:
        """Cut a prompt into spans and store the tokens that the compaction drops.

        Returns:
            The segments, for every layer.
        """
        row, size = due.row, self._heap.layout.block_size
        stays = len(due.compaction.retained) * size + row.after_tokens % size
        surprisal = self._surprisals.take(row.request_id)
        segments = self.policy.segment(surprisal, stays, self._geometry)
        if segments.num_spans:
            self._store(row.request_id, owned, segments)
        return dict.fromkeys(range(self._heap.num_layers), segments)

    def _store(self, request_id: str, owned: PageList, segments: Segments) -> None:
        room = self.policy.zoom_tokens(segments.resident.numel(), self._geometry)
        heads = self._heap.num_kv_heads
        first = self._arena.take(heads * (segments.num_spans + room))
        state = self._requests[request_id] = RequestSpans(segments, room, first)
        for layer, entries in enumerate(self._arena.layers):
            keys, values = self._read(layer, owned, segments.positions)
            spans = CoarseSpans.of(
                keys, values, segments, partial(self.policy.summarize, layer)
            )
            leaving = (
                AsyncHostCopy(keys),
                AsyncHostCopy(values),
                AsyncHostCopy(spans.keys),
            )
            factors = self._helper.submit(self._decompose, layer, leaving, spans)
            state.put_means(entries, spans)
            state.layers.append(LayerSpans(spans, factors))

    def _read(
        self, layer: int, owned: PageList, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_kv_heads, n, head_dim] of a request that has never
        been compacted: its pages are in order."""
        heads, size = self._heap.num_kv_heads, self._heap.layout.block_size
        pages = owned.pages[layer * heads : (layer + 1) * heads]
        positions = moved(positions, pages.device)
        page = pages[:, positions // size].flatten()
        slot = (positions % size).repeat(heads)
        found = ops.gather_tokens(self._heap.pages, page, slot, self._heap.layout)
        keys, values = (rows.view(heads, positions.numel(), -1) for rows in found)
        return keys, values

    @torch.inference_mode()
    def _decompose(
        self,
        layer: int,
        leaving: tuple[AsyncHostCopy, AsyncHostCopy, AsyncHostCopy],
        spans: CoarseSpans,
    ) -> LowRank:
        keys, values, means = (arrival.wait() for arrival in leaving)
        if means is not spans.keys:
            log_sizes = spans.sizes.float().log()
            spans = replace(spans, keys=means, log_sizes=log_sizes)
        return self.policy.decompose(layer, keys, values, spans)

    # -- steps --------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Note which rows of a step have spans."""
        self._followed, self._num_rows = list(step.followed), len(step.rows)
        self._turns = None
        self._rows = [
            (index, row)
            for index, row in enumerate(step.rows)
            if row.request_id in self._requests
        ]

    @property
    def attends_any(self) -> bool:
        """Whether a row of this step has spans."""
        return bool(self._rows)

    @property
    def attends_all(self) -> bool:
        """Whether all rows have spans, so that the kernel need not run."""
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
        flat, entries = output.view(-1, *queries.shape[1:]), self._arena.layers[layer]
        if self._turns is None:
            self._turns = self._list_turns()
        for turn in self._turns:
            asking = queries[turn.queries]
            self._zoom(layer, turn, asking)
            flat[turn.queries], _ = attend_mixed(
                asking,
                self._heap.layer_pages(layer),
                self._heap.layout,
                *turn.paged(pages, lengths),
                self._scales[layer],
                CoarseEntries(
                    entries.keys,
                    entries.values,
                    entries.attended_bias,
                    turn.starts,
                    turn.counts,
                ),
            )

    def _list_turns(self) -> list[Turn]:
        rows = [(i, row, self._requests[row.request_id]) for i, row in self._rows]
        turns = []
        for number in range(max(row.new_tokens for _, row in self._rows)):
            now = [each for each in rows if each[1].new_tokens > number]
            heap = self._heap
            turns.append(Turn.of(number, now, heap.num_kv_heads, heap.pages.device))
        return turns

    def _zoom(self, layer: int, turn: Turn, queries: torch.Tensor) -> None:
        """Let each of queries [rows, num_q_heads, head_dim] choose its spans."""
        heads, scale = self._heap.num_kv_heads, self._scales[layer]
        grouped = queries.view(len(queries), heads, -1, queries.shape[2])
        gates, factors = [], []
        for name, state, query in zip(turn.names, turn.states, grouped, strict=True):
            here = state.layers[layer]
            made = self._factors(layer, name, here) if state.room else _NO_FACTORS
            if made is _NO_FACTORS:
                shape = here.spans.keys.shape[:2]
                gates.append(here.spans.keys.new_full(shape, -torch.inf))
            else:
                gates.append(self.policy.gates(layer, query, here.spans, scale))
            factors.append(made)
        if all(made is _NO_FACTORS for made in factors):
            return
        every = AsyncHostCopy(torch.cat([gate.flatten() for gate in gates])).wait()
        entries = self._arena.layers[layer]
        if turn.places is None:
            made_tokens, shown = zoom_spans(entries, turn.regions, every, factors)
        else:
            made_tokens, shown = fetch_spans(
                entries, turn.regions, *turn.places, every, factors
            )
        self._traffic.fetched += made_tokens
        self._traffic.selected += shown

    def _factors(self, layer: int, request_id: str, here: LayerSpans) -> LowRank:
        """Waits for them; none of any matrix if they could not be made."""
        if here.factors is None:
            return _NO_FACTORS
        try:
            return here.factors.result()
        except (RuntimeError, ValueError, MemoryError):
            # the request goes on with what its spans are as a whole
            logger.warning(
                "request %s, layer %d: no zoom, its spans could not be decomposed",
                request_id,
                layer,
                exc_info=True,
            )
            self._traffic.failed += 1
            here.factors = None
            return _NO_FACTORS

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
            self._followed = [r for r in self._followed if r.request_id != request_id]
            state = self._requests.pop(request_id, None)
            if state is None:
                continue
            for layer in state.layers:
                if layer.factors is not None:
                    layer.factors.cancel()
            self._arena.give(*self._run(state))
            # it may be a row of the step that begins
            self._rows = [
                (i, row) for i, row in self._rows if row.request_id != request_id
            ]

    def device_bytes(self, request_id: str) -> int:
        """Keys and values of a request's entries, all layers together."""
        state = self._requests.get(request_id)
        return 0 if state is None else self._arena.num_bytes(self._run(state)[1])

    def _run(self, state: RequestSpans) -> tuple[int, int]:
        return state.first, self._heap.num_kv_heads * state.entries_per_head

    @property
    def num_requests(self) -> int:
        """Requests that have spans."""
        return len(self._requests)

    def check_integrity(self) -> None:
        """Every zoomed span has its tokens, nobody else has any, and every entry
        belongs to one request or none."""
        states = self._requests.values()
        self._arena.check_integrity([self._run(state) for state in states])
        for state in states:
            for entries in self._arena.layers:
                state.check_integrity(entries, self._heap.num_kv_heads)
