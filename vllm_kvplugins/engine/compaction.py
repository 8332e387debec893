"""Compaction: which token moves to which slot when a request shrinks.

One request, all layers and KV heads at once; every (layer, KV head) is a *row*.
Before, a row owns some pages. After, it owns ``counts[row]`` pages of the *pool*,
the pages of the blocks that stay. A row keeps those of its own pages that lie in
the pool, newest first; if it gets more, it takes pages that others gave up.

Tokens that are kept and already sit in a page that the row keeps do not move
(slot order means nothing to attention). The others fill the holes::

    kept tokens are upper case; the row keeps 2 of its pages in the pool
      before  [a B c d] [e f G H] | [i J k l] [m n o P] [Q R s T]
                 freed    freed      given up   kept      kept
      after                                   [B G H P] [Q R J T]

Two passes make this safe whatever the ownership. *Direct* moves go into holes of
pages that their row keeps: nobody reads those, so they run in any order. *Staged*
moves go into pages taken from others, which may hold tokens that have yet to
move: all of them are read into a buffer before the first is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.ops import dispatch as ops


@dataclass(frozen=True, slots=True)
class Moves:
    """Token copies; sources and targets as int64 (page, slot), one length."""

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
        direct: moves to run first, in any order.
        staged: moves to run next: read all, then write all.
        pages: int64 [rows, most_pages], page ids; row r uses ``counts[r]``.
        counts: int64 [rows], pages owned.
        positions: int32 [rows, most_pages * block_size], RoPE position of the
            token in each slot, -1 beyond ``counts[r] * block_size``.
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
        keep: bool [rows, most_owned * block_size], exactly
            ``counts[r] * block_size`` True in row r, none beyond its pages.
        counts: int64 [rows], pages each row gets, each >= 1.
        pages: int64 [rows, most_owned], ids of the pages that a row owns now,
            oldest first.
        owned: int64 [rows], how many entries of ``pages`` count.
        positions: int32 [rows, most_owned * block_size], RoPE positions.
        pool: int64 [sum of counts], distinct ids of the pages that stay.

    Cost: a few passes over ``keep``; O(kept tokens) moves. Runs on the device
        of its inputs; a handful of host syncs for sizes.
    """
    rows, most_owned = pages.shape
    block_size = keep.shape[1] // most_owned
    assert pool.numel() == int(counts.sum()), "pages must balance"

    place = torch.arange(most_owned, device=pages.device)
    in_pool = torch.isin(pages, pool) & (place < owned[:, None])
    newest_first = in_pool.flip(1).cumsum(1).flip(1)
    retained = in_pool & (newest_first <= counts[:, None])
    after = _pages_after(pages, retained, counts, pool)
    row, old_index = retained.nonzero(as_tuple=True)
    new_index = retained.cumsum(1)[row, old_index] - 1

    most = after.shape[1]
    kept_slots = keep.view(rows, most_owned, block_size)
    old_positions = positions.view(rows, most_owned, block_size)
    stays = kept_slots.new_zeros(rows, most, block_size)
    stays[row, new_index] = kept_slots[row, old_index]
    new_positions = positions.new_full((rows, most, block_size), -1)
    new_positions[row, new_index] = torch.where(
        kept_slots[row, old_index], old_positions[row, old_index], -1
    )
    new_positions = new_positions.view(rows, -1)

    # Both lists are ordered by row and balanced per row, so they pair up.
    movers = (kept_slots & ~retained[..., None]).view(rows, -1)
    used = torch.arange(most, device=pages.device) < counts[:, None]
    holes = (used[..., None] & ~stays).view(rows, -1)
    source_row, source_at = movers.nonzero(as_tuple=True)
    hole_row, hole_at = holes.nonzero(as_tuple=True)
    assert torch.equal(source_row, hole_row), "every mover has a place"
    new_positions[hole_row, hole_at] = positions[source_row, source_at]

    moves = Moves(
        source_page=pages[source_row, source_at // block_size],
        source_slot=source_at % block_size,
        target_page=after[hole_row, hole_at // block_size],
        target_slot=hole_at % block_size,
    )
    own = hole_at // block_size < retained.sum(1)[hole_row]
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

    What nobody retained is handed out in pool order, row by row.
    """
    most = int(counts.max())
    home = retained.sum(1)
    place = torch.arange(most, device=pages.device)
    after = pages.new_zeros(pages.shape[0], most)
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
