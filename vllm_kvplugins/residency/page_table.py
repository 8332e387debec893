"""Page tables: from block tables to one page list per (request, KV head).

vLLM keeps one block list per request. Here every (request, KV head) is a
sequence of its own, with its own page list and length::

    zone pages of (layer, KV head)            tail blocks of the request
    [ p p p ... ]  counts differ per head  +  [ b b b ... ]  shared, last partial

Zone pages live in a dense table indexed by a request's *seat*, so that a step
gathers them for all its rows at once. Seat 0 belongs to requests without a
landing zone: no pages, tail from block 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.ops.device import on_device
from vllm_kvplugins.residency.fixed_table import FixedTable, FlatTable


class PageTables:
    """Landing-zone pages of all seated requests.

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
        self._heads = torch.arange(num_kv_heads, device=device)
        layer_pages = num_blocks * num_kv_heads
        self._scope_base = torch.arange(self.scopes, device=device) * layer_pages
        self._free_seats: list[int] = []
        # per seat, what the host knows of it: pages of the longest row, tail block,
        # and int64 [scopes, kv_heads] pages of each
        none = torch.zeros(self.scopes, num_kv_heads, dtype=torch.int64)
        self._known: list[tuple[int, int, torch.Tensor]] = [(0, 0, none)]
        self._zone_pages = torch.zeros(
            1, self.scopes, num_kv_heads, 0, dtype=torch.int32, device=device
        )
        self._zone_counts = torch.zeros(
            1, self.scopes, num_kv_heads, dtype=torch.int64, device=device
        )
        self._tail_block = torch.zeros(1, dtype=torch.int64, device=device)

    # -- seats ------------------------------------------------------------

    def seat(self, pages: torch.Tensor, counts: torch.Tensor, tail_block: int) -> int:
        """Give a freshly compacted request a seat.

        Args:
            pages: int64 [layers * kv_heads, most], heap page ids.
            counts: int64 [layers * kv_heads], pages used per row.
            tail_block: first logical block after the landing zone.

        Returns:
            The seat, >= 1, valid until ``leave``.
        """
        most = pages.shape[1]
        if not self._free_seats:
            self._grow_seats()
        if most > self._zone_pages.shape[-1]:
            self._grow_pages(most)
        seat = self._free_seats.pop()
        used = self.scopes * self.num_kv_heads
        shape = (self.scopes, self.num_kv_heads, most)
        self._zone_pages[seat, ..., :most] = pages[:used].reshape(shape).int()
        self._zone_counts[seat] = counts[:used].reshape(shape[:2])
        self._tail_block[seat] = tail_block
        on_host = counts.cpu()
        known = on_host[:used].reshape(shape[:2])
        self._known[seat] = int(on_host.max()), tail_block, known
        return seat

    def zone(self, seat: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Landing-zone pages of a seat, as ``seat`` took them.

        Returns:
            int64 [layers * kv_heads, most] heap page ids, int64 [layers * kv_heads].
        """
        repeats = self.num_layers // self.scopes
        shape = (self.scopes * self.num_kv_heads, -1)
        pages = self._zone_pages[seat].long().reshape(shape).repeat(repeats, 1)
        counts = self._zone_counts[seat].reshape(-1).repeat(repeats)
        if self.scopes == 1:
            layer = torch.arange(self.num_layers, device=self.device)
            base = layer * self.num_blocks * self.num_kv_heads
            pages += base.repeat_interleave(self.num_kv_heads)[:, None]
        return pages, counts

    def leave(self, seat: int) -> None:
        """Return a seat; its contents are overwritten by whoever sits down next."""
        assert seat > 0, "seat 0 belongs to everyone"
        assert seat not in self._free_seats, f"seat {seat} is not taken"
        self._free_seats.append(seat)

    @property
    def seats_taken(self) -> int:
        return int(self._tail_block.numel() - 1 - len(self._free_seats))

    def _grow_seats(self) -> None:
        old = self._tail_block.numel()
        more = max(old, 8)
        # Lower seats first, so that runs repeat exactly.
        self._free_seats = list(range(old + more - 1, old - 1, -1))
        self._zone_pages = _extend(self._zone_pages, 0, more)
        self._zone_counts = _extend(self._zone_counts, 0, more)
        self._tail_block = _extend(self._tail_block, 0, more)
        self._known += [self._known[0]] * more

    def _grow_pages(self, most: int) -> None:
        more = max(most, 2 * self._zone_pages.shape[-1]) - self._zone_pages.shape[-1]
        self._zone_pages = _extend(self._zone_pages, 3, more)

    # -- per step -----------------------------------------------------------

    def build(
        self,
        seats: Sequence[int],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        known_lens: Sequence[int] | None = None,
        into: FixedTable | None = None,
    ) -> FlatTable:
        """Page lists and lengths of one step's rows.

        Args:
            seats: per row; 0 for a row without a landing zone.
            seq_lens: [rows], logical tokens up to and including this step's.
            block_table: int32 [rows, blocks], vLLM's; entries below a row's
                tail block are stale and not read for seated rows.
            known_lens: the same as ``seq_lens``, on the host; None = not known there.
            into: where to write them; None = new tensors, no wider than needed.

        Cost: O(scopes * rows * kv_heads * most pages) gathers; no host sync if lengths
            are known.
        """
        rows, heads = len(seats), self.num_kv_heads
        seat = on_device(seats, self.device)
        counts = self._zone_counts[seat]  # rows, scopes, heads
        tail_block = self._tail_block[seat]
        tail_tokens = seq_lens.long() - tail_block * self.block_size
        lengths = counts * self.block_size + tail_tokens[:, None, None]
        if known_lens is not None:
            most = self._most_pages(seats, known_lens)
        else:
            most = -(-int(lengths.max()) // self.block_size) if rows else 0
        place = torch.arange(most, device=self.device)

        # Tail: page of (block, head), relative to its layer.
        after_zone = place - counts[..., None]  # rows, scopes, heads, most
        block_index = (tail_block[:, None, None, None] + after_zone).clamp_(
            0, block_table.shape[1] - 1
        )
        flat_index = block_index.reshape(rows, -1)
        blocks = block_table.long().gather(1, flat_index).view(block_index.shape)
        pages = blocks * heads + self._heads[:, None]
        pages += self._scope_base[:, None, None]
        width = min(most, self._zone_pages.shape[-1])
        if width:
            zone = self._zone_pages[seat, ..., :width].long()
            in_zone = place[:width] < counts[..., None]
            pages[..., :width] = torch.where(in_zone, zone, pages[..., :width])
        if into is not None:
            return into.fill(pages, lengths, seats, known_lens)
        # rows first per scope, the order in which the kernel's sequences stand
        pages = pages.permute(1, 0, 2, 3).reshape(self.scopes, rows * heads, most)
        lengths = lengths.permute(1, 0, 2).reshape(self.scopes, rows * heads)
        return FlatTable(pages.int(), lengths.int(), seats, known_lens)

    def lengths_on_host(self, table: FlatTable) -> torch.Tensor:
        """The lengths of a table that was just built, for kernels planned by the host.

        Returns:
            int32 [scopes, rows * kv_heads], on the host.

        Cost: waits for the device only if lengths are not known, as in dummy steps.
        """
        if table.known_lens is None:
            return table.lengths.cpu()
        known = [self._known[seat] for seat in table.seats]
        counts = torch.stack([counts for _, _, counts in known], dim=1)
        tails = [
            tokens - tail_block * self.block_size
            for tokens, (_, tail_block, _) in zip(table.known_lens, known, strict=True)
        ]
        lengths = counts * self.block_size + torch.tensor(tails)[None, :, None]
        return lengths.flatten(1).int()

    def _most_pages(self, seats: Sequence[int], seq_lens: Sequence[int]) -> int:
        """Of any row: its longest zone, and the blocks from its tail on."""
        most = 0
        for seat, tokens in zip(seats, seq_lens, strict=True):
            zone, tail_block, _ = self._known[seat]
            most = max(most, zone - tail_block - (-tokens // self.block_size))
        return most


def _extend(tensor: torch.Tensor, dim: int, more: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)
