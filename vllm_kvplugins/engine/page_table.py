"""Page tables: from block tables to one page list per (request, KV head).

vLLM keeps one block list per request. Here every (request, KV head) is a sequence of
its own, with its own page list and length::

    retained region of (layer, KV head)       tail blocks of the request
    [ p p p ... ]  counts differ per head  +  [ b b b ... ]  shared, last partial

The pages of retained regions are in one dense table, indexed by the *slot index* of a
request. A step gathers them for all its rows at once. Slot index 0 belongs to all
requests without a retained region: no pages, and the tail starts at block 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_kvplugins.ops.device import on_device

# Limit for temporary tensors of a step. vLLM measures the memory of a step with short
# rows only, before it allocates the cache.
SLICE_BYTES = 64 << 20
# Per page: index in the block table, block, page of the retained region, mask.
_BYTES_PER_PAGE = 8 + 4 + 4 + 1


@dataclass(frozen=True, slots=True)
class FlatTable:
    """Page table of one step.

    Attributes:
        pages: int32 [scopes, rows * kv_heads, max pages]. With one scope, ids are
            relative to the pages of a layer and hold for all layers. Otherwise there
            is one scope per layer, and ids count pages of the whole heap.
        lengths: int32 [scopes, rows * kv_heads], tokens to attend to.
        slot_indices: per row.
        known_lens: per row, logical tokens; None = not known on the host.
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    slot_indices: Sequence[int]
    known_lens: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TableShape:
    """Shape of a table that fits every decode step.

    Attributes:
        scopes: as in :class:`FlatTable`.
        rows: maximum number of requests in a step.
        heads: KV heads per layer.
        pages: maximum number of pages per KV head of a request.
    """

    scopes: int
    rows: int
    heads: int
    pages: int

    @property
    def num_bytes(self) -> int:
        """Bytes of pages and lengths."""
        return 4 * self.scopes * self.rows * self.heads * (self.pages + 1)


class FixedTable:
    """A page table at a fixed address, for CUDA graphs; each step overwrites it.

    A graph reads its rows at the address where it was captured. Entries that a step
    does not use keep the values of an earlier step. Kernels do not read a list behind
    its length, and rows without a request have length 0.
    """

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self.shape = shape
        sequences = shape.scopes, shape.rows * shape.heads
        self._pages = torch.zeros(
            *sequences, shape.pages, dtype=torch.int32, device=device
        )
        self._lengths = torch.zeros(*sequences, dtype=torch.int32, device=device)

    def view(
        self,
        rows: int,
        max_pages: int,
        slot_indices: Sequence[int],
        known_lens: Sequence[int] | None,
    ) -> FlatTable:
        """The part of this table that a step writes.

        Args:
            rows: requests of the step, padding included.
            max_pages: pages of its longest row; entries behind keep their values.
            slot_indices, known_lens: as in :class:`FlatTable`.

        Returns:
            Views of this table, as wide as the table. Writes nothing.
        """
        shape = self.shape
        assert rows <= shape.rows, f"{rows} rows, room for {shape.rows}"
        assert max_pages <= shape.pages, f"{max_pages} pages, room for {shape.pages}"
        used = rows * shape.heads
        return FlatTable(
            self._pages[:, :used], self._lengths[:, :used], slot_indices, known_lens
        )


class _HostRow(NamedTuple):
    """What the host knows about a slot index.

    Attributes:
        max_pages: pages of the longest row of its retained region.
        tail_block: first logical block behind the retained region.
        counts: int64 [scopes, kv_heads], pages per row.
    """

    max_pages: int
    tail_block: int
    counts: torch.Tensor


