"""Single tokens of stored pages: which token is in which slot, and their bytes.

A slot is a place for one token of one KV head. The slots of a part are counted through:
those of its retained region, row by row, then those of the pages behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.plan.residency_plan import Compaction

# Tokens copied at once, so that no second copy of a long session is made.
_PIECE_BYTES = 8 << 20
# Integers of the same size: torch indexes them, also where it does not index fp8.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Where the tokens of a stored page are.

    Attributes:
        layout: pages of the same dtype and layout have the same order of elements.
        slots: int64 [block_size, elements per slot], elements of a page that belong to
            each slot. Every element belongs to one.
    """

    layout: str
    slots: torch.Tensor

    @property
    def block_size(self) -> int:
        """Slots of a page."""
        return int(self.slots.shape[0])


@dataclass(frozen=True, slots=True)
class PartSlots:
    """The tokens in the slots of a part, without keys and values.

    Attributes:
        counts: int64 [rows], pages of the retained region.
        positions: int32 [rows, max pages * block_size], of the retained region; -1 in
            unused slots.
        tail_blocks: blocks behind the retained region.
    """

    counts: torch.Tensor
    positions: torch.Tensor
    tail_blocks: int

    def keys(
        self, compaction: Compaction | None, tokens: int, block_size: int
    ) -> torch.Tensor:
        """What each slot contains, in the order of stored pages.

        Args:
            tokens: of the session.

        Returns:
            int64 [slots], row and position in one number; -1: the slot is unused.
        """
        rows, per_row = torch.arange(len(self.counts)), self.positions.shape[1]
        page = torch.arange(per_row // block_size)
        kept = self.positions.long().view(len(rows), -1, block_size)
        retained = kept[page < self.counts[:, None]]
        first = compaction.retained.stop * block_size if compaction else 0
        behind = first + torch.arange(self.tail_blocks * block_size)
        behind = behind.masked_fill(behind >= tokens, -1)
        row = torch.cat(
            [
                rows.repeat_interleave(self.counts * block_size),
                rows.repeat_interleave(len(behind)),
            ]
        )
        position = torch.cat([retained.flatten(), behind.repeat(len(rows))])
        return torch.where(position < 0, -1, (row << 32) + position)


def take_tokens(
    pages: Sequence[torch.Tensor], slots: torch.Tensor, form: PageFormat
) -> torch.Tensor:
    """Tokens of stored pages.

    Args:
        pages: tensors [n, page_elems], whose slots are counted through.
        slots: int64 [m], in ascending order.

    Returns:
        [m, elements per slot].

    Cost: reads every page of these slots once.
    """
    size, width = form.slots.shape
    out = torch.empty(len(slots), width, dtype=pages[0].dtype)
    for source, first, some in _pieces(pages, slots, size, width):
        page, slot = (slots[some] - first) // size, slots[some] % size
        read, at = page.unique_consecutive(return_inverse=True)
        low, high = int(read[0]), int(read[-1]) + 1
        rows = bits(source)[low:high] if high - low == len(read) else bits(source)[read]
        tokens = _reordered(rows, form.slots.flatten()).view(-1, width)
        torch.index_select(tokens, 0, at * size + slot, out=bits(out)[some])
    return out


def put_tokens(
    pages: Sequence[torch.Tensor],
    slots: torch.Tensor,
    form: PageFormat,
    take: Callable[[slice], torch.Tensor],
) -> None:
    """Write tokens into pages that are not in their final order yet.

    ``finish_pages`` must follow when all tokens are there.

    Args:
        pages: as in ``take_tokens``.
        slots: int64 [m], in ascending order.
        take: returns the tokens of some of these slots: [n, elements per slot].

    Raises:
        ValueError: they have another dtype than the pages.
    """
    size, width = form.slots.shape
    for target, first, some in _pieces(pages, slots, size, width):
        tokens = take(some)
        if tokens.dtype != target.dtype:
            raise ValueError(f"its tokens are {tokens.dtype}, its pages {target.dtype}")
        bits(target).view(-1, width).index_copy_(0, slots[some] - first, bits(tokens))


def finish_pages(pages: Sequence[torch.Tensor], form: PageFormat) -> None:
    """Bring the elements of pages from the order of ``put_tokens`` into their own."""
    size, width = form.slots.shape
    element, order = form.slots.flatten(), torch.empty(size * width, dtype=torch.int64)
    order[element] = torch.arange(len(order))
    for each in pages:
        at_once = max(_PIECE_BYTES // max(each[:1].nbytes, 1), 1)
        for piece in bits(each).split(at_once):
            piece.copy_(_reordered(piece, order))


def shared_slots(
    keys: torch.Tensor, others: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of one session whose tokens another session also has.

    Args:
        keys, others: ``PartSlots.keys`` of both.
        tokens: number of first tokens whose keys and values are the same in both.

    Returns:
        bool [slots of the one], whether the other has it; and int64, for each of these,
        its slot there.

    Cost: sorts the slots of the other one.
    """
    by_key = others.argsort()
    ordered = others[by_key]
    at = torch.searchsorted(ordered, keys).clamp(max=max(len(ordered) - 1, 0))
    is_there = torch.zeros_like(keys, dtype=torch.bool)
    if len(ordered):
        position = keys & ((1 << 32) - 1)
        is_there = (ordered[at] == keys) & (keys >= 0) & (position < tokens)
    return is_there, by_key[at[is_there]]


def _pieces(
    pages: Sequence[torch.Tensor], slots: torch.Tensor, size: int, width: int
) -> Iterator[tuple[torch.Tensor, int, slice]]:
    """Pieces of ascending slots, each in one tensor.

    Yields:
        The tensor, its first slot, and the indices of the piece in ``slots``.
    """
    at_once = max(_PIECE_BYTES // (width * pages[0].element_size()), 1)
    first = 0
    for each in pages:
        stop = first + len(each) * size
        bounds = torch.searchsorted(slots, torch.tensor([first, stop]))
        for start in range(int(bounds[0]), int(bounds[1]), at_once):
            some = slice(start, min(start + at_once, int(bounds[1])))
            yield each, first, some
        first = stop


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers of the same size."""
    return tensor.view(_BITS[tensor.element_size()])


def _reordered(pages: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Pages with other elements at each place.

    Args:
        order: int64 [page_elems], for each place the element that it gets.
    """
    unit = _unit(order, pages.element_size())
    if unit > 1:  # fewer and larger elements
        wide = pages.view(_BITS[unit * pages.element_size()])
        order = order[::unit] // unit
        return wide.gather(1, order.expand(len(pages), -1)).view(pages.dtype)
    return pages.gather(1, order.expand(len(pages), -1))


def _unit(order: torch.Tensor, element_bytes: int) -> int:
    """How many elements always stay next to each other, up to 8 bytes."""
    unit = 8 // element_bytes
    while unit > 1:
        groups = order.view(-1, unit) if len(order) % unit == 0 else None
        if groups is not None:
            first = groups[:, :1]
            together = groups == first + torch.arange(unit)
            if bool(together.all()) and not bool((first % unit).any()):
                return unit
        unit //= 2
    return 1
