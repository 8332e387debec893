"""Cuts and joins the KV heads of sessions that another tensor-parallel size wrote.

::

    written by 2 ranks             read by 1 rank            by 4 ranks
    r0of2  [ head 0 | head 1 ]     [ 0 | 1 | 2 | 3 ]         [ 0 ] [ 1 ] [ 2 ] [ 3 ]
    r1of2  [ head 2 | head 3 ]     reads both files          each reads one file

vLLM gives each rank a contiguous range of the KV heads of every layer, with the query
heads that share them. With more ranks than KV heads, each head is on several ranks.

Snapshots fit together only if a head's part is the same whichever heads lie next to it:
the policy scores heads separately, and every head keeps the same number of pages.
``Heads`` says for which sizes that holds; ``gather`` refuses everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from vllm_kvplugins.sessions.deltas import FileRecord
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart

# Axis of the heads in the tensors of a part, as [layers, heads, ...].
_PART_AXIS = 1
_QUERIES = "queries"


class Shard(NamedTuple):
    """One of the ranks among which an engine divides the heads of its model."""

    rank: int
    ranks: int

    def heads(self, total: int) -> range:
        """The KV heads on this rank.

        Args:
            total: KV heads of a layer, over all ranks; divides the number of ranks or
                is divided by it.
        """
        first = self.rank * total // self.ranks
        return range(first, first + max(total // self.ranks, 1))


@dataclass(frozen=True, slots=True)
class Heads:
    """The KV heads of a model, and the sizes whose sessions fit together.

    Attributes:
        totals: KV heads per layer, over all ranks, of each heap: that of the model,
            then that of a drafter.
        replicas_are_equal: whether ranks that have the same head keep the same tokens
            of it. False if the policy uses queries: each of these ranks has only some
            of the head's query heads.
    """

    totals: tuple[int, ...]
    replicas_are_equal: bool = False

    def fit(self, ranks: int) -> bool:
        """Whether sessions of an engine with this many ranks can be cut and joined.

        Draft layers follow a head of the model on their own rank, so replicas of a
        draft head differ.
        """
        if ranks < 1:
            return False
        model, *draft = self.totals
        is_replicated = self.replicas_are_equal and ranks % model == 0
        return (model % ranks == 0 or is_replicated) and all(
            total % ranks == 0 for total in draft
        )

    def copies(self, ranks: int) -> int:
        """On how many of these ranks each KV head of the model is."""
        return max(ranks // self.totals[0], 1)

    def sources(self, own: Shard, written_by: int) -> list[int]:
        """Ranks of an engine of another size whose parts have all heads of a rank.

        Args:
            written_by: number of ranks of that engine.
        """
        return sorted(
            {
                _first_holder(head, total, written_by)
                for total in self.totals
                for head in own.heads(total)
            }
        )


def _first_holder(head: int, total: int, ranks: int) -> int:
    """The first of the ranks that have a KV head."""
    return head * ranks // total


def gather(
    heads: Heads, own: Shard, written_by: int, read: Callable[[int], CacheSnapshot]
) -> CacheSnapshot:
    """A rank's part of a session that an engine of another size wrote.

    Args:
        heads: of the model; both sizes fit it.
        own: the rank that gets the part.
        written_by: number of ranks of the engine that wrote the session.
        read: reads the part of one of these ranks.

    Returns:
        A snapshot in memory of its own, as ``own`` would have saved it.

    Raises:
        ValueError: the parts do not belong together, are not those of such ranks, or
            heads keep different numbers of pages.

    Cost: copies each page once. Only one part at a time is in memory, next to the
        result.
    """
    assert heads.fit(own.ranks), "such an engine reads no other sizes"
    assert heads.fit(written_by), "not offered"
    gathered = _Gathered(heads, own)
    for rank in heads.sources(own, written_by):
        gathered.add(read(rank), Shard(rank, written_by))
    return gathered.snapshot()


@dataclass(frozen=True, slots=True)
class _PerHead:
    """A tensor with an axis of KV heads.

    Attributes:
        heap: index of the heap whose heads they are.
    """

    tensor: torch.Tensor
    axis: int
    heap: int

    def empty(self, num_heads: int) -> _PerHead:
        """The same for other heads, without contents."""
        shape = list(self.tensor.shape)
        shape[self.axis] = num_heads
        return replace(self, tensor=self.tensor.new_empty(shape))

    def some(self, first: int, count: int) -> torch.Tensor:
        return self.tensor.narrow(self.axis, first, count)


class _Gathered:
    """The part of one rank, which is filled from the parts of other ranks."""

    def __init__(self, heads: Heads, own: Shard) -> None:
        self._totals = heads.totals
        self._ranks = own.ranks
        self._own = [own.heads(total) for total in heads.totals]
        # The first part without tensors; its numbers must be those of all others.
        self._common: CacheSnapshot | None = None
        self._tensors: dict[str, _PerHead] = {}

    def add(self, saved: CacheSnapshot, source: Shard) -> None:
        """Copy the heads of which ``source`` is the first holder."""
        held = [source.heads(total) for total in self._totals]
        found = _per_head(saved, [len(each) for each in held])
        if max(source.ranks, self._ranks) > self._totals[0]:
            _refuse_queries(saved)
        common = _without_heads(saved)
        if self._common is None:
            self._common = common
            self._tensors = {
                name: each.empty(len(self._own[each.heap]))
                for name, each in found.items()
            }
        _check_equal(self._common, common)
        if found.keys() != self._tensors.keys():
            raise ValueError("its parts have different tensors")
        for name, each in found.items():
            own, total = self._own[each.heap], self._totals[each.heap]
            take = [
                head
                for head in own
                if _first_holder(head, total, source.ranks) == source.rank
            ]
            if take:
                _copy(
                    each.some(take[0] - held[each.heap].start, len(take)),
                    self._tensors[name].some(take[0] - own.start, len(take)),
                )

    def snapshot(self) -> CacheSnapshot:
        """The part, when all sources are added."""
        assert self._common is not None, "nothing was read"
        tensors = {name: each.tensor for name, each in self._tensors.items()}
        parts = tuple(
            replace(
                part,
                counts=tensors[f"{index}.counts"].flatten(),
                positions=tensors[f"{index}.positions"].flatten(0, 1),
                retained=tensors[f"{index}.retained"].flatten(0, 2),
                tail=tensors[f"{index}.tail"].flatten(0, 2),
            )
            for index, part in enumerate(self._common.parts)
        )
        queries = tensors.get(_QUERIES)
        observed = {
            layer: {
                name: tensor
                if not tensor.ndim
                else tensors[f"{layer} {name}"].flatten(0, 1)
                for name, tensor in packed.items()
            }
            for layer, packed in self._common.observed.items()
        }
        return replace(
            self._common,
            parts=parts,
            queries=None if queries is None else queries.flatten(2, 3),
            observed=observed,
        )


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise ValueError(f"its parts have tensors of other shapes: {source.shape}")
    target.copy_(source)


def _refuse_queries(saved: CacheSnapshot) -> None:
    """Refuse what replicas of a head have different parts of."""
    if saved.queries is not None or saved.observed:
        raise ValueError("ranks that share a head have stored different queries of it")


def _per_head(saved: CacheSnapshot, num_heads: Sequence[int]) -> dict[str, _PerHead]:
    """The tensors of a part with an axis of KV heads; views, except for few.

    Query heads are grouped by their KV head.

    Args:
        num_heads: KV heads of the part in each heap.
    """
    if len(saved.parts) != len(num_heads):
        raise ValueError(f"it has pages of {len(saved.parts)} heaps")
    blocks = len(saved.compaction.retained) if saved.compaction else 0
    found: dict[str, _PerHead] = {}
    for index, (part, heads) in enumerate(zip(saved.parts, num_heads, strict=True)):
        for name, tensor in _rows_by_head(part, heads, blocks).items():
            found[f"{index}.{name}"] = _PerHead(tensor, _PART_AXIS, index)
    if saved.queries is not None:
        found[_QUERIES] = _PerHead(_grouped(saved.queries, 2, num_heads[0]), 2, 0)
    for layer, packed in saved.observed.items():
        for name, tensor in packed.items():
            if tensor.ndim:
                grouped = _grouped(tensor, 0, num_heads[0])
                found[f"{layer} {name}"] = _PerHead(grouped, 0, 0)
    return found


def _rows_by_head(part: HeapPart, heads: int, blocks: int) -> dict[str, torch.Tensor]:
    """The tensors of a heap as [layers, heads, ...].

    Args:
        heads: KV heads per layer.
        blocks: of the retained region; every row must have so many pages in it.
    """
    rows = part.counts.numel()
    if not rows or rows % heads or part.tail.shape[0] % rows:
        raise ValueError(f"it has {rows} rows of pages for {heads} KV heads")
    if not bool((part.counts == blocks).all()):
        raise ValueError("its KV heads keep different numbers of pages")
    shape = rows // heads, heads
    if part.positions.shape[0] != rows or part.retained.shape[0] != rows * blocks:
        raise ValueError("its pages are not those of its rows")
    return {
        "counts": part.counts.view(shape),
        "positions": part.positions.view(*shape, part.positions.shape[1]),
        "retained": part.retained.view(*shape, blocks, part.retained.shape[1]),
        "tail": part.tail.view(*shape, part.tail.shape[0] // rows, part.tail.shape[1]),
    }


def _grouped(tensor: torch.Tensor, axis: int, heads: int) -> torch.Tensor:
    """A tensor with an axis of KV heads, and one of its entries per KV head."""
    if tensor.shape[axis] % heads:
        raise ValueError(f"{tensor.shape[axis]} query heads for {heads} KV heads")
    return tensor.unflatten(axis, (heads, tensor.shape[axis] // heads))


def _without_heads(saved: CacheSnapshot) -> CacheSnapshot:
    """A part without what heads have: only small tensors remain in memory."""
    none = torch.empty(0)
    parts = tuple(HeapPart(none, none, none, none, part.layout) for part in saved.parts)
    observed = {
        layer: {
            name: none[None] if tensor.ndim else tensor.clone()
            for name, tensor in packed.items()
        }
        for layer, packed in saved.observed.items()
    }
    return replace(
        saved, parts=parts, queries=None, observed=observed, file=FileRecord()
    )


def _check_equal(common: CacheSnapshot, other: CacheSnapshot) -> None:
    """Refuse parts of different sessions, formats or kernels."""

    def facts(each: CacheSnapshot) -> tuple[object, ...]:
        layouts = [part.layout for part in each.parts]
        observed = [
            (layer, name, tensor.tolist())
            for layer, packed in each.observed.items()
            for name, tensor in packed.items()
        ]
        form = each.tokens, each.compaction, each.dtype, each.queries_dtype
        return *form, layouts, observed

    if facts(common) != facts(other):
        raise ValueError("its parts are not of one session")