class PageTables:
    """Pages of the retained regions of all compacted requests.

    Args:
        num_layers: layers in the heap.
        num_kv_heads: KV heads per layer.
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens per block.
        uniform: every (layer, KV head) of a request always owns the same number of
            pages, so one table relative to the layer serves all layers.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        num_blocks: int,
        block_size: int,
        uniform: bool,
        device: torch.device,
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.scopes = 1 if uniform else num_layers
        self.device = device
        layer_pages = num_blocks * num_kv_heads
        assert num_layers * layer_pages < 2**31, "page ids do not fit into int32"
        heads = torch.arange(num_kv_heads, dtype=torch.int32, device=device)
        scope = torch.arange(self.scopes, dtype=torch.int32, device=device)
        # int32 [scopes, 1, kv_heads, 1]: pages of block 0
        self._base = (scope[:, None] * layer_pages + heads)[:, None, :, None]
        self._free_slot_indices: list[int] = []
        no_pages = torch.zeros(self.scopes, num_kv_heads, dtype=torch.int64)
        self._host_rows = [_HostRow(0, 0, no_pages)]  # per slot index
        self._retained_pages = torch.zeros(
            1, self.scopes, num_kv_heads, 0, dtype=torch.int32, device=device
        )
        self._retained_counts = torch.zeros(
            1, self.scopes, num_kv_heads, dtype=torch.int64, device=device
        )
        self._tail_block = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def request_bytes(self) -> int:
        """Device memory of the page lists of one compacted request, in bytes."""
        tables = (self._retained_pages, self._retained_counts, self._tail_block)
        return sum(table[:1].nbytes for table in tables)

    @property
    def num_bytes(self) -> int:
        """Device memory of the page lists, of all slot indices, in bytes."""
        tables = (self._retained_pages, self._retained_counts, self._tail_block)
        return sum(table.nbytes for table in (*tables, self._base))

    # -- slot indices -----------------------------------------------------

    def assign(self, pages: torch.Tensor, counts: torch.Tensor, tail_block: int) -> int:
        """Store the retained region of a request that was just compacted.

        Args:
            pages: int64 [layers * kv_heads, max pages], heap page ids.
            counts: int64 [layers * kv_heads], pages used per row.
            tail_block: first logical block behind the retained region.

        Returns:
            The request's slot index, >= 1, valid until ``release``.
        """
        on_host = counts.cpu()
        max_pages = int(on_host.max())
        if not self._free_slot_indices:
            self._grow_slot_indices()
        self._fit_pages(max_pages)
        slot_index = self._free_slot_indices[-1]
        used = self.scopes * self.num_kv_heads
        shape = (self.scopes, self.num_kv_heads)
        rows = pages[:used, :max_pages].reshape(*shape, max_pages)
        self._retained_pages[slot_index, ..., :max_pages] = rows.int()
        self._retained_counts[slot_index] = counts[:used].reshape(shape)
        self._tail_block[slot_index] = tail_block
        self._host_rows[slot_index] = _HostRow(
            max_pages, tail_block, on_host[:used].reshape(shape)
        )
        # Last: the index stays free if one of the writes fails.
        self._free_slot_indices.pop()
        return slot_index

    def retained(self, slot_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The retained region that ``assign`` stored.

        Returns:
            int64 [layers * kv_heads, max pages], heap page ids; int64
            [layers * kv_heads], pages used per row.
        """
        repeats = self.num_layers // self.scopes
        max_pages = self._host_rows[slot_index].max_pages
        pages = self._retained_pages[slot_index, ..., :max_pages].flatten(0, 1).long()
        pages = pages.repeat(repeats, 1)
        counts = self._retained_counts[slot_index].reshape(-1).repeat(repeats)
        if self.scopes == 1:
            layer = torch.arange(self.num_layers, device=self.device)
            base = layer * self.num_blocks * self.num_kv_heads
            pages += base.repeat_interleave(self.num_kv_heads)[:, None]
        return pages, counts

    def release(self, slot_index: int) -> None:
        """Free a slot index; a later ``assign`` overwrites its contents."""
        assert slot_index > 0, "slot index 0 is shared"
        assert slot_index not in self._free_slot_indices, (
            f"slot index {slot_index} is not in use"
        )
        self._host_rows[slot_index] = self._host_rows[0]
        self._free_slot_indices.append(slot_index)

    @property
    def num_slot_indices(self) -> int:
        """Slot indices in use."""
        return int(self._tail_block.numel() - 1 - len(self._free_slot_indices))

    def _grow_slot_indices(self) -> None:
        old = self._tail_block.numel()
        more = max(old, 8)
        tensors = self._retained_pages, self._retained_counts, self._tail_block
        # Grow all of them before replacing the first: memory may run out.
        grown = [_extend(tensor, 0, more) for tensor in tensors]
        self._retained_pages, self._retained_counts, self._tail_block = grown
        self._host_rows += [self._host_rows[0]] * more
        # Lower indices first, so that runs repeat exactly.
        self._free_slot_indices = list(range(old + more - 1, old - 1, -1))

    def _fit_pages(self, max_pages: int) -> None:
        """Make the table as wide as the widest retained region.

        The next compaction after a long request has ended shrinks it again.
        """
        room = self._retained_pages.shape[-1]
        needed = max(max_pages, *(row.max_pages for row in self._host_rows))
        if needed <= room <= 2 * needed:
            return
        # An eighth more, so that growing regions do not copy the table each time.
        wide = needed + needed // 8
        fitting = self._retained_pages.new_zeros(*self._retained_pages.shape[:-1], wide)
        kept = min(room, needed)
        fitting[..., :kept] = self._retained_pages[..., :kept]
        self._retained_pages = fitting

    # -- per step -----------------------------------------------------------

    def build(
        self,
        slot_indices: Sequence[int],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        known_lens: Sequence[int] | None = None,
        into: FixedTable | None = None,
        longest_lens: Sequence[int] | None = None,
    ) -> FlatTable:
        """Page lists and lengths of one step's rows.

        Args:
            slot_indices: per row; 0 for a row without a retained region.
            seq_lens: [rows], logical tokens up to and including this step's.
            block_table: int32 [rows, blocks], vLLM's; entries below a row's
                tail block are stale and not read for compacted rows.
            known_lens: ``seq_lens`` on the host; None = not known there.
            into: table to write to; None = new tensors, as wide as needed.
            longest_lens: limits of ``seq_lens`` on the host, where they are not known.

        Cost: O(scopes * rows * kv_heads * max pages) gathers, with at most
            ``SLICE_BYTES`` (or one row of one scope) of temporary memory; no host sync
            if lengths or their limits are known.
        """
        rows, heads = len(slot_indices), self.num_kv_heads
        slot_index = on_device(slot_indices, self.device)
        # [scopes, rows, heads]
        counts = self._retained_counts[slot_index].transpose(0, 1)
        tail_block = self._tail_block[slot_index]
        tail_tokens = seq_lens.long() - tail_block * self.block_size
        lengths = counts * self.block_size + tail_tokens[:, None]
        host_lens = longest_lens if known_lens is None else known_lens
        if host_lens is not None:
            max_pages = self._max_pages(slot_indices, host_lens)
        else:
            max_pages = -(-int(lengths.max()) // self.block_size) if rows else 0
        if into is not None:
            assert (into.shape.scopes, into.shape.heads) == (self.scopes, heads)
            table = into.view(rows, max_pages, slot_indices, known_lens)
        else:
            shape = self.scopes, rows * heads
            pages = torch.empty(
                *shape, max_pages, dtype=torch.int32, device=self.device
            )
            table = FlatTable(pages, pages.new_empty(shape), slot_indices, known_lens)
        # The kernel's sequences are ordered by row, then by KV head.
        table.lengths.unflatten(1, (rows, heads)).copy_(lengths)
        lists = table.pages.unflatten(1, (rows, heads))[..., :max_pages]
        retained = max((self._host_rows[s].max_pages for s in slot_indices), default=0)
        retained = min(retained, max_pages)
        for scopes, part in self._slices(rows, max_pages):
            self._write_tails(
                lists[scopes, part],
                tail_block[part, None] - counts[scopes, part],
                block_table[part],
                self._base[scopes],
            )
            if retained:
                pages = self._retained_pages[slot_index[part], scopes, :, :retained]
                _write_retained(
                    lists[scopes, part, :, :retained],
                    pages.transpose(0, 1),
                    counts[scopes, part],
                )
        return table

    def _slices(self, rows: int, max_pages: int) -> Iterator[tuple[slice, slice]]:
        """Ranges of scopes and rows that are built at once."""
        each = _BYTES_PER_PAGE * self.num_kv_heads * max(max_pages, 1)
        fit = max(SLICE_BYTES // each, 1)  # rows of one scope
        num_scopes, num_rows = max(fit // max(rows, 1), 1), max(min(fit, rows), 1)
        for scope in range(0, self.scopes, num_scopes):
            for row in range(0, rows, num_rows):
                yield slice(scope, scope + num_scopes), slice(row, row + num_rows)

    def _write_tails(
        self,
        lists: torch.Tensor,
        first: torch.Tensor,
        block_table: torch.Tensor,
        base: torch.Tensor,
    ) -> None:
        """Write all entries as if the tail filled the whole list.

        Args:
            lists: int32 [scopes, rows, kv_heads, max pages].
            first: int64 [scopes, rows, kv_heads], logical block of the first entry;
                negative where the retained region has more pages than blocks
                lie before the tail.
            block_table: int32 [rows, blocks].
            base: int32 [scopes, 1, kv_heads, 1].
        """
        scopes, _, heads, max_pages = lists.shape
        place = torch.arange(max_pages, device=self.device)
        block = (place + first[..., None]).clamp_(0, block_table.shape[1] - 1)
        listed = block_table[None, :, None].expand(scopes, -1, heads, -1)
        torch.add(base, listed.gather(3, block), alpha=heads, out=lists)

    def lengths_on_host(self, table: FlatTable) -> torch.Tensor:
        """Lengths of the table that was built last, for kernels that plan on the host.

        Returns:
            int32 [scopes, rows * kv_heads], on the host.

        Cost: waits for the device only if ``known_lens`` is None, as in dummy steps and
            for drafters.
        """
        if table.known_lens is None:
            return table.lengths.cpu()
        host_rows = [self._host_rows[slot_index] for slot_index in table.slot_indices]
        counts = torch.stack([row.counts for row in host_rows], dim=1)
        tails = [
            tokens - row.tail_block * self.block_size
            for tokens, row in zip(table.known_lens, host_rows, strict=True)
        ]
        lengths = counts * self.block_size + torch.tensor(tails)[None, :, None]
        return lengths.flatten(1).int()

    def _max_pages(self, slot_indices: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Pages of the longest row: its retained region and its tail."""
        max_pages = 0
        for slot_index, tokens in zip(slot_indices, seq_lens, strict=True):
            retained = self._host_rows[slot_index]
            tail = -(-tokens // self.block_size) - retained.tail_block
            max_pages = max(max_pages, retained.max_pages + tail)
        return max_pages


def _extend(tensor: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _write_retained(
    lists: torch.Tensor, pages: torch.Tensor, counts: torch.Tensor
) -> None:
    """Overwrite the first entries of lists with the pages of retained regions.

    Args:
        lists, pages: int32 [scopes, rows, kv_heads, max retained pages].
        counts: int64 [scopes, rows, kv_heads], pages of each region.
    """
    place = torch.arange(lists.shape[-1], device=lists.device)
    torch.where(place < counts[..., None], pages, lists, out=lists)


def page_runs(
    lengths: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page lists in one array: start of each list, and tokens in its last page.

    Args:
        lengths: int32 [sequences], on the host.

    Returns:
        int32 [sequences + 1], starts; int32 [sequences], tokens in the last page, 0
        for an empty sequence.
    """
    used = (lengths + page_size - 1) // page_size
    start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(used, 0, out=start[1:])
    return start, (lengths - (used - 1).clamp_(min=0) * page_size).int()


def page_indices(pages: torch.Tensor, start: torch.Tensor, total: int) -> torch.Tensor:
    """Concatenate page lists.

    Args:
        pages: int32 [sequences, max pages].
        start: int32 [sequences + 1], of :func:`page_runs`, on the same device.
        total: the last number of ``start``.

    Returns:
        int32 [total].

    Cost: a few launches; no host sync.
    """
    place = torch.arange(total, dtype=torch.int32, device=pages.device)
    owner = torch.bucketize(place, start[1:], right=True)
    column = place - start[owner]
    return pages.reshape(-1)[owner * pages.shape[1] + column]
