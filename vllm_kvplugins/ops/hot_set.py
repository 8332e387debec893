"""Copies of fetched tokens from host pages into hot slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.bulk import copy_pages
from vllm_kvplugins.ops.device import Reads, moved, staging
from vllm_kvplugins.ops.dispatch import call_compiled, scatter_tokens
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.host_fetch import fetch_tokens
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.quantized_rows import QuantizedRows


@dataclass(frozen=True, slots=True, eq=False)
class HostPages:
    """The host pages of some requests in one layer; all tensors are on the CPU.

    Args:
        pages: heap's dtype (uint8 for fp8) [host_pages, 2 (keys, values), page_tokens,
            head_dim], or uint8 [..., row bytes] if the rows are quantized.
        table: int64 [requests, heads, pages], pages of each request and head; token t
            is in slot ``t % page_tokens`` of entry ``t // page_tokens``.
        reads: pending GPU reads of the pages, if a GPU reads them itself. They must
            then be pinned, at least those of ``table``, and their tokens must not
            change until the reads are over. Not with quantized rows.
        quantized: the format of quantized rows.
    """

    pages: torch.Tensor
    table: torch.Tensor
    reads: Reads | None = None
    quantized: QuantizedRows | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HotSet:
    """The hot slots of one layer: their places in the heap, and the tokens they hold.

    Entry i of every tensor belongs to the request with slot index i.

    Attributes:
        token: int64 [entries, heads, width], number of the host token in each hot
            slot; updated by :func:`fill_hot`.
        page, slot: int64 [entries, heads, width], the hot slots in the heap.
        counts: int64 [entries], how many of the ``width`` tokens are in use.

    Where whole host pages are fetched, ``token`` has the entries of pages in
    ``HostPages.table``, or -1 for slots with other tokens. ``page`` and ``slot`` then
    have ``page_tokens`` slots for each, next to each other: they are ``page_tokens``
    times as wide.
    """

    token: torch.Tensor
    page: torch.Tensor
    slot: torch.Tensor
    counts: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tokens, pages, slots and counts."""
        return self.token, self.page, self.slot, self.counts


def fill_hot(
    kv: PagedKV,
    host: HostPages,
    wanted: torch.Tensor,
    slot_indices: torch.Tensor,
    hot: HotSet,
    whole_pages: bool = False,
) -> torch.Tensor:
    """Replace hot tokens that are not wanted by wanted tokens.

    Wanted tokens that are hot already keep their slots. The missing ones go to the
    first free slots, the best token first. If fewer tokens are wanted than there are
    slots, the other slots keep their tokens.

    Tokens reach a heap on a GPU in bulk (IceCache, section 4.3): they are gathered into
    one pinned buffer, copied at once and scattered to their slots. The host does not
    wait for that. With ``host.reads`` only their numbers are copied, and the GPU reads
    the tokens from the host pages itself. Quantized rows are dequantized into the
    buffer, or into the slots if the heap is on the CPU.

    Args:
        kv: the heap, written, on any device. All other tensors are on the CPU.
        host: the pages that tokens are copied from.
        wanted: int64 [requests, heads, n], host tokens, distinct, best first; -1 is
            ignored, and so are entries beyond a request's count.
        slot_indices: int64 [requests], the entry of ``hot`` of each request, distinct.
        hot: the hot slots; its tokens are updated.
        whole_pages: ``wanted`` has entries of the host table instead of tokens; see
            :class:`HotSet`. A page is copied at once.

    Returns:
        int64 [requests], tokens, or pages, copied, over all heads.

    Raises:
        ValueError: a shape or dtype does not fit, or a token, page or slot does not
            exist. Other requests of the call may have been served by then.

    Cost: copies of ``2 * head_dim`` elements per missing token, and O(width) per
    (request, head); both in parallel over (request, head).
    """
    heap, layout = kv.pages, kv.layout
    if heap.device.type == "cpu" and compiled_for(heap.device)[0]:
        return call_compiled(
            "fill_hot",
            heap,
            layout.k_offsets,
            layout.v_offsets,
            layout.block_size,
            host.pages,
            host.table,
            wanted,
            slot_indices,
            *hot.tensors,
            whole_pages,
        )
    moves, copied = swap_hot(host, wanted, slot_indices, hot, whole_pages)
    if moves.shape[1] == 0:
        return copied
    if whole_pages and host.reads is None and host.quantized is None:
        _copy_whole_pages(kv, host, moves)
        return copied
    rows, count = host.pages.view(-1, host.pages.shape[3]), moves.shape[1]
    if host.reads is not None:
        assert host.quantized is None, "a GPU reads no quantized rows"
        keys, values, to_page, to_slot = moved(moves, heap.device)
        fetch_tokens(kv, to_page, to_slot, rows, keys, values)
        host.reads.note()
        return copied
    dim = layout.head_dim
    staged = staging(2 * count, dim, dtype=heap.dtype, device=heap.device)
    if host.quantized is not None:
        host.quantized.dequantize_into(staged, rows, moves[:2].flatten())
    else:
        copy_pages(staged, None, rows, moves[:2].flatten())
    keys, values = staged.to(heap.device, non_blocking=True).split(count)
    to_page, to_slot = moved(moves[2:], heap.device)
    scatter_tokens(kv, to_page, to_slot, keys, values)
    return copied


