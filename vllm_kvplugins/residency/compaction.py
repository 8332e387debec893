"""Compaction: which token moves to which slot when a request shrinks.

One request, all layers and KV heads at once. Every (layer, KV head) is a *row*.
Before, row r has one candidate page per candidate block, in block order; the
last M of them are its *home pages* in the landing zone. After, it owns
``counts[r]`` pages: home pages, the newest first to stay, and if it gets more
than M, pages that other rows gave up.

Tokens that are kept and already sit in a page that the row keeps do not move
(slot order means nothing to attention). The others fill the holes::

    row keeps 2 of M=3 home pages, kept tokens are upper case
      candidates   [a B c d] [e f G H] | [i J k l] [m n o P] [Q R s T]
                                         donated    kept      kept
      after                                        [B G H P] [Q R J T]

Donors are moved before receivers write into what was donated, so no move ever
reads a slot that an earlier one wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Moves:
    """Token copies that may run in any order; sources and targets are disjoint.

    All four are int64 of the same length.
    """

    source_page: torch.Tensor
    source_slot: torch.Tensor
    target_page: torch.Tensor
    target_slot: torch.Tensor

    def __len__(self) -> int:
        return self.source_page.numel()


@dataclass(frozen=True, slots=True)
class CompactedPages:
    """Result of a compaction, for page tables and for ``explain``.

    Attributes:
        phases: moves to run one after the other.
        pages: int64 [rows, most_pages], page ids; row r uses ``counts[r]``.
        counts: int64 [rows], pages owned.
        positions: int32 [rows, most_pages * block_size], RoPE position of the
            token in each slot, -1 beyond ``counts[r] * block_size``.
    """

    phases: tuple[Moves, ...]
    pages: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor


def compact(
    keep: torch.Tensor,
    counts: torch.Tensor,
    candidate_pages: torch.Tensor,
    positions: torch.Tensor,
    zone_pages: int,
) -> CompactedPages:
    """Work out the moves of one compaction.

    Args:
        keep: bool [rows, slots], exactly ``counts[r] * block_size`` True in
            row r; slots = candidate pages * block_size.
        counts: int64 [rows], pages each row keeps; sum = rows * zone_pages.
        candidate_pages: int64 [rows, candidates], page ids in block order.
        positions: int32 [rows, slots], RoPE position per candidate slot.
        zone_pages: M, home pages per row.

    Cost: a few passes over ``keep``; O(kept tokens) moves. Runs on the device
        of its inputs; one host sync for the sizes.
    """
    rows, candidates = candidate_pages.shape
    block_size = keep.shape[1] // candidates
    assert int(counts.sum()) == rows * zone_pages, "pages must balance"

    pages, home = _pages_after(counts, candidate_pages, zone_pages)
    most = pages.shape[1]

    # Tokens that stay where they are, seen from the new page list: the first
    # home[r] pages of row r are its last home[r] candidate pages.
    kept_blocks = keep.view(rows, candidates, block_size)
    place = torch.arange(most, device=keep.device)
    old_index = (candidates - home[:, None] + place).clamp_(max=candidates - 1)
    is_home = place < home[:, None]
    stays = kept_blocks.gather(1, old_index[..., None].expand(-1, -1, block_size))
    stays = stays & is_home[..., None]

    # Everything else that is kept moves into the holes of the owned pages.
    page_index = torch.arange(candidates, device=keep.device)
    away = page_index < candidates - home[:, None]
    source = (kept_blocks & away[..., None]).view(rows, -1)
    owned = place < counts[:, None]
    holes = (owned[..., None] & ~stays).view(rows, -1)

    source_row, source_at = source.nonzero(as_tuple=True)
    hole_row, hole_at = holes.nonzero(as_tuple=True)
    assert source_row.numel() == hole_row.numel(), "every mover has a place"
    # Both lists are ordered by row and balanced per row, so they pair up.

    old_positions = positions.view(rows, candidates, block_size).gather(
        1, old_index[..., None].expand(-1, -1, block_size)
    )
    after = torch.where(stays, old_positions, -1).view(rows, -1)
    after[hole_row, hole_at] = positions[source_row, source_at]

    moves = Moves(
        source_page=candidate_pages[source_row, source_at // block_size],
        source_slot=source_at % block_size,
        target_page=pages[hole_row, hole_at // block_size],
        target_slot=hole_at % block_size,
    )
    receives = counts[source_row] > zone_pages
    phases = tuple(p for p in (_where(moves, ~receives), _where(moves, receives)) if p)
    return CompactedPages(phases, pages, counts, after)


def _pages_after(
    counts: torch.Tensor, candidate_pages: torch.Tensor, zone_pages: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page list of every row, and how many of its entries are home pages.

    A donor keeps its newest home pages, where the window already lies. Donated
    pages are handed out in row order.

    Returns:
        int64 [rows, max(counts)] page ids (0 where unused), int64 [rows].
    """
    candidates = candidate_pages.shape[1]
    most = int(counts.max())
    home = counts.clamp(max=zone_pages)
    place = torch.arange(most, device=counts.device)
    index = (candidates - home[:, None] + place).clamp_(max=candidates - 1)
    pages = candidate_pages.gather(1, index)
    pages.masked_fill_(place >= home[:, None], 0)
    zone = candidate_pages[:, candidates - zone_pages :]
    zone_place = torch.arange(zone_pages, device=counts.device)
    donated = zone[zone_place < (zone_pages - home)[:, None]]
    wants = (place >= home[:, None]) & (place < counts[:, None])
    pages[wants] = donated
    return pages, home


def _where(moves: Moves, chosen: torch.Tensor) -> Moves:
    return Moves(
        moves.source_page[chosen],
        moves.source_slot[chosen],
        moves.target_page[chosen],
        moves.target_slot[chosen],
    )
