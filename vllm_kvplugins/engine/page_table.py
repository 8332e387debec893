"""Page tables: from block tables to one page list per (request, KV head).

vLLM keeps one block list per request. Here every (request, KV head) is a
sequence of its own, with its own page list and length::

    zone pages of (layer, KV head)            tail blocks of the request
    [ p p p ... ]  counts differ per head  +  [ b b b ... ]  shared, last partial

Zone pages live in a dense table indexed by a request's *seat*, so that a step
gathers them for all its rows at once. Seat 0 belongs to requests without a
retained region: no pages, tail from block 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.device import on_device

# Most bytes of what is computed on the way to a table: vLLM, which measures what a
# step needs before it shares out the memory, sees only short rows.
SLICE_BYTES = 64 << 20
# per page: its place in the block table, its block, its page of a zone, which of them
_BYTES_PER_PAGE = 8 + 4 + 4 + 1


@dataclass(frozen=True, slots=True)
class FlatTable:
    """Page table of one step.

    Attributes:
        pages: int32 [scopes, rows * kv_heads, most_pages]. One scope: the ids
            are relative to any layer's own pages and hold for all layers.
            Else one scope per layer, ids count pages of the whole heap.
        lengths: int32 [scopes, rows * kv_heads], tokens to attend to.
        seats: per row.
        known_lens: per row, logical tokens; None = not known on the host.
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    slot_indices: Sequence[int]
    known_lens: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TableShape:
    """Of a table that holds any decoding step.

    Attributes:
        scopes: as in :class:`FlatTable`.
        rows: most requests of a step.
        heads: KV heads per layer.
        pages: most pages of any KV head of a request.
    """

    scopes: int
    rows: int
    heads: int
    pages: int

    @property
    def num_bytes(self) -> int:
        """Of pages and lengths."""
        return 4 * self.scopes * self.rows * self.heads * (self.pages + 1)


class FixedTable:
    """A page table that steps are written into, one after the other.

    A graph that was captured with so many rows reads them at the same place whenever
    it is replayed. What a step does not use keeps what an earlier one wrote there:
    nobody reads a list beyond its length, and rows without a request have length 0.
    """

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self.shape = shape
        sequences = shape.scopes, shape.rows * shape.heads
        self._pages = torch.zeros(
            *sequences, shape.pages, dtype=torch.int32, device=device
        )
        self._lengths = torch.zeros(*sequences, dtype=torch.int32, device=device)

    def room(
        self,
        rows: int,
        most: int,
        slot_indices: Sequence[int],
        known_lens: Sequence[int] | None,
    ) -> FlatTable:
        """Where a step is written.

        Args:
            rows: requests of the step, padding included.
            most: pages of its longest row; what lies behind stays as it is.
            seats, known_lens: as in :class:`FlatTable`.

        Returns:
            Views of this table, with room for its most pages.

        Cost: none; nothing is written.
        """
        shape = self.shape
        assert rows <= shape.rows, f"{rows} rows, room for {shape.rows}"
        assert most <= shape.pages, f"{most} pages, room for {shape.pages}"
        used = rows * shape.heads
        return FlatTable(
            self._pages[:, :used], self._lengths[:, :used], slot_indices, known_lens
        )


