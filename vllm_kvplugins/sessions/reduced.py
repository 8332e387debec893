"""Sessions in host memory that store only what a later turn does not have.

::

    turn 1   reduced   tokens that turn 2 has dropped; for all others: slots of turn 2
    turn 2   reduced   tokens that turn 3 has dropped; for all others: slots of turn 3
    turn 3   whole     every slot of its pages

The newest turn is whole, because the next request most likely continues it. Files go
the other way (``deltas``): they are never rewritten, so the newest has what is new.

A compaction moves kept tokens to other slots and pages, but changes no key or value. So
the unit is one token of one KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from vllm_kvplugins.sessions.deltas import Lineage
from vllm_kvplugins.sessions.page_tokens import (
    PageFormat,
    bits,
    finish_pages,
    put_tokens,
    shared_slots,
    take_tokens,
)
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart

# A session that would free less than this share of its bytes stays whole.
_MIN_FREED = 0.1

_UNUSED = -1  # in ``ReducedPart.place``
_FIRST_OWN = -2  # the next own token has one less


@dataclass(frozen=True, slots=True)
class ReducedPart:
    """The tokens of one heap.

    Attributes:
        place: int32 [slots], in the order of stored pages. >= 0: slot of the base that
            has the token; -1: the slot is unused; -2 - i: token ``i`` of ``own``.
        own: [tokens, elements per slot], tokens that the base does not have.
        num_pages: of the retained region, and behind it.
    """

    place: torch.Tensor
    own: torch.Tensor
    num_pages: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """Memory of its tokens, and of the table that finds the others."""
        return int(self.own.nbytes + self.place.nbytes)


@dataclass(frozen=True, slots=True)
class ReducedSnapshot:
    """A snapshot without the tokens that another one has.

    Attributes:
        base: ID of the other session, which may be reduced, too.
        without_pages: the snapshot; its pages are empty.
        parts: what is left of its pages in each heap.
    """

    base: str
    without_pages: CacheSnapshot
    parts: tuple[ReducedPart, ...]

    @property
    def num_bytes(self) -> int:
        """Memory of tokens, tables and queries."""
        return self.without_pages.num_bytes + sum(part.num_bytes for part in self.parts)


def reduced(
    saved: CacheSnapshot,
    base_id: str,
    base: CacheSnapshot,
    lineage: Lineage,
    formats: Sequence[PageFormat],
) -> ReducedSnapshot | None:
    """A snapshot without the tokens that the next turn has.

    Args:
        base: the next turn.
        lineage: of the next turn, which continues ``saved``.
        formats: of the pages of each part.

    Returns:
        None: it would free little.

    Cost: sorts the tokens of ``base``, and copies those that only ``saved`` has.
    """
    assert lineage.file is saved.file, "it continues another session"
    parts = tuple(
        _reduced_part(saved, base, index, lineage.tokens, form)
        for index, form in enumerate(formats)
    )
    empty = tuple(
        replace(
            part,
            retained=torch.empty(0, part.retained.shape[1], dtype=part.retained.dtype),
            tail=torch.empty(0, part.tail.shape[1], dtype=part.tail.dtype),
            retained_ids=None,
        )
        for part in saved.parts
    )
    without_pages = replace(saved, parts=empty, blocks=None)
    small = ReducedSnapshot(base_id, without_pages, parts)
    return small if small.num_bytes <= (1 - _MIN_FREED) * saved.num_bytes else None


def _reduced_part(
    saved: CacheSnapshot,
    base: CacheSnapshot,
    index: int,
    tokens: int,
    form: PageFormat,
) -> ReducedPart:
    part = saved.parts[index]
    keys, others = (
        each.parts[index].slots.keys(each.compaction, each.tokens, form.block_size)
        for each in (saved, base)
    )
    is_there, slots = shared_slots(keys, others, tokens)
    place = torch.full(keys.shape, _UNUSED, dtype=torch.int32)
    place[is_there] = slots.int()
    own = ((keys >= 0) & ~is_there).nonzero().flatten()
    place[own] = _FIRST_OWN - torch.arange(len(own), dtype=torch.int32)
    pages = (part.retained, part.tail)
    num_pages = len(part.retained), len(part.tail)
    return ReducedPart(place, take_tokens(pages, own, form), num_pages)


def expanded(
    small: ReducedSnapshot,
    bases: Sequence[ReducedSnapshot | CacheSnapshot],
    formats: Sequence[PageFormat],
) -> CacheSnapshot:
    """The whole snapshot, with zeros in unused slots.

    Args:
        bases: its base, the base of that one, and so on; the last one is whole.
        formats: of the pages of each part.

    Cost: copies each token once.
    """
    parts = tuple(
        _whole_part(small, bases, index, form) for index, form in enumerate(formats)
    )
    return replace(small.without_pages, parts=parts)


def _whole_part(
    small: ReducedSnapshot,
    bases: Sequence[ReducedSnapshot | CacheSnapshot],
    index: int,
    form: PageFormat,
) -> HeapPart:
    part = small.parts[index]
    width = form.slots.numel()
    retained, tail = (
        torch.zeros(pages, width, dtype=part.own.dtype) for pages in part.num_pages
    )
    # Slots that are still empty, and where the next snapshot has their tokens.
    slots = (part.place != _UNUSED).nonzero().flatten()
    places = slots
    for each in (small, *bases):
        held = each.parts[index]
        if isinstance(held, HeapPart):
            take = partial(_tokens_at, held, places, form)
            put_tokens((retained, tail), slots, form, take)
            break
        place = held.place[places].long()
        is_own = place <= _FIRST_OWN
        take = partial(_rows, held.own, _FIRST_OWN - place[is_own])
        put_tokens((retained, tail), slots[is_own], form, take)
        slots, places = slots[~is_own], place[~is_own]
    finish_pages((retained, tail), form)
    empty = small.without_pages.parts[index]
    return replace(empty, retained=retained, tail=tail)


def _tokens_at(
    part: HeapPart, slots: torch.Tensor, form: PageFormat, some: slice
) -> torch.Tensor:
    """Tokens of a whole part, in any order."""
    ordered, back = slots[some].sort()
    tokens = take_tokens((part.retained, part.tail), ordered, form)
    out = torch.empty_like(tokens)
    bits(out)[back] = bits(tokens)
    return out


def _rows(tokens: torch.Tensor, which: torch.Tensor, some: slice) -> torch.Tensor:
    return bits(tokens)[which[some]].view(tokens.dtype)
