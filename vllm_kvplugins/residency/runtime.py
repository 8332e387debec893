"""The worker's side: follows requests through steps and compacts them.

No vLLM here: the adapter tells it which rows a step has, hands it the queries
that the policy asked for, and calls it when the step's forward pass is over.

A request's life::

    begin_step ── row reaches a compaction? ──> remember which queries to keep
    keep_queries (once per layer, in the attention call)
    end_step ──> keys from pages -> policy scores -> allocator -> moves -> seat
    begin_step ... page tables now come from the seat
    forget (finished, aborted, preempted) ──> seat returned
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.policies.base import (
    Geometry,
    KVCachePolicy,
    LayerView,
    Lengths,
)
from vllm_kvplugins.residency.compaction import CompactedPages, compact
from vllm_kvplugins.residency.page_table import FlatTable, PageTables
from vllm_kvplugins.residency.plan import Compaction, ResidencyPlan
from vllm_kvplugins.selection import keep_top


@dataclass(frozen=True, slots=True)
class Heap:
    """The whole KV cache as one array of pages.

    Attributes:
        pages: [num_layers * num_blocks * num_kv_heads, page_elems], page id
            ``(layer * num_blocks + block) * num_kv_heads + kv_head``.
        layout: where K and V of a slot lie inside a page.
    """

    pages: torch.Tensor
    layout: PageLayout
    num_layers: int
    num_blocks: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        expected = self.num_layers * self.num_blocks * self.num_kv_heads
        if self.pages.shape != (expected, self.layout.page_elems):
            raise ValueError(
                f"heap of {tuple(self.pages.shape)} is not {expected} pages of "
                f"{self.layout.page_elems} elements"
            )

    def page_ids(self, blocks: torch.Tensor) -> torch.Tensor:
        """int64 [layers * kv_heads, blocks]: the pages of these blocks."""
        layer = torch.arange(self.num_layers, device=blocks.device)[:, None, None]
        head = torch.arange(self.num_kv_heads, device=blocks.device)[None, :, None]
        ids = (layer * self.num_blocks + blocks.long()) * self.num_kv_heads + head
        return ids.reshape(-1, blocks.numel())


@dataclass(slots=True)
class Row:
    """One request in one step.

    Attributes:
        computed_tokens: before the step.
        new_tokens: computed by the step.
        first_query: index of its first token among the step's tokens.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    new_tokens: int
    first_query: int


@dataclass(slots=True)
class Resident:
    """What the worker knows of a compacted request."""

    seat: int
    compacted_at: int
    # int32 [layers * kv_heads, slots], RoPE positions; -1 = unused slot
    positions: torch.Tensor


@dataclass(slots=True)
class Due:
    """A compaction that the running step completes."""

    row: Row
    compaction: Compaction
    blocks: torch.Tensor  # int64, physical ids of all blocks up to the cut
    first_query: int
    num_queries: int
    # per layer: [num_q_heads, num_queries, head_dim]
    queries: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """A finished compaction, kept when someone asked for it (``explain``)."""

    request_id: str
    prompt_tokens: int
    # per layer, per KV head: ascending kept prompt positions
    kept_positions: list[list[list[int]]]


