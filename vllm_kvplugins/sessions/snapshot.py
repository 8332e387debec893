"""Snapshots: a request's resident cache, copied to host memory.

::

    retained region: counts differ by row     tail: whole blocks, the last one partial
    [ p p p ][ p ][ p p ] ...                 [ b b b ] of every row

A worker has one heap of pages, or two: with a drafter, its layers have a heap of their
own in the same blocks. A snapshot has one part per heap.

The snapshot of a compacted request has no shared prefix: the request that continues it
finds these blocks in vLLM's prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_kvplugins.engine.requests import Resident
from vllm_kvplugins.engine.retained_regions import RetainedRegions
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.deltas import FileRecord, Lineage
from vllm_kvplugins.sessions.page_tokens import PartSlots
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.stored_pages import StoredPages

# Copy errors that count as a session miss; torch raises RuntimeError when it is out of
# memory. Any other exception is a bug.
COPY_ERRORS = (MemoryError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class HeapPart:
    """Pages of one request in one heap, in host memory.

    Attributes:
        counts: int64 [rows], pages of the retained region per (layer, KV head).
        positions: int32 [rows, max pages * block_size], of the retained region.
        retained: [sum of counts, page_elems], stored pages of the retained region, row
            by row.
        tail: [rows * tail blocks, page_elems], stored pages after it, row by row.
        layout: the order of elements in a stored page.
        retained_ids: int64 [sum of counts], page IDs from which ``retained`` was
            copied, or to which it was copied ahead; None: neither.
    """

    counts: torch.Tensor
    positions: torch.Tensor
    retained: torch.Tensor
    tail: torch.Tensor
    layout: str
    retained_ids: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the pages, as stored."""
        return int(self.retained.nbytes + self.tail.nbytes)

    @property
    def slots(self) -> PartSlots:
        """What is in its slots, without keys and values."""
        rows = max(len(self.counts), 1)
        return PartSlots(self.counts, self.positions, self.tail.shape[0] // rows)

    def on(self, device: torch.device) -> HeapPart:
        """A copy whose small tensors are on ``device``."""
        ids = self.retained_ids
        return replace(
            self,
            counts=self.counts.to(device),
            positions=self.positions.to(device),
            retained_ids=None if ids is None else ids.to(device),
        )


@dataclass(slots=True)
class CacheSnapshot:
    """The cache of one request on one worker, in host memory.

    Attributes:
        tokens: number of tokens, with dropped ones.
        compaction: the last compaction, with candidates from the shared prefix on;
            None: none.
        parts: its pages in each heap, in the order of ``PolicyRuntime.regions``.
        dtype: how pages and queries are stored.
        queries: [num_layers, n, num_q_heads, head_dim or row bytes], of the newest
            tokens, as stored; None: the policy needs no queries.
        queries_dtype: dtype in which the model computed the queries.
        observed: per layer, the packed result of the policy's last observation.
        extension_states: states of step extensions, which move with the snapshot, for
            example tokens in the host tier.
        blocks: physical IDs of the blocks from which it was copied, or to which it was
            copied ahead, from the first resident block; None: neither.
        lineage: the session that its request continued; None: none, or its file has
            been written.
        file: its file; copies of the snapshot share it.
    """

    tokens: int
    compaction: Compaction | None
    parts: tuple[HeapPart, ...]
    dtype: SessionDtype = "auto"
    queries: torch.Tensor | None = None
    queries_dtype: torch.dtype = torch.float32
    observed: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    extension_states: tuple[Any, ...] = ()
    blocks: tuple[int, ...] | None = None
    lineage: Lineage | None = None
    file: FileRecord = field(default_factory=FileRecord)

    @property
    def num_bytes(self) -> int:
        """Memory of pages and queries, as stored."""
        queries = int(self.queries.nbytes) if self.queries is not None else 0
        return sum(part.num_bytes for part in self.parts) + queries

    def on(self, device: torch.device) -> CacheSnapshot:
        """A copy whose small tensors are on ``device``; pages stay in host memory.

        Cost: on CUDA the host waits for the copies.
        """
        if all(part.counts.device == device for part in self.parts):
            return self
        observed = {
            layer: {name: tensor.to(device) for name, tensor in packed.items()}
            for layer, packed in self.observed.items()
        }
        return replace(
            self,
            parts=tuple(part.on(device) for part in self.parts),
            queries=None if self.queries is None else self.queries.to(device),
            observed=observed,
        )

    @property
    def first_query(self) -> int:
        """Position of the first of ``queries``; ``tokens`` if there are none."""
        return self.tokens - (self.queries.shape[1] if self.queries is not None else 0)


@dataclass(frozen=True, slots=True)
class PagesToCopy:
    """Pages of a request that ends, while its blocks are not reused.

    Attributes:
        stored: the format of the copies.
        counts, positions: see ``HeapPart``; on the pool's device.
        retained: int64 [rows, at least counts], page IDs of the retained region.
        num_retained: the sum of counts.
        tail_ids: int64 [rows, tail blocks], page IDs behind the retained region.
        used: slots in use of the last page of each row.
    """

    stored: StoredPages
    counts: torch.Tensor
    positions: torch.Tensor
    retained: torch.Tensor
    num_retained: int
    tail_ids: torch.Tensor
    used: int

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        pages = self.num_retained + self.tail_ids.numel()
        return int(pages * self.stored.page_elems * self.stored.elem_dtype.itemsize)

    def copy_out(self) -> HeapPart:
        """Copy them to host memory; other tensors stay on the pool's device.

        Cost: reads each page once, in bulk. On a GPU it takes ``PIECE_BYTES`` of device
            memory, and the calling thread waits for each piece. Quantizing takes about
            200 ns per 64 elements.
        """
        place = torch.arange(self.retained.shape[1], device=self.retained.device)
        retained_ids = self.retained[place < self.counts[:, None]]
        assert retained_ids.numel() == self.num_retained, "pages must balance"
        tail = self.stored.copy_out(self.tail_ids.reshape(-1))
        if self.tail_ids.numel():
            last = tail.view(*self.tail_ids.shape, -1)[:, -1]
            self.stored.clear(last, self.used)
        return HeapPart(
            counts=self.counts,
            positions=self.positions,
            retained=self.stored.copy_out(retained_ids),
            tail=tail,
            layout=self.stored.layout,
            retained_ids=retained_ids,
        )


def pages_to_copy(
    regions: RetainedRegions,
    stored: StoredPages,
    resident: Resident | None,
    compaction: Compaction | None,
    tokens: int,
    blocks: torch.Tensor,
) -> PagesToCopy:
    """The pages of a request in a heap. The host waits for nothing.

    Args:
        stored: the format of the copies.
        resident: its retained region; None: it was never compacted.
        blocks: int64, physical IDs, from its first resident block.
    """
    heap, size = regions.heap, regions.heap.layout.block_size
    first = compaction.retained.start if compaction else 0
    in_retained = len(compaction.retained) if compaction else 0
    tail_ids = heap.page_ids(blocks[in_retained : -(-tokens // size) - first])
    counts = tail_ids.new_zeros(heap.rows)
    retained = tail_ids.new_zeros(heap.rows, 0)
    positions = torch.zeros(heap.rows, 0, dtype=torch.int32, device=blocks.device)
    if resident is not None:
        assert compaction is not None, "a retained region without a compaction"
        shared = compaction.shared_blocks
        pages, held = regions.tables.retained(resident.slot_index)
        # Copies: the tables are another request's before the pages are copied.
        retained, counts = pages[:, shared:].clone(), held - shared
        positions = resident.positions[:, shared * size :].clone()
    num_retained = heap.rows * in_retained if resident is not None else 0
    return PagesToCopy(
        stored,
        counts,
        positions,
        retained,
        num_retained,
        tail_ids,
        tokens % size or size,
    )


def mismatch(num_rows: int, stored: StoredPages, saved: HeapPart) -> str | None:
    """Why a part of a snapshot does not fit its heap; None: it fits.

    Args:
        num_rows: (layer, KV head) pairs of the heap.
        stored: the format of pages that this worker reads.
    """
    elems, elem_dtype = stored.page_elems, stored.elem_dtype
    if saved.counts.shape != (num_rows,):
        return f"it has {saved.counts.numel()} rows of pages, the layers {num_rows}"
    for pages in (saved.retained, saved.tail):
        if pages.dtype != elem_dtype or pages.shape[1:] != (elems,):
            return f"its pages are {pages.dtype} {list(pages.shape)}, not {elem_dtype}"
    if saved.layout != stored.layout:
        return "its pages have the layout of another instruction set"
    return None


def fill_pages(
    regions: RetainedRegions,
    stored: StoredPages,
    saved: HeapPart,
    compaction: Compaction | None,
    tokens: int,
    blocks: torch.Tensor,
    prefix: torch.Tensor,
) -> torch.Tensor:
    """Copy the pages of the first ``tokens`` tokens of a snapshot into a heap.

    Args:
        stored: the format of the snapshot's pages.
        compaction: of the snapshot.
        blocks: int64, physical IDs, from the first resident block; behind ``prefix``.
        prefix: int64, physical IDs of first blocks that hold their tokens already.
            Without a compaction, the snapshot has these tokens too.

    Returns:
        int64 [sum of counts], page IDs of the retained region, row by row.

    Cost: writes each page once, in bulk. On a GPU it takes ``PIECE_BYTES`` of device
        memory and as much pinned memory.
    """
    heap, size, rows = regions.heap, regions.heap.layout.block_size, regions.heap.rows
    in_retained = len(compaction.retained) if compaction else 0
    # Blocks of the tail: first and last that are copied, all that the snapshot has.
    start = 0 if compaction else prefix.numel()
    stop = -(-tokens // size)
    stop -= compaction.retained.stop if compaction else 0
    saved_blocks = saved.tail.shape[0] // rows
    assert 0 <= stop <= saved_blocks, "the snapshot has fewer tokens"
    tail_ids = heap.page_ids(blocks[in_retained : in_retained + stop - start])
    which = None
    if (start, stop) != (0, saved_blocks):
        every = torch.arange(saved.tail.shape[0], device="cpu")
        which = every.view(rows, -1)[:, start:stop].reshape(-1)
    stored.copy_in(tail_ids.reshape(-1), saved.tail, which)
    pool = heap.page_ids(blocks[:in_retained]).reshape(-1)
    assert pool.numel() == int(saved.counts.sum()), "pages must balance"
    stored.copy_in(pool, saved.retained)
    return pool


def register(
    regions: RetainedRegions,
    saved: HeapPart,
    compaction: Compaction | None,
    retained: torch.Tensor,
    prefix_blocks: torch.Tensor,
) -> Resident | None:
    """Register a retained region whose pages are in the pool.

    Args:
        compaction: of the snapshot.
        retained: int64 [sum of counts], page IDs, row by row.
        prefix_blocks: int64, physical IDs of the shared prefix before it.

    Returns:
        The request's retained region, with a slot index; None if it has none.

    Cost: reads and writes no page.
    """
    if compaction is None:
        return None
    prefix = regions.heap.page_ids(prefix_blocks)
    shared = prefix.shape[1]
    assert shared == compaction.shared_blocks, "the prefix is not in the prefix cache"
    place = torch.arange(int(saved.counts.max()), device=retained.device)
    pages = retained.new_zeros(saved.counts.numel(), place.numel())
    pages[place < saved.counts[:, None]] = retained
    tail_block, positions = compaction.retained.stop, saved.positions.clone()
    counts = saved.counts + shared
    if shared:
        tokens = shared * (positions.shape[1] // pages.shape[1])
        exact = torch.arange(tokens, dtype=torch.int32, device=positions.device)
        positions = torch.cat([exact.expand(len(positions), -1), positions], 1)
        pages = torch.cat([prefix, pages], 1)
    # The last step that can fail, so that no error leaves a slot index assigned.
    slot_index = regions.tables.assign(pages, counts, tail_block)
    return Resident(slot_index, compaction.at_tokens, tail_block, positions)
