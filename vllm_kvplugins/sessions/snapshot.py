"""Snapshots: a request's resident cache, copied to host memory.

::

    retained region: counts differ by row     tail: whole blocks, the last one partial
    [ p p p ][ p ][ p p ] ...                 [ b b b ] of every row

The snapshot of a compacted request has no shared prefix: the request that continues it
finds these blocks in vLLM's prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.engine.requests import Resident
from vllm_kvplugins.ops.bulk import copy_pages
from vllm_kvplugins.plan.residency_plan import Compaction

# Pages are copied in pieces of this size. A GPU whose memory belongs to the pool has no
# room for a second copy of a long request.
PIECE_BYTES = 128 << 20

# Copy errors that count as a session miss; torch raises RuntimeError when it is out of
# memory. Any other exception is a bug.
COPY_ERRORS = (MemoryError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Place:
    """Place in the pool from which a cache was saved.

    Attributes:
        blocks: physical IDs, from the first resident block.
        retained: int64 [sum of counts], page IDs of the retained region, row by row.
    """

    blocks: tuple[int, ...]
    retained: torch.Tensor


@dataclass(slots=True)
class CacheSnapshot:
    """Pages of one request on one worker, in host memory.

    Attributes:
        tokens: number of tokens, with dropped ones.
        compaction: the last compaction, with candidates from the shared prefix on;
            None: none.
        counts: int64 [rows], pages of the retained region per (layer, KV head).
        positions: int32 [rows, max pages * block_size], of the retained region.
        retained: [sum of counts, page_elems], pages of the retained region, row by row.
        tail: [rows * tail blocks, page_elems], pages after it, row by row.
        layout: digest of the layout inside a page.
        queries: [num_layers, n, num_q_heads, head_dim], of the newest tokens; None: the
            policy needs no queries.
        observed: per layer, the packed result of the policy's last observation.
        extension_states: states of step extensions, which move with the snapshot, for
            example tokens in the host tier.
        place: None: the snapshot was read from a file.
    """

    tokens: int
    compaction: Compaction | None
    counts: torch.Tensor
    positions: torch.Tensor
    retained: torch.Tensor
    tail: torch.Tensor
    layout: str
    queries: torch.Tensor | None = None
    observed: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    extension_states: tuple[Any, ...] = ()
    place: Place | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of pages and queries."""
        queries = self.queries.nbytes if self.queries is not None else 0
        return int(self.retained.nbytes + self.tail.nbytes + queries)

    def on(self, device: torch.device) -> CacheSnapshot:
        """A copy whose small tensors are on ``device``; pages stay in host memory.

        Cost: on CUDA the host waits for the copies.
        """
        if self.counts.device == device:
            return self
        observed = {
            layer: {name: tensor.to(device) for name, tensor in packed.items()}
            for layer, packed in self.observed.items()
        }
        place = self.place and replace(
            self.place, retained=self.place.retained.to(device)
        )
        return replace(
            self,
            place=place,
            counts=self.counts.to(device),
            positions=self.positions.to(device),
            queries=None if self.queries is None else self.queries.to(device),
            observed=observed,
        )

    @property
    def first_query(self) -> int:
        """Position of the first of ``queries``; ``tokens`` if there are none."""
        return self.tokens - (self.queries.shape[1] if self.queries is not None else 0)