def _copy_whole_pages(kv: PagedKV, host: HostPages, moves: torch.Tensor) -> None:
    """Copy host pages to a GPU in one transfer, each gathered at once.

    Args:
        moves: int64 [4, n], see :func:`swap_hot`.
    """
    heap, (_, _, size, dim) = kv.pages, host.pages.shape
    device, count = heap.device, moves.shape[1] // size
    staged = staging(count, 2 * size * dim, dtype=heap.dtype, device=device)
    copy_pages(staged, None, host.pages.flatten(1), moves[0, ::size] // (2 * size))
    pages = staged.to(device, non_blocking=True).view(count, 2, size, dim)
    to_page, to_slot = moved(moves[2:], device)
    keys, values = pages.transpose(0, 1).flatten(1, 2)
    scatter_tokens(kv, to_page, to_slot, keys, values)


def swap_hot(
    host: HostPages,
    wanted: torch.Tensor,
    slot_indices: torch.Tensor,
    hot: HotSet,
    whole_pages: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies that :func:`fill_hot` would make. Updates ``hot``, copies nothing.

    Args:
        host, wanted, slot_indices, hot, whole_pages: see :func:`fill_hot`.

    Returns:
        int64 [4, n]: rows of the host pages, seen as ``[host_pages * 2 * page_tokens,
        head_dim]``, that hold keys, rows that hold values, and the pages and slots
        where they go; int64 [requests], how many tokens, or pages, of each request.

    Raises:
        ValueError: an argument does not fit.
    """
    if compiled_for(host.pages.device)[0]:
        moves, copied = call_compiled(
            "swap_hot",
            host.pages,
            host.table,
            wanted,
            slot_indices,
            *hot.tensors,
            whole_pages,
        )
        return moves, copied
    copied, parts = torch.zeros_like(slot_indices), [slot_indices.new_empty(4, 0)]
    unit = host.pages.shape[2] if whole_pages else 1
    for request, slot_index in enumerate(slot_indices.tolist()):
        count = int(hot.counts[slot_index])
        slots = (slot_index, slice(None), slice(0, count * unit))
        moves = _swap_one(
            host.pages.shape[2],
            host.table[request],
            wanted[request, :, :count],
            hot.token[slot_index, :, :count],
            hot.page[slots].unflatten(1, (count, unit)),
            hot.slot[slots].unflatten(1, (count, unit)),
        )
        copied[request] = moves.shape[1] // unit
        parts.append(moves)
    return torch.cat(parts, 1), copied


def _swap_one(
    page_tokens: int,
    table: torch.Tensor,
    wanted: torch.Tensor,
    token: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    """The moves of one request, int64 [4, n]; updates ``token``.

    Args:
        page, slot: int64 [heads, count, tokens per entry of ``wanted`` and ``token``].
    """
    unit = page.shape[2]
    heads = wanted.shape[0]
    # The last entry stands for -1, which nobody wants.
    num_units = table.shape[1] * page_tokens // unit
    is_hot = torch.zeros(heads, num_units + 1, dtype=torch.bool)
    is_wanted = is_hot.clone()
    held = token.where(token >= 0, num_units)
    is_hot.scatter_(1, held, True)
    is_hot[:, -1] = True
    entry = wanted.where(wanted >= 0, num_units)
    is_wanted.scatter_(1, entry, True)
    is_wanted[:, -1] = False
    missing = ~is_hot.gather(1, entry)
    replaced = ~is_wanted.gather(1, held)
    replaced &= replaced.cumsum(1) <= missing.sum(1, keepdim=True)
    row, rank = missing.nonzero(as_tuple=True)
    out_row, out = replaced.nonzero(as_tuple=True)
    fetched = wanted[row, rank]
    first = (fetched * unit)[:, None] + torch.arange(unit)
    source = table[row[:, None], first // page_tokens] * 2 * page_tokens
    source += first % page_tokens
    token[out_row, out] = fetched
    places = page[out_row, out], slot[out_row, out]
    return torch.stack([source, source + page_tokens, *places]).flatten(1)
