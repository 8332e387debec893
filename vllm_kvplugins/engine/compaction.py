"""Compaction: which token moves to which slot when a request shrinks.

One request, all layers and KV heads at once; every (layer, KV head) is a *row*.
Before the compaction, a row owns some pages. After it, the row owns ``counts[row]``
pages of the *pool*, which are the pages of the blocks that stay. A row keeps its own
pages in the pool, newest first. If it gets more, it takes pages that other rows gave
up.

Kept tokens in a page that the row keeps do not move, because attention ignores the
order of slots. The other kept tokens fill the free slots::

    kept tokens are upper case; the row keeps 2 of its pages in the pool
      before  [a B c d] [e f G H] | [i J k l] [m n o P] [Q R s T]
                 freed    freed      given up   kept      kept
      after                                   [B G H P] [Q R J T]

Two passes make this safe for every ownership. *Direct* moves fill free slots of pages
that their row keeps. No other move reads these slots, so the order does not matter.
*Staged* moves fill pages taken from other rows, which may hold tokens that have yet to
move. The pass reads all of them into a buffer before it writes the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.ops import dispatch as ops


@dataclass(frozen=True, slots=True)
class Moves:
    """Token copies. Sources and targets are int64 [moves] pages and slots."""

    source_page: torch.Tensor
    source_slot: torch.Tensor
    target_page: torch.Tensor
    target_slot: torch.Tensor

    def __len__(self) -> int:
        return int(self.source_page.numel())


@dataclass(frozen=True, slots=True)
class CompactedPages:
    """Result of a compaction.

    Attributes:
        direct: moves that run first, in any order.
        staged: moves that run next: read all, then write all.
        pages: int64 [rows, max pages], page ids; row r uses the first ``counts[r]``.
        counts: int64 [rows], pages owned.
        positions: int32 [rows, max pages * block_size], RoPE position of the token in
            each slot, -1 behind ``counts[r] * block_size``.
    """

    direct: Moves
    staged: Moves
    pages: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor


def compact(
    heap: Heap,
    keep: torch.Tensor,
    counts: torch.Tensor,
    pages: torch.Tensor,
    owned: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
) -> CompactedPages:
    """Move the tokens that stay into the pages that stay.

    Args:
        keep, counts, pages, owned, positions, pool: see :func:`plan_moves`.

    Returns:
        The pages and positions after the moves.
    """
    after = plan_moves(keep, counts, pages, owned, positions, pool)
    direct, staged = after.direct, after.staged
    if len(direct):
        ops.move_tokens(
            heap.kv,
            direct.source_page,
            direct.source_slot,
            direct.target_page,
            direct.target_slot,
        )
    if len(staged):
        keys, values = ops.gather_tokens(
            heap.kv, staged.source_page, staged.source_slot
        )
        ops.scatter_tokens(
            heap.kv, staged.target_page, staged.target_slot, keys, values
        )
    return after


def plan_moves(
    keep: torch.Tensor,
    counts: torch.Tensor,
    pages: torch.Tensor,
    owned: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
) -> CompactedPages:
    """Work out the moves of one compaction.

    Args:
        keep: bool [rows, max owned * block_size], the slots that stay; exactly
            ``counts[r] * block_size`` in row r, none behind its pages.
        counts: int64 [rows], pages that each row gets, each >= 1.
        pages: int64 [rows, max owned], ids of the pages that a row owns now, oldest
            first.
        owned: int64 [rows], how many entries of ``pages`` are used.
        positions: int32 [rows, max owned * block_size], RoPE positions.
        pool: int64 [sum of counts], distinct ids of the pages that stay.

    Cost: a few passes over ``keep``; O(kept tokens) moves. Runs on the device
        of its inputs; a handful of host syncs for sizes.
    """
    rows, max_owned = pages.shape
    block_size = keep.shape[1] // max_owned
    assert pool.numel() == int(counts.sum()), "pages must balance"

    place = torch.arange(max_owned, device=pages.device)
    in_pool = torch.isin(pages, pool) & (place < owned[:, None])
    newest_first = in_pool.flip(1).cumsum(1).flip(1)
    retained = in_pool & (newest_first <= counts[:, None])
    after = _pages_after(pages, retained, counts, pool)
    row, old_index = retained.nonzero(as_tuple=True)
    new_index = retained.cumsum(1)[row, old_index] - 1

    max_pages = after.shape[1]
    kept_slots = keep.view(rows, max_owned, block_size)
    old_positions = positions.view(rows, max_owned, block_size)
    stays = kept_slots.new_zeros(rows, max_pages, block_size)
    stays[row, new_index] = kept_slots[row, old_index]
    new_positions = positions.new_full((rows, max_pages, block_size), -1)
    new_positions[row, new_index] = torch.where(
        kept_slots[row, old_index], old_positions[row, old_index], -1
    )
    new_positions = new_positions.view(rows, -1)

    # Both lists are ordered by row and have the same length per row, so they pair up.
    movers = (kept_slots & ~retained[..., None]).view(rows, -1)
    used = torch.arange(max_pages, device=pages.device) < counts[:, None]
    free = (used[..., None] & ~stays).view(rows, -1)
    source_row, source_at = movers.nonzero(as_tuple=True)
    free_row, free_at = free.nonzero(as_tuple=True)
    assert torch.equal(source_row, free_row), "every moving token needs one free slot"
    new_positions[free_row, free_at] = positions[source_row, source_at]

    moves = Moves(
        source_page=pages[source_row, source_at // block_size],
        source_slot=source_at % block_size,
        target_page=after[free_row, free_at // block_size],
        target_slot=free_at % block_size,
    )
    own = free_at // block_size < retained.sum(1)[free_row]
    return CompactedPages(
        _where(moves, own), _where(moves, ~own), after, counts, new_positions
    )


def _pages_after(
    pages: torch.Tensor,
    retained: torch.Tensor,
    counts: torch.Tensor,
    pool: torch.Tensor,
) -> torch.Tensor:
    """int64 [rows, max(counts)]: retained pages, then pages taken from others.

    Pages of the pool that no row retained are assigned in pool order, row by row.
    """
    max_pages = int(counts.max())
    home = retained.sum(1)
    place = torch.arange(max_pages, device=pages.device)
    after = pages.new_zeros(pages.shape[0], max_pages)
    after[place < home[:, None]] = pages[retained]
    unclaimed = pool[~torch.isin(pool, pages[retained])]
    after[(place >= home[:, None]) & (place < counts[:, None])] = unclaimed
    return after


def _where(moves: Moves, chosen: torch.Tensor) -> Moves:
    return Moves(
        moves.source_page[chosen],
        moves.source_slot[chosen],
        moves.target_page[chosen],
        moves.target_slot[chosen],
    )