def copy_out(
    heap: Heap,
    tables: PageTables,
    resident: Resident | None,
    compaction: Compaction | None,
    tokens: int,
    blocks: torch.Tensor,
) -> CacheSnapshot:
    """Copy a request's pages out of the pool.

    Args:
        resident: its retained region; None: it was never compacted.
        blocks: int64, physical IDs, from its first resident block.

    Returns:
        A snapshot with pages in host memory and the other tensors on the pool's device.

    Cost: reads each page once, in bulk. On a GPU it takes ``PIECE_BYTES`` of device
        memory, and the host waits for each piece.
    """
    size = heap.layout.block_size
    first = compaction.retained.start if compaction else 0
    in_retained = len(compaction.retained) if compaction else 0
    tail_ids = heap.page_ids(blocks[in_retained : -(-tokens // size) - first])
    retained_ids = counts = tail_ids.new_zeros(0)
    positions = torch.zeros(heap.rows, 0, dtype=torch.int32, device=blocks.device)
    if resident is None:
        counts = counts.new_zeros(heap.rows)
    else:
        assert compaction is not None, "a retained region without a compaction"
        shared = compaction.shared_blocks
        pages, counts = tables.retained(resident.slot_index)
        pages, counts = pages[:, shared:], counts - shared
        place = torch.arange(pages.shape[1], device=pages.device)
        retained_ids = pages[place < counts[:, None]]
        positions = resident.positions[:, shared * size :].clone()
    tail = _copy_to_host(heap, tail_ids.reshape(-1))
    if tokens % size:
        _clear(heap, tail.view(heap.rows, -1, tail.shape[1])[:, -1], tokens % size)
    return CacheSnapshot(
        tokens=tokens,
        compaction=compaction,
        counts=counts,
        positions=positions,
        retained=_copy_to_host(heap, retained_ids),
        tail=tail,
        layout=heap.layout.digest,
        place=Place(tuple(blocks.tolist()), retained_ids),
    )


def mismatch(heap: Heap, saved: CacheSnapshot) -> str | None:
    """Why a snapshot does not fit this heap; None: it fits."""
    elems, dtype = heap.pages.shape[1], heap.pages.dtype
    if saved.counts.shape != (heap.rows,):
        return f"it has {saved.counts.numel()} rows of pages, the model {heap.rows}"
    for pages in (saved.retained, saved.tail):
        if pages.dtype != dtype or pages.shape[1:] != (elems,):
            return f"its pages are {pages.dtype} {list(pages.shape)}, not {dtype}"
    if saved.layout != heap.layout.digest:
        return "its pages have the layout of another instruction set"
    return None


def copy_in(
    heap: Heap,
    tables: PageTables,
    saved: CacheSnapshot,
    tokens: int,
    blocks: torch.Tensor,
    prefix: torch.Tensor,
) -> Resident | None:
    """Fill blocks of the pool with the first ``tokens`` tokens of a snapshot.

    Args:
        blocks: int64, physical IDs, from the first resident block; behind ``prefix``.
        prefix: int64, physical IDs of first blocks that hold their tokens already.
            Without a compaction, the snapshot has these tokens too.

    Returns:
        The request's retained region, with a slot index; None if it has none.

    Cost: writes each page once, in bulk. On a GPU it takes ``PIECE_BYTES`` of device
        memory, and the host waits for each piece.
    """
    size, rows = heap.layout.block_size, heap.rows
    in_retained = len(saved.compaction.retained) if saved.compaction else 0
    # Blocks of the tail: first and last that are copied, all that the snapshot has.
    start = 0 if saved.compaction else prefix.numel()
    stop = -(-tokens // size)
    stop -= saved.compaction.retained.stop if saved.compaction else 0
    saved_blocks = saved.tail.shape[0] // rows
    assert 0 <= stop <= saved_blocks, "the snapshot has fewer tokens"
    tail_ids = heap.page_ids(blocks[in_retained : in_retained + stop - start])
    which = None
    if (start, stop) != (0, saved_blocks):
        every = torch.arange(saved.tail.shape[0], device="cpu")
        which = every.view(rows, -1)[:, start:stop].reshape(-1)
    _copy_to_pool(heap, tail_ids.reshape(-1), saved.tail, which)
    if saved.compaction is None:
        return None
    pool = heap.page_ids(blocks[:in_retained]).reshape(-1)
    assert pool.numel() == int(saved.counts.sum()), "pages must balance"
    _copy_to_pool(heap, pool, saved.retained)
    return _register(tables, saved, saved.compaction, pool, heap.page_ids(prefix))


def reuse_in_place(
    heap: Heap,
    tables: PageTables,
    saved: CacheSnapshot,
    blocks: Sequence[int],
    prefix: torch.Tensor,
) -> Resident | None:
    """Continue in the blocks from which a snapshot was copied.

    Args:
        blocks: physical IDs, from the first resident block; no request has written to
            them since.
        prefix: as in :func:`copy_in`.

    Returns:
        The request's retained region, with a slot index; None if it has none.

    Cost: reads and writes no page.
    """
    place = saved.place
    assert place is not None, "it was read from a file"
    assert tuple(blocks) == place.blocks[: len(blocks)], (
        "it was saved from other blocks"
    )
    if saved.compaction is None:
        return None
    prefix_pages = heap.page_ids(prefix)
    return _register(tables, saved, saved.compaction, place.retained, prefix_pages)


def _register(
    tables: PageTables,
    saved: CacheSnapshot,
    compaction: Compaction,
    retained: torch.Tensor,
    prefix: torch.Tensor,
) -> Resident:
    """Register a retained region and the shared prefix before it.

    Args:
        retained: int64 [sum of counts], page IDs, row by row.
        prefix: int64 [rows, blocks], page IDs of the shared prefix.
    """
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
    slot_index = tables.assign(pages, counts, tail_block)
    return Resident(slot_index, compaction.at_tokens, tail_block, positions)


def _clear(heap: Heap, pages: torch.Tensor, used: int) -> None:
    """Zero the unused slots of partial pages in host memory.

    They may contain tokens of other requests.
    """
    layout = heap.layout
    for offsets in (layout.k_offsets, layout.v_offsets):
        unused = offsets.view(layout.block_size, -1)[used:].flatten().long()
        pages[:, unused.cpu()] = 0


def _pieces(heap: Heap, pages: int) -> Iterator[slice]:
    """Slices of up to ``PIECE_BYTES`` that cover ``pages`` pages."""
    at_once = max(PIECE_BYTES // heap.pages[:1].nbytes, 1)
    for first in range(0, pages, at_once):
        yield slice(first, min(first + at_once, pages))


def _copy_to_host(heap: Heap, ids: torch.Tensor) -> torch.Tensor:
    """Copy pages of the pool to host memory: [n, page_elems]."""
    pool = heap.pages
    on_host = pool.device.type == "cpu"
    out = torch.empty(len(ids), pool.shape[1], dtype=pool.dtype, device="cpu")
    for piece in _pieces(heap, len(ids)):
        part = out[piece] if on_host else pool.new_empty(out[piece].shape)
        copy_pages(part, None, pool, ids[piece])
        if not on_host:
            out[piece] = part
    return out


def _copy_to_pool(
    heap: Heap,
    ids: torch.Tensor,
    pages: torch.Tensor,
    which: torch.Tensor | None = None,
) -> None:
    """Copy pages from host memory into the pool.

    Args:
        ids: int64 [n], target page IDs, on the pool's device.
        pages: [at least n, page_elems], in host memory.
        which: int64 [n], rows of ``pages``, in host memory; None: the first n.
    """
    for piece in _pieces(heap, len(ids)):
        part = pages[piece] if which is None else pages[which[piece]]
        copy_pages(heap.pages, ids[piece], part.to(heap.pages.device), None)
