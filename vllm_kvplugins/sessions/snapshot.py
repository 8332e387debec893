"""A request's resident cache outside the pool, to go on from later.

::

    retained region: counts differ by row      tail: plain blocks, the last one partial
    [ p p p ][ p ][ p p ] ...               [ b b b ] of every row
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.engine.requests import Resident
from vllm_kvplugins.engine.retrieval.offloaded import Offloaded
from vllm_kvplugins.ops.bulk import copy_pages
from vllm_kvplugins.plan.residency_plan import Compaction

# Pages go to the host and come back in pieces of so many bytes: a GPU whose pool has
# taken its memory has no room for a second copy of a long request.
PIECE_BYTES = 128 << 20

# What may go wrong with a copy without costing more than that; torch raises
# RuntimeError where there is no memory. All else is a fault of ours.
COPY_ERRORS = (MemoryError, RuntimeError, ValueError)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the pool a cache was saved from.

    Attributes:
        blocks: physical ids, from its first resident block on.
        zone: int64 [sum of counts], page ids of its retained region, row by row.
    """

    blocks: tuple[int, ...]
    retained: torch.Tensor


@dataclass(slots=True)
class CacheSnapshot:
    """Pages of one request on one worker, in host memory.

    Attributes:
        tokens: whose keys and values are there, or were compacted away.
        compaction: the last one, candidates counted from block 0; None = none.
        counts: int64 [rows], retained region pages per (layer, KV head).
        positions: int32 [rows, most pages * block_size], of the retained region.
        zone: [sum of counts, page_elems], row by row.
        tail: [rows * tail blocks, page_elems], row by row.
        layout: digest of the layout of its pages.
        queries: [num_layers, n, num_q_heads, head_dim], of its newest tokens; None =
            the policy needs none.
        observed: per layer, what the policy's ``observe`` last returned, packed.
        offloaded: what it has on the host, which moves with it; None = nothing.
        place: None = it was read from a file.
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
    offloaded: Offloaded | None = None
    place: Place | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of its pages and queries."""
        queries = self.queries.nbytes if self.queries is not None else 0
        return int(self.retained.nbytes + self.tail.nbytes + queries)

    def on(self, device: torch.device) -> CacheSnapshot:
        """The same with all but its pages there; itself if it is there.

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


def take_out(
    heap: Heap,
    tables: PageTables,
    resident: Resident | None,
    compaction: Compaction | None,
    tokens: int,
    blocks: torch.Tensor,
) -> CacheSnapshot:
    """Copy a request's pages out of the pool.

    Args:
        resident: its retained region, if it was compacted.
        blocks: int64, physical ids, from its first resident block on.

    Returns:
        Its pages, and on the pool's device all else.

    Cost: each page read once, in bulk; on a GPU ``PIECE_BYTES`` there, and the host
        waits for each piece.
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
        pages, counts = tables.retained(resident.slot_index)
        place = torch.arange(pages.shape[1], device=pages.device)
        retained_ids = pages[place < counts[:, None]]
        positions = resident.positions.clone()
    tail = _gathered(heap, tail_ids.reshape(-1))
    if tokens % size:
        _clear(heap, tail.view(heap.rows, -1, tail.shape[1])[:, -1], tokens % size)
    return CacheSnapshot(
        tokens=tokens,
        compaction=compaction,
        counts=counts,
        positions=positions,
        retained=_gathered(heap, retained_ids),
        tail=tail,
        layout=heap.layout.digest,
        place=Place(tuple(blocks.tolist()), retained_ids),
    )


def mismatch(heap: Heap, saved: CacheSnapshot) -> str | None:
    """Why a saved cache cannot go into this heap, if so."""
    elems, dtype = heap.pages.shape[1], heap.pages.dtype
    if saved.counts.shape != (heap.rows,):
        return f"it has {saved.counts.numel()} rows of pages, not {heap.rows}"
    for pages in (saved.retained, saved.tail):
        if pages.dtype != dtype or pages.shape[1:] != (elems,):
            return f"pages of {pages.dtype} {list(pages.shape)} do not fit {dtype}"
    if saved.layout != heap.layout.digest:
        return "its pages are laid out for another instruction set"
    return None