class PolicyRuntime:
    """Residency of all requests on one worker.

    Args:
        policy: the policy, already validated.
        geometry: of this worker's cache.
    """

    def __init__(self, policy: KVCachePolicy, geometry: Geometry) -> None:
        self.policy = policy
        self.geometry = geometry
        self.heap: Heap | None = None
        self.scales: list[float] = []
        self.records: list[Record] | None = None
        self.compression_seconds: list[float] = []
        self._tables: PageTables | None = None
        self._residents: dict[str, Resident] = {}
        self._due: list[Due] = []
        self._plans: dict[int, ResidencyPlan] = {}

    # -- start-up ---------------------------------------------------------

    def attach(self, heap: Heap, scales: Sequence[float]) -> None:
        """Learn where the cache lies. ``scales``: softmax scale per layer."""
        self.heap = heap
        self.scales = list(scales)
        self._tables = PageTables(
            heap.num_layers,
            heap.num_kv_heads,
            heap.num_blocks,
            heap.layout.block_size,
            self.policy.page_allocator().uniform,
            heap.pages.device,
        )

    def plan(self, prompt_tokens: int) -> ResidencyPlan:
        """The plan of a request with this prompt length."""
        plan = self._plans.get(prompt_tokens)
        if plan is None:
            if len(self._plans) >= 4096:
                self._plans.clear()
            plan = self.policy.plan(Lengths(prompt_tokens), self.geometry)
            self._plans[prompt_tokens] = plan
        return plan

    # -- one step -----------------------------------------------------------

    def begin_step(
        self, rows: Sequence[Row], seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> FlatTable:
        """Page tables for a step, and note which rows it brings to a compaction.

        Args:
            rows: the step's requests, in batch order.
            seq_lens: [rows], logical tokens including the step's.
            block_table: int32 [rows, blocks], vLLM's.
        """
        assert self._tables is not None, "not attached"
        self._due.clear()
        seats = []
        for index, row in enumerate(rows):
            resident = self._residents.get(row.request_id)
            if resident and row.computed_tokens < resident.compacted_at:
                # Preempted since, and computed anew from the start.
                self.forget([row.request_id])
                resident = None
            seats.append(resident.seat if resident else 0)
            after = row.computed_tokens + row.new_tokens
            compaction = self.plan(row.prompt_tokens).due(row.computed_tokens, after)
            if compaction is not None:
                self._due.append(self._make_due(row, compaction, block_table[index]))
        seat_ids = torch.tensor(seats, dtype=torch.int64, device=block_table.device)
        return self._tables.build(seat_ids, seq_lens, block_table)

    def _make_due(self, row: Row, compaction: Compaction, blocks: torch.Tensor) -> Due:
        wanted = self.plan(row.prompt_tokens).queries_needed
        assert row.new_tokens >= wanted, "the scheduler cut inside the window"
        stop = row.first_query + row.new_tokens
        used = -(-compaction.at_tokens // self.geometry.block_size)
        return Due(row, compaction, blocks[:used].long().clone(), stop - wanted, wanted)

    @property
    def wants_queries(self) -> bool:
        """Whether this step's attention calls must hand over queries."""
        return any(due.num_queries for due in self._due)

    def keep_queries(self, layer: int, queries: torch.Tensor) -> None:
        """Keep what the due compactions need of one layer's queries.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """
        for due in self._due:
            part = queries[due.first_query : due.first_query + due.num_queries]
            due.queries[layer] = part.transpose(0, 1).contiguous()

    def end_step(self) -> None:
        """Run the compactions that this step completed; nothing else to do
        costs nothing. Call when all layers have attended."""
        if not self._due:
            return
        due_now, self._due = self._due, []
        for due in due_now:
            began = time.perf_counter()
            self._compact(due)
            self.compression_seconds.append(time.perf_counter() - began)

    def _compact(self, due: Due) -> None:
        assert self.heap is not None
        assert self._tables is not None
        plan, heap = due.compaction, self.heap
        first, stop = plan.candidates.start, plan.candidates.stop
        block_size = heap.layout.block_size
        rows = heap.num_layers * heap.num_kv_heads
        num_slots = len(plan.candidates) * block_size

        scores = self._scores(due, num_slots)
        zone_pages = len(plan.zone)
        counts = self.policy.page_allocator().allocate(scores, zone_pages, block_size)
        counts = counts.to(scores.device).view(rows)
        keep = keep_top(scores.view(rows, num_slots), counts * block_size)
        positions = torch.arange(
            first * block_size, stop * block_size, dtype=torch.int32, device=keep.device
        ).expand(rows, -1)
        pages = heap.page_ids(due.blocks[first:stop])
        after = compact(
            keep,
            counts,
            pages,
            owned=torch.full_like(counts, pages.shape[1]),
            positions=positions,
            pool=pages[:, plan.zone.start - first :].reshape(-1),
        )
        move(heap, after)
        self._settle(due, after)

    def _scores(self, due: Due, num_slots: int) -> torch.Tensor:
        """float32 [layers, kv_heads, num_slots] of the candidate slots."""
        heap = self.heap
        assert heap is not None
        pages = heap.page_ids(due.blocks).view(
            heap.num_layers, heap.num_kv_heads, due.blocks.numel()
        )
        tokens = due.compaction.at_tokens
        device = heap.pages.device
        positions = torch.arange(tokens, device=device).expand(heap.num_kv_heads, -1)
        scores = torch.empty(
            heap.num_layers,
            heap.num_kv_heads,
            num_slots,
            dtype=torch.float32,
            device=device,
        )
        for layer in range(heap.num_layers):
            table = pages[layer]
            view = LayerView(
                layer=layer,
                keys=ops.gather_keys(heap.pages, table, heap.layout)[:, :tokens],
                positions=positions,
                queries=due.queries.pop(layer, _NO_QUERIES),
                scale=self.scales[layer],
                load_values=lambda table=table: ops.gather_values(
                    heap.pages, table, heap.layout
                )[:, :tokens],
            )
            scores[layer] = self.policy.score(view)[:, :num_slots]
        return scores

    def _settle(self, due: Due, after: CompactedPages) -> None:
        """Seat the request on its new pages; from now on it reads only these."""
        assert self._tables is not None
        request_id = due.row.request_id
        self.forget([request_id])
        tail_block = due.compaction.zone.stop
        seat = self._tables.seat(after.pages, after.counts, tail_block)
        self._residents[request_id] = Resident(
            seat, due.compaction.at_tokens, after.positions
        )
        if self.records is not None:
            self.records.append(self._record(due.row, after.positions))

    # -- requests that go ----------------------------------------------------

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of finished, aborted or preempted requests."""
        for request_id in request_ids:
            resident = self._residents.pop(request_id, None)
            if resident is not None:
                assert self._tables is not None
                self._tables.leave(resident.seat)

    @property
    def num_residents(self) -> int:
        return len(self._residents)

    def check_integrity(self) -> None:
        """Every compacted request has exactly one seat, and no seat is lost."""
        assert self._tables is not None, "not attached"
        seats = [resident.seat for resident in self._residents.values()]
        assert len(set(seats)) == len(seats), f"seats shared: {sorted(seats)}"
        assert self._tables.seats_taken == len(seats), "seats leaked"

    # -- observability ---------------------------------------------------------

    def take_compression_seconds(self) -> list[float]:
        """Durations since the last call."""
        taken, self.compression_seconds = self.compression_seconds, []
        return taken

    def _record(self, row: Row, positions: torch.Tensor) -> Record:
        assert self.heap is not None
        shape = (self.heap.num_layers, self.heap.num_kv_heads, -1)
        tail_start = row.prompt_tokens // self.geometry.block_size
        tail = list(range(tail_start * self.geometry.block_size, row.prompt_tokens))
        kept = [
            [sorted(p for p in head if p >= 0) + tail for head in layer]
            for layer in positions.view(shape).tolist()
        ]
        return Record(row.request_id, row.prompt_tokens, kept)


def move(heap: Heap, after: CompactedPages) -> None:
    """Carry out a compaction in the heap."""
    direct, staged = after.direct, after.staged
    if len(direct):
        ops.move_tokens(
            heap.pages,
            direct.source_page,
            direct.source_slot,
            direct.target_page,
            direct.target_slot,
            heap.layout,
        )
    if len(staged):
        keys, values = ops.gather_tokens(
            heap.pages, staged.source_page, staged.source_slot, heap.layout
        )
        ops.scatter_tokens(
            heap.pages,
            staged.target_page,
            staged.target_slot,
            keys,
            values,
            heap.layout,
        )


_NO_QUERIES = torch.empty(0, 0, 0)
