"""Rebuild the resident cache of a session as it was before its last compaction.

A policy that keeps all tokens on the host has lost nothing by then: each token is in
the snapshot, or in the detached state of a step extension::

    session    [ sinks | hot slots | window | tail          ]   host: all between
                                                                sinks and window
    rewound    [ sinks | newest    | window | tail ]            host: the first of them

Which tokens are resident follows from token counts. Nothing is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import Resident
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.engine.step_extension import StepExtension
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.stored_pages import StoredPages

# Tokens of one layer that are copied at once.
_PIECE_TOKENS = 16384


class SavedTokens:
    """Keys and values of a session by position, wherever it has them.

    Args:
        stored: the format of the snapshot's pages.
    """

    def __init__(
        self, runtime: PolicyRuntime, stored: StoredPages, saved: CacheSnapshot
    ) -> None:
        assert runtime.heap is not None, "not attached"
        self._runtime, self._heap = runtime, runtime.heap
        self._stored, self._saved = stored, saved
        # Of the model's layers; the layers of a drafter do not go back.
        self._part = saved.parts[0]
        counts = self._part.counts.cpu()
        self._first_page = counts.cumsum(0) - counts
        self._positions = self._part.positions.cpu().long()
        compaction = saved.compaction
        self._tail_block = compaction.retained.stop if compaction else 0

    def read(
        self, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [num_kv_heads, n, head_dim] in host memory, elements of the cache.

        Args:
            positions: int64 [n], in host memory, of tokens that the session has.
        """
        heads, layout = self._heap.num_kv_heads, self._heap.layout
        keys, values = (
            torch.empty(
                heads,
                len(positions),
                layout.head_dim,
                dtype=self._heap.pages.dtype,
                device="cpu",
            )
            for _ in range(2)
        )
        in_tail = positions >= self._tail_block * layout.block_size
        found = torch.zeros_like(in_tail)
        for extension, state in self._states():
            held = extension.held_positions(state, layer)
            here = (positions >= held.start) & (positions < held.stop) & ~found
            if bool(here.any()):
                rows = extension.read_held(state, layer, positions[here])
                keys[:, here], values[:, here] = rows
            found |= here
        for here, read in (
            (in_tail & ~found, self._read_tail),
            (~in_tail & ~found, self._read_region),
        ):
            if bool(here.any()):
                keys[:, here], values[:, here] = read(layer, positions[here])
        return keys, values

    def _states(self) -> Iterator[tuple[StepExtension, Any]]:
        states = self._saved.extension_states
        if states:
            pairs = zip(self._runtime.extensions, states, strict=True)
            yield from (pair for pair in pairs if pair[1] is not None)

    def _rows(self, layer: int) -> torch.Tensor:
        """int64 [num_kv_heads, 1]: the layer's rows."""
        heads = self._heap.num_kv_heads
        return torch.arange(layer * heads, (layer + 1) * heads)[:, None]

    def _read_tail(
        self, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._heap.layout.block_size
        blocks = len(self._part.tail) // self._heap.rows
        page = self._rows(layer) * blocks + positions // size - self._tail_block
        return self._stored.read_tokens(self._part.tail, page, positions % size)

    def _read_region(
        self, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, size = self._rows(layer), self._heap.layout.block_size
        here = self._positions[rows[:, 0]]
        slots = torch.arange(here.shape[1]).expand_as(here)
        # Unused slots, whose position is -1, write behind the last position.
        end = self._tail_block * size
        slot_of = torch.full((len(here), end + 1), -1)
        slot_of.scatter_(1, here.where(here >= 0, end), slots)
        slot = slot_of[:, positions]
        assert bool((slot >= 0).all()), "a token is neither resident nor on the host"
        page = self._first_page[rows] + slot // size
        return self._stored.read_tokens(self._part.retained, page, slot % size)


def rebuild(
    runtime: PolicyRuntime,
    source: SavedTokens,
    compaction: Compaction,
    tokens: int,
    blocks: torch.Tensor,
) -> Resident:
    """Fill blocks of the pool as if the session had ended after ``tokens`` tokens.

    Args:
        compaction: the last one of the rebuilt cache, from token 0 on.
        blocks: int64, physical IDs, from the first resident block.

    Returns:
        The request's retained region, with a slot index.

    Cost: one read of every resident token. On a GPU, one copy to it per layer.
    """
    regions = runtime.regions[0]
    heap, tables = regions.heap, regions.tables
    retrieval = runtime.policy.retrieval
    assert retrieval is not None, "only retrieval keeps all tokens"
    size, in_region = heap.layout.block_size, len(compaction.retained)
    counts = _page_counts(runtime, heap, compaction)
    pool = heap.page_ids(blocks[:in_region]).reshape(-1)
    place = torch.arange(int(counts.max()))
    pages = torch.zeros(heap.rows, len(place), dtype=torch.int64)
    pages[place < counts[:, None]] = pool.cpu()
    tail = heap.page_ids(blocks[in_region:]).cpu()
    positions = torch.full((heap.rows, len(place) * size), -1, dtype=torch.int32)
    stop = compaction.retained.stop * size
    heap.clear(blocks[-1:])  # it may stay partly empty
    for layer in range(heap.num_layers):
        rows = slice(layer * heap.num_kv_heads, (layer + 1) * heap.num_kv_heads)
        (count,) = counts[rows].unique().tolist()
        kept = retrieval.kept_positions(stop, count * size)
        positions[rows, : count * size] = kept.int()
        _write(heap, source, layer, kept, pages[rows])
        _write(heap, source, layer, torch.arange(stop, tokens), tail[rows])
    device = heap.pages.device
    slot_index = tables.assign(
        pages.to(device), counts.to(device), compaction.retained.stop
    )
    return Resident(
        slot_index,
        compaction.at_tokens,
        compaction.retained.stop,
        positions.to(device),
    )


def _page_counts(
    runtime: PolicyRuntime, heap: Heap, compaction: Compaction
) -> torch.Tensor:
    """int64 [rows]: pages that the policy gives each row of the retained region."""
    shape, stop = (heap.num_layers, heap.num_kv_heads), compaction.retained.stop
    counts = runtime.policy.page_allocator().allocate(
        torch.zeros(*shape, stop * heap.layout.block_size),
        len(compaction.retained),
        heap.layout.block_size,
        torch.full(shape, stop),
    )
    return counts.reshape(-1).cpu()


def _write(
    heap: Heap,
    source: SavedTokens,
    layer: int,
    positions: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Write tokens of a layer into the slots of some pages, in order.

    Args:
        positions: int64 [n].
        pages: int64 [num_kv_heads, at least n / block_size].
    """
    size, device = heap.layout.block_size, heap.pages.device
    for first in range(0, len(positions), _PIECE_TOKENS):
        part = positions[first : first + _PIECE_TOKENS]
        at = torch.arange(first, first + len(part))
        page = pages[:, at // size].flatten().to(device)
        slot = (at % size).repeat(len(pages)).to(device)
        keys, values = source.read(layer, part)
        keys, values = keys.flatten(0, 1).to(device), values.flatten(0, 1).to(device)
        ops.scatter_tokens(heap.kv, page, slot, keys, values)