def put_back(
    heap: Heap,
    tables: PageTables,
    saved: CacheSnapshot,
    tokens: int,
    blocks: torch.Tensor,
) -> Resident | None:
    """Fill blocks of the pool with the first ``tokens`` tokens of a saved cache.

    Args:
        blocks: int64, physical ids, from the first resident block on.

    Returns:
        The request's retained region, seated; None if it has none.

    Cost: each page written once, in bulk; on a GPU ``PIECE_BYTES`` there, and the host
        waits for each piece.
    """
    size, rows = heap.layout.block_size, heap.rows
    first = saved.compaction.retained.start if saved.compaction else 0
    in_retained = len(saved.compaction.retained) if saved.compaction else 0
    tail_blocks = -(-tokens // size) - first - in_retained
    assert 0 <= tail_blocks <= saved.tail.shape[0] // rows, "no such tokens"
    tail_ids = heap.page_ids(blocks[in_retained : in_retained + tail_blocks])
    which = None
    if tail_blocks < saved.tail.shape[0] // rows:
        every = torch.arange(saved.tail.shape[0], device="cpu")
        which = every.view(rows, -1)[:, :tail_blocks].reshape(-1)
    _scatter(heap, tail_ids.reshape(-1), saved.tail, which)
    if saved.compaction is None:
        return None
    pool = heap.page_ids(blocks[:in_retained]).reshape(-1)
    assert pool.numel() == int(saved.counts.sum()), "pages must balance"
    _scatter(heap, pool, saved.retained)
    return _seated(tables, saved, saved.compaction, pool)


def take_over(
    tables: PageTables, saved: CacheSnapshot, blocks: Sequence[int]
) -> Resident | None:
    """Go on in the blocks that a saved cache was copied from.

    Args:
        blocks: physical ids, from the first resident block on; nobody has written to
            them since.

    Returns:
        The request's retained region, seated; None if it has none.

    Cost: no page is read or written.
    """
    place = saved.place
    assert place is not None, "read from a file, which lies nowhere in the pool"
    assert tuple(blocks) == place.blocks[: len(blocks)], "saved from other blocks"
    if saved.compaction is None:
        return None
    return _seated(tables, saved, saved.compaction, place.retained)


def _seated(
    tables: PageTables,
    saved: CacheSnapshot,
    compaction: Compaction,
    retained: torch.Tensor,
) -> Resident:
    """A retained region in these pages, int64 [sum of counts], row by row."""
    place = torch.arange(int(saved.counts.max()), device=retained.device)
    pages = retained.new_zeros(saved.counts.numel(), place.numel())
    pages[place < saved.counts[:, None]] = retained
    tail_block, positions = compaction.retained.stop, saved.positions.clone()
    # last: who finds no memory before it has no seat
    slot_index = tables.assign(pages, saved.counts, tail_block)
    return Resident(slot_index, compaction.at_tokens, tail_block, positions)


def _clear(heap: Heap, pages: torch.Tensor, used: int) -> None:
    """Remove what others left in the unused slots of partial pages, on the host."""
    layout = heap.layout
    for offsets in (layout.k_offsets, layout.v_offsets):
        unused = offsets.view(layout.block_size, -1)[used:].flatten().long()
        pages[:, unused.cpu()] = 0


def _pieces(heap: Heap, pages: int) -> Iterator[slice]:
    """So many pages, some at a time."""
    at_once = max(PIECE_BYTES // heap.pages[:1].nbytes, 1)
    for first in range(0, pages, at_once):
        yield slice(first, min(first + at_once, pages))


def _gathered(heap: Heap, ids: torch.Tensor) -> torch.Tensor:
    """[n, page_elems]: pages of the pool, on the host."""
    pool = heap.pages
    here = pool.device.type == "cpu"
    out = torch.empty(len(ids), pool.shape[1], dtype=pool.dtype, device="cpu")
    for piece in _pieces(heap, len(ids)):
        part = out[piece] if here else pool.new_empty(out[piece].shape)
        copy_pages(part, None, pool, ids[piece])
        if not here:
            out[piece] = part
    return out


def _scatter(
    heap: Heap,
    ids: torch.Tensor,
    pages: torch.Tensor,
    which: torch.Tensor | None = None,
) -> None:
    """Write pages of the host to the pool.

    Args:
        ids: int64 [n], where to; on the pool's device.
        pages: [at least n, page_elems].
        which: int64 [n], which of them, on the host; None = the first n.
    """
    for piece in _pieces(heap, len(ids)):
        part = pages[piece] if which is None else pages[which[piece]]
        copy_pages(heap.pages, ids[piece], part.to(heap.pages.device), None)