class PageTables:
    """Retained region pages of all seated requests.

    Args:
        num_layers: layers in the heap.
        num_kv_heads: KV heads per layer.
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens per block.
        uniform: every (layer, KV head) always owns the same number of home
            pages, so one layer-relative table serves all layers.
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
        # per seat, what the host knows of it: pages of the longest row, tail block,
        # and int64 [scopes, kv_heads] pages of each
        none = torch.zeros(self.scopes, num_kv_heads, dtype=torch.int64)
        self._known: list[tuple[int, int, torch.Tensor]] = [(0, 0, none)]
        self._retained_pages = torch.zeros(
            1, self.scopes, num_kv_heads, 0, dtype=torch.int32, device=device
        )
        self._retained_counts = torch.zeros(
            1, self.scopes, num_kv_heads, dtype=torch.int64, device=device
        )
        self._tail_block = torch.zeros(1, dtype=torch.int64, device=device)

    # -- seats ------------------------------------------------------------

    def assign(self, pages: torch.Tensor, counts: torch.Tensor, tail_block: int) -> int:
        """Give a freshly compacted request a seat.

        Args:
            pages: int64 [layers * kv_heads, most], heap page ids.
            counts: int64 [layers * kv_heads], pages used per row.
            tail_block: first logical block after the retained region.

        Returns:
            The seat, >= 1, valid until ``leave``.
        """
        on_host = counts.cpu()
        most = int(on_host.max())
        if not self._free_slot_indices:
            self._grow_slot_indices()
        self._fit_pages(most)
        slot_index = self._free_slot_indices[-1]
        used = self.scopes * self.num_kv_heads
        shape = (self.scopes, self.num_kv_heads)
        fresh = pages[:used, :most].reshape(*shape, most)
        self._retained_pages[slot_index, ..., :most] = fresh.int()
        self._retained_counts[slot_index] = counts[:used].reshape(shape)
        self._tail_block[slot_index] = tail_block
        self._known[slot_index] = most, tail_block, on_host[:used].reshape(shape)
        # last, so that nobody sits where one of these has failed
        self._free_slot_indices.pop()
        return slot_index

    def retained(self, slot_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Retained region pages of a seat, as ``seat`` took them.

        Returns:
            int64 [layers * kv_heads, most] heap page ids, int64 [layers * kv_heads].
        """
        repeats = self.num_layers // self.scopes
        most = self._known[slot_index][0]
        pages = self._retained_pages[slot_index, ..., :most].flatten(0, 1).long()
        pages = pages.repeat(repeats, 1)
        counts = self._retained_counts[slot_index].reshape(-1).repeat(repeats)
        if self.scopes == 1:
            layer = torch.arange(self.num_layers, device=self.device)
            base = layer * self.num_blocks * self.num_kv_heads
            pages += base.repeat_interleave(self.num_kv_heads)[:, None]
        return pages, counts

    def leave(self, slot_index: int) -> None:
        """Return a seat; its contents are overwritten by whoever sits down next."""
        assert slot_index > 0, "seat 0 belongs to everyone"
        assert slot_index not in self._free_slot_indices, (
            f"seat {slot_index} is not taken"
        )
        self._known[slot_index] = self._known[0]
        self._free_slot_indices.append(slot_index)

    @property
    def num_slot_indices(self) -> int:
        return int(self._tail_block.numel() - 1 - len(self._free_slot_indices))

    def _grow_slot_indices(self) -> None:
        old = self._tail_block.numel()
        more = max(old, 8)
        zones = self._retained_pages, self._retained_counts, self._tail_block
        # all of them or, where there is no memory for one, none
        grown = [_extend(tensor, 0, more) for tensor in zones]
        self._retained_pages, self._retained_counts, self._tail_block = grown
        self._known += [self._known[0]] * more
        # Lower seats first, so that runs repeat exactly.
        self._free_slot_indices = list(range(old + more - 1, old - 1, -1))

    def _fit_pages(self, most: int) -> None:
        """Room for a zone of so many pages, and not for much wider ones than there
        are: what one long request took is given back with the next compaction."""
        room = self._retained_pages.shape[-1]
        needed = max(most, *(known[0] for known in self._known))
        if needed <= room <= 2 * needed:
            return
        # an eighth more, so that zones that grow do not move all of them each time
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
    ) -> FlatTable:
        """Page lists and lengths of one step's rows.

        Args:
            seats: per row; 0 for a row without a retained region.
            seq_lens: [rows], logical tokens up to and including this step's.
            block_table: int32 [rows, blocks], vLLM's; entries below a row's
                tail block are stale and not read for seated rows.
            known_lens: the same as ``seq_lens``, on the host; None = not known there.
            into: where to write them; None = new tensors, no wider than needed.

        Cost: O(scopes * rows * kv_heads * most pages) gathers, with at most
            ``SLICE_BYTES`` besides the table, or what one row of one scope takes; no
            host sync if lengths are known.
        """
        rows, heads = len(slot_indices), self.num_kv_heads
        slot_index = on_device(slot_indices, self.device)
        counts = self._retained_counts[slot_index].transpose(
            0, 1
        )  # scopes, rows, heads
        tail_block = self._tail_block[slot_index]
        tail_tokens = seq_lens.long() - tail_block * self.block_size
        lengths = counts * self.block_size + tail_tokens[:, None]
        if known_lens is not None:
            most = self._most_pages(slot_indices, known_lens)
        else:
            most = -(-int(lengths.max()) // self.block_size) if rows else 0
        if into is not None:
            assert (into.shape.scopes, into.shape.heads) == (self.scopes, heads)
            table = into.room(rows, most, slot_indices, known_lens)
        else:
            shape = self.scopes, rows * heads
            pages = torch.empty(*shape, most, dtype=torch.int32, device=self.device)
            table = FlatTable(pages, pages.new_empty(shape), slot_indices, known_lens)
        # rows first per scope, the order in which the kernel's sequences stand
        table.lengths.unflatten(1, (rows, heads)).copy_(lengths)
        lists = table.pages.unflatten(1, (rows, heads))[..., :most]
        retained = min(max((self._known[s][0] for s in slot_indices), default=0), most)
        for scopes, some in self._slices(rows, most):
            self._tails(
                lists[scopes, some],
                tail_block[some, None] - counts[scopes, some],
                block_table[some],
                self._base[scopes],
            )
            if retained:
                pages = self._retained_pages[
                    slot_index[some], scopes, :, :retained
                ].transpose(0, 1)
                _zones(lists[scopes, some, :, :retained], pages, counts[scopes, some])
        return table

    def _slices(self, rows: int, most: int) -> Iterator[tuple[slice, slice]]:
        """Scopes and rows that are built at once."""
        each = _BYTES_PER_PAGE * self.num_kv_heads * max(most, 1)
        fit = max(SLICE_BYTES // each, 1)  # rows of one scope
        scopes, some = max(fit // max(rows, 1), 1), max(min(fit, rows), 1)
        for scope in range(0, self.scopes, scopes):
            for row in range(0, rows, some):
                yield slice(scope, scope + scopes), slice(row, row + some)

    def _tails(
        self,
        lists: torch.Tensor,
        first: torch.Tensor,
        block_table: torch.Tensor,
        base: torch.Tensor,
    ) -> None:
        """Write lists as if they had no zone before the tail.

        Args:
            lists: int32 [scopes, rows, kv_heads, most].
            first: int64 [scopes, rows, kv_heads], logical block that the first place
                stands for, negative where a zone is longer than what lay before.
            block_table: int32 [rows, blocks].
            base: int32 [scopes, 1, kv_heads, 1].
        """
        scopes, _, heads, most = lists.shape
        place = torch.arange(most, device=self.device)
        block = (place + first[..., None]).clamp_(0, block_table.shape[1] - 1)
        listed = block_table[None, :, None].expand(scopes, -1, heads, -1)
        torch.add(base, listed.gather(3, block), alpha=heads, out=lists)

    def lengths_on_host(self, table: FlatTable) -> torch.Tensor:
        """The lengths of a table that was just built, for kernels planned by the host.

        Returns:
            int32 [scopes, rows * kv_heads], on the host.

        Cost: waits for the device only if lengths are not known, as in dummy steps.
        """
        if table.known_lens is None:
            return table.lengths.cpu()
        known = [self._known[slot_index] for slot_index in table.slot_indices]
        counts = torch.stack([counts for _, _, counts in known], dim=1)
        tails = [
            tokens - tail_block * self.block_size
            for tokens, (_, tail_block, _) in zip(table.known_lens, known, strict=True)
        ]
        lengths = counts * self.block_size + torch.tensor(tails)[None, :, None]
        return lengths.flatten(1).int()

    def _most_pages(self, slot_indices: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Of any row: its longest zone, and the blocks from its tail on."""
        most = 0
        for slot_index, tokens in zip(slot_indices, seq_lens, strict=True):
            retained, tail_block, _ = self._known[slot_index]
            most = max(most, retained - tail_block - (-tokens // self.block_size))
        return most


def _extend(tensor: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def _zones(lists: torch.Tensor, pages: torch.Tensor, counts: torch.Tensor) -> None:
    """Write zones before what else is in lists.

    Args:
        lists, pages: int32 [scopes, rows, kv_heads, longest zone].
        counts: int64 [scopes, rows, kv_heads], pages of each zone.
    """
    place = torch.arange(lists.shape[-1], device=lists.device)
    torch.where(place < counts[..., None], pages, lists, out=lists)


def page_runs(
    lengths: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sequence's pages begin in one list of all, and how full its last is.

    Args:
        lengths: int32 [sequences], on the host.

    Returns:
        int32 [sequences + 1], int32 [sequences]; 0 for an empty sequence.
    """
    used = (lengths + page_size - 1) // page_size
    start = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(used, 0, out=start[1:])
    return start, (lengths - (used - 1).clamp_(min=0) * page_size).int()


def page_indices(pages: torch.Tensor, start: torch.Tensor, total: int) -> torch.Tensor:
    """Page lists behind each other.

    Args:
        pages: int32 [sequences, most_pages].
        start: int32 [sequences + 1], of :func:`page_runs`, on the same device.
        total: its last number.

    Returns:
        int32 [total].

    Cost: a few launches; no host sync.
    """
    place = torch.arange(total, dtype=torch.int32, device=pages.device)
    owner = torch.bucketize(place, start[1:], right=True)
    column = place - start[owner]
    return pages.reshape(-1)[owner * pages.shape[1] + column]
