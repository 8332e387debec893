"""Spans: attend to their means, and token by token to the spans that are zoomed.

One request, one layer::

    compaction ── dropped tokens ──> means of their spans; another thread computes
                                     low-rank factors in host memory
    every step ── query ──> policy.gates ──> which spans are zoomed now?
                             tokens of newly zoomed spans: reconstructed from factors

Means and zoomed tokens are *entries*: keys and values outside the request's pages, each
with a bias that is added to its score. Unused entries have the bias ``-inf``, and so
have the means of zoomed spans.

On a GPU, means, entries and gates are on the device. The gates are copied to the host,
which selects spans and sends the factors of newly zoomed ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.nth_tokens import rounds_of
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.engine.spans.state import LayerSpans, QueryRound, RequestSpans
from vllm_kvplugins.engine.spans.surprisal import SurprisalModel, SurprisalTracker
from vllm_kvplugins.engine.spans.zoom_arena import ZoomArena
from vllm_kvplugins.engine.step_extension import Step, StepExtension, Traffic
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.device import AsyncHostCopy, moved
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.mixed_attention import attend_mixed
from vllm_kvplugins.ops.svd import LowRank
from vllm_kvplugins.ops.threads import Helper
from vllm_kvplugins.ops.zoom import zoom_spans
from vllm_kvplugins.ops.zoom_transfer import fetch_spans
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules
from vllm_kvplugins.spans.coarse import (
    CoarseSpans,
    weighted_means,
    weighted_variance,
)
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
        surprisal: computes the surprisal of the tokens of the last step.
        rules: what else a layer does to logits, per layer: sinks, but no cap; empty:
            nothing.
    """

    def __init__(
        self,
        policy: SpanPolicy,
        heap: Heap,
        geometry: Geometry,
        scales: Sequence[float],
        surprisal: SurprisalModel,
        rules: Sequence[LogitRules] = (),
    ) -> None:
        assert not any(each.softcap for each in rules), "spans attend without a cap"
        self.policy = policy
        self._heap = heap
        self._geometry = geometry
        self._scales, self._rules = list(scales), list(rules)
        self._surprisals = SurprisalTracker(surprisal)
        self._followed: list[Row] = []
        self._num_rows = 0
        self._requests: dict[str, RequestSpans] = {}
        self._helper = Helper("kvp-spans")
        self._rows: list[tuple[int, Row]] = []
        self._rounds: list[QueryRound] | None = None
        self._traffic = Traffic()
        device = heap.pages.device
        self._arena = ZoomArena(
            heap.num_layers, heap.layout.head_dim, heap.pages.dtype, device
        )

    # -- compactions --------------------------------------------------------------

    def end_step(
        self, prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        """Collect the hidden states that give the surprisal of the step's tokens."""
        for row in self._followed:
            self._surprisals.add(row, prompts[row.request_id][0])
        self._followed = []

    def before_compaction(
        self, due: DueCompaction, owned: PageList
    ) -> dict[int, Segments]:
        """Cut a prompt into spans and store the tokens that the compaction drops.

        Returns:
            The segments, for every layer.
        """
        row, size = due.row, self._heap.layout.block_size
        resident = len(due.compaction.retained) * size + row.after_tokens % size
        surprisal = self._surprisals.take(row.request_id)
        segments = self.policy.segment(surprisal, resident, self._geometry)
        if segments.num_spans:
            self._store_spans(row.request_id, owned, segments)
        return dict.fromkeys(range(self._heap.num_layers), segments)

    def _store_spans(
        self, request_id: str, owned: PageList, segments: Segments
    ) -> None:
        room = self.policy.zoom_tokens(segments.resident.numel(), self._geometry)
        heads, device = self._heap.num_kv_heads, self._heap.pages.device
        first = self._arena.take(heads * (segments.num_spans + room))
        log_sizes = moved(segments.sizes.float().log(), device)
        state = RequestSpans(segments, room, first, log_sizes)
        self._requests[request_id] = state
        for layer, entries in enumerate(self._arena.layers):
            keys, values = self._read_tokens(layer, owned, segments.positions)
            means = weighted_means(keys, segments)
            on_host = [AsyncHostCopy(rows) for rows in (keys, values, means)]
            factors = self._helper.submit(
                self._decompose, layer, on_host, segments.sizes
            )
            state.put_means(entries, means, weighted_means(values, segments))
            variance = None
            if self.policy.uses_key_variance:
                variance = weighted_variance(keys, means, segments)
            summary = self.policy.summarize(layer, means)
            state.layers.append(LayerSpans(summary, variance, factors))

    def _read_tokens(
        self, layer: int, owned: PageList, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_kv_heads, n, head_dim] of a request that was never
        compacted, whose pages are therefore in order of position."""
        heads, size = self._heap.num_kv_heads, self._heap.layout.block_size
        pages = owned.pages[layer * heads : (layer + 1) * heads]
        positions = moved(positions, pages.device)
        page = pages[:, positions // size].flatten()
        slot = (positions % size).repeat(heads)
        gathered = ops.gather_tokens(self._heap.kv, page, slot)
        keys, values = (rows.view(heads, positions.numel(), -1) for rows in gathered)
        return keys, values

    @torch.inference_mode()
    def _decompose(
        self,
        layer: int,
        on_host: Sequence[AsyncHostCopy],
        sizes: torch.Tensor,
    ) -> LowRank:
        keys, values, means = (copy.wait() for copy in on_host)
        spans = CoarseSpans(means, sizes.float().log(), sizes)
        return self.policy.decompose(layer, keys, values, spans)

    # -- steps --------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Record which rows of a step have spans."""
        self._followed, self._num_rows = list(step.followed), len(step.rows)
        self._rounds = None
        self._rows = [
            (index, row)
            for index, row in enumerate(step.rows)
            if row.request_id in self._requests
        ]

    @property
    def attends_any(self) -> bool:
        """Whether a row of this step has spans."""
        return bool(self._rows)

    def attends_all(self, layer: int) -> bool:
        """Whether all rows have spans."""
        return len(self._rows) == self._num_rows > 0

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        kv: PagedKV,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attention of the rows that have spans, over pages and entries in one softmax.

        When a row has several new tokens (drafts, or after a preemption), each selects
        its own spans, one after the other.

        Args:
            queries, kv, pages, lengths, output: see :class:`StepExtension`.
        """
        flat, entries = output.view(-1, *queries.shape[1:]), self._arena.layers[layer]
        if self._rounds is None:
            self._rounds = self._list_rounds()
        for query_round in self._rounds:
            selected = queries[query_round.tokens.queries]
            self._zoom(layer, query_round, selected)
            attended, lse = attend_mixed(
                selected,
                kv,
                *query_round.tokens.tables(pages, lengths),
                self._scales[layer],
                CoarseEntries(
                    entries.keys,
                    entries.values,
                    entries.attended_bias,
                    query_round.starts,
                    query_round.counts,
                ),
            )
            rules = self._rules[layer] if self._rules else PLAIN
            flat[query_round.tokens.queries] = rules.with_sinks(attended, lse)

    def _list_rounds(self) -> list[QueryRound]:
        heads, device = self._heap.num_kv_heads, self._heap.pages.device
        rounds = []
        for tokens, rows in rounds_of(self._rows, heads, device):
            names = [row.request_id for row in rows]
            states = [self._requests[name] for name in names]
            rounds.append(QueryRound.of(tokens, names, states, device))
        return rounds

    def _zoom(self, layer: int, query_round: QueryRound, queries: torch.Tensor) -> None:
        """Select the spans of each query [rows, num_q_heads, head_dim]."""
        heads, scale = self._heap.num_kv_heads, self._scales[layer]
        grouped = queries.view(len(queries), heads, -1, queries.shape[2])
        gates, factors = [], []
        for name, state, query in zip(
            query_round.names, query_round.states, grouped, strict=True
        ):
            spans = state.layers[layer]
            ready = self._factors(layer, name, spans) if state.room else _NO_FACTORS
            if ready is _NO_FACTORS:
                shape = heads, state.segments.num_spans
                gates.append(state.log_sizes.new_full(shape, -torch.inf))
            else:
                coarse = state.coarse(layer, self._arena.layers[layer], heads)
                gates.append(self.policy.gates(layer, query, coarse, scale))
            factors.append(ready)
        if all(ready is _NO_FACTORS for ready in factors):
            return
        all_gates = torch.cat([gate.flatten() for gate in gates])
        host_gates = AsyncHostCopy(all_gates).wait()
        entries = self._arena.layers[layer]
        if query_round.places is None:
            reconstructed, zoomed = zoom_spans(
                entries, query_round.regions, host_gates, factors
            )
        else:
            reconstructed, zoomed = fetch_spans(
                entries, query_round.regions, *query_round.places, host_gates, factors
            )
        self._traffic.fetched += reconstructed
        self._traffic.selected += zoomed

    def _factors(self, layer: int, request_id: str, spans: LayerSpans) -> LowRank:
        """Wait for the factors of a layer; empty ones if they could not be computed."""
        if spans.factors is None:
            return _NO_FACTORS
        try:
            return spans.factors.result()
        except (RuntimeError, ValueError, MemoryError):
            # The request continues with the means of its spans.
            logger.warning(
                "KV policy: request %s, layer %d: zoom is off, its spans could not "
                "be decomposed",
                request_id,
                layer,
                exc_info=True,
            )
            self._traffic.failed += 1
            spans.factors = None
            return _NO_FACTORS

    def take_traffic(self) -> Traffic:
        """Counts since the last call: tokens of zoomed spans, reconstructed tokens,
        and layers whose factors failed."""
        taken, self._traffic = self._traffic, Traffic()
        return taken

    # -- ended requests -----------------------------------------------------------

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests without waiting for decompositions that are running."""
        for request_id in request_ids:
            self._surprisals.forget([request_id])
            self._followed = [r for r in self._followed if r.request_id != request_id]
            state = self._requests.pop(request_id, None)
            if state is None:
                continue
            for layer in state.layers:
                if layer.factors is not None:
                    layer.factors.cancel()
            self._arena.release(*self._run(state))
            # The request can be a row of a step that has begun.
            self._rows = [
                (i, row) for i, row in self._rows if row.request_id != request_id
            ]

    def device_bytes(self, request_id: str) -> int:
        """Bytes of a request's entries and of what routing needs, in all layers."""
        state = self._requests.get(request_id)
        if state is None:
            return 0
        memory = self.policy.device_memory(self._geometry)
        spans, room = state.segments.num_spans, state.room
        return memory.outside_pages(self._heap.rows, spans, room)

    @property
    def allocated_device_bytes(self) -> int:
        """Bytes of all entries, of what routing needs, and of waiting hidden states."""
        routing = sum(
            tensor.nbytes
            for state in self._requests.values()
            for tensor in state.routing_tensors
        )
        waiting = self._surprisals.waiting_bytes
        return int(self._arena.allocated_device_bytes + routing + waiting)

    def _run(self, state: RequestSpans) -> tuple[int, int]:
        """First entry and number of entries of a request."""
        return state.first, self._heap.num_kv_heads * state.entries_per_head

    @property
    def num_requests(self) -> int:
        """Requests that have spans."""
        return len(self._requests)

    def check_integrity(self) -> None:
        """Check that zoomed spans, and only they, have their tokens as entries, and
        that each entry belongs to at most one request."""
        states = self._requests.values()
        self._arena.check_integrity([self._run(state) for state in states])
        for state in states:
            for entries in self._arena.layers:
                state.check_integrity(entries, self._heap.num_kv_heads)
