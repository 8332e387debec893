"""What the worker remembers of single requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.windows import StepQueries, Window
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.plan.residency_plan import Compaction


@dataclass(slots=True)
class Row:
    """One request in one step.

    Attributes:
        prompt_tokens: length of its prompt.
        computed_tokens: before the step.
        new_tokens: computed by the step.
        first_query: index of its first token among the step's tokens.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    new_tokens: int
    first_query: int

    @property
    def after_tokens(self) -> int:
        return self.computed_tokens + self.new_tokens


@dataclass(slots=True)
class Resident:
    """A request that has been compacted.

    Attributes:
        seat: its place in the page tables.
        compacted_at: token count of its last compaction.
        tail_block: first logical block after the retained region.
        positions: int32 [rows, slots], RoPE position per zone slot, -1 unused.
    """

    slot_index: int
    compacted_at: int
    tail_block: int
    positions: torch.Tensor


@dataclass(slots=True)
class RequestState:
    """Everything about one request; gone when it is forgotten.

    Attributes:
        resident: set once it has been compacted.
        window: its newest queries, if they are kept.
        observed: per layer, what the policy's ``observe`` last returned.
        restored: the compaction behind the cache that it started from.
        lost: what it started from could not be loaded. It computes nonsense, which
            nobody looks at, until it is forgotten and begins anew.
    """

    resident: Resident | None = None
    window: Window | None = None
    observed: dict[int, Any] = field(default_factory=dict)
    restored: Compaction | None = None
    lost: bool = False

    def keep_queries(self, row: Row, since: int, step: StepQueries) -> None:
        """Keep a step's queries, from the token at position ``since`` on."""
        start = max(row.computed_tokens, since)
        if start >= row.after_tokens:
            return
        if self.window is None or self.window.stop != start:
            self.window = Window(start, start)
        first = row.first_query + start - row.computed_tokens
        self.window.add(step, first, row.after_tokens - start)
        self.window.drop_before(since)

    @property
    def compacted_at(self) -> int:
        """Token count of its last compaction; 0 if there was none."""
        return self.resident.compacted_at if self.resident else 0


@dataclass(frozen=True, slots=True)
class PageList:
    """The pages that a request owns at some token count, all layers and heads.

    Attributes:
        pages: int64 [rows, most], retained region first, then plain blocks in
            order; row r uses the first ``owned[r]``.
        owned: int64 [rows].
        positions: int32 [rows, most * block_size]; -1 in unused slots.
    """

    pages: torch.Tensor
    owned: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def of_blocks(heap: Heap, blocks: torch.Tensor, first_block: int) -> PageList:
        """Blocks that nobody compacted, logical index ``first_block`` onwards."""
        size = heap.layout.block_size
        pages = heap.page_ids(blocks)
        start = first_block * size
        positions = torch.arange(
            start, start + blocks.numel() * size, dtype=torch.int32, device=pages.device
        )
        owned = torch.full(
            (heap.rows,), blocks.numel(), dtype=torch.int64, device=pages.device
        )
        return PageList(pages, owned, positions.expand(heap.rows, -1))

    def after(
        self, pages: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor
    ) -> PageList:
        """These pages behind a retained region of ``counts`` pages per row."""
        size = self.positions.shape[1] // self.pages.shape[1]
        return PageList(
            _behind(pages, counts, self.pages),
            counts + self.owned,
            _behind(positions, counts * size, self.positions, unused=-1),
        )


def _behind(
    first: torch.Tensor, counts: torch.Tensor, second: torch.Tensor, unused: int = 0
) -> torch.Tensor:
    """Rows of ``second`` directly behind the ``counts`` used entries of ``first``."""
    most = int(counts.max())
    place = torch.arange(most + second.shape[1], device=first.device)
    offset = place - counts[:, None]
    out = second.gather(1, offset.clamp(0, second.shape[1] - 1))
    out.masked_fill_(offset >= second.shape[1], unused)
    out[:, :most] = torch.where(offset[:, :most] < 0, first[:, :most], out[:, :most])
    return out


@dataclass(slots=True)
class DueCompaction:
    """A compaction that the running step completes."""

    row: Row
    compaction: Compaction
    # position of the first query that scores it; the step's last one ends them
    first_query: int
    # int64, physical ids of the request's blocks; entries below its tail are stale
    blocks: torch.Tensor


@dataclass(slots=True)
class Record:
    """A compaction as ``explain`` shows it."""

    request_id: str
    prompt_tokens: int
    # per layer, per KV head: ascending kept positions
    kept_positions: list[list[list[int]]]

    @staticmethod
    def of(due: DueCompaction, positions: torch.Tensor, geometry: Geometry) -> Record:
        """A compaction's record: the retained region's positions and the tail."""
        tail_start = due.compaction.retained.stop * geometry.block_size
        tail = list(range(tail_start, due.row.after_tokens))
        shape = (geometry.num_layers, geometry.num_kv_heads, -1)
        kept = [
            [sorted(p for p in head if p >= 0) + tail for head in layer]
            for layer in positions.view(shape).tolist()
        ]
        return Record(due.row.request_id, due.row.prompt_tokens, kept)
