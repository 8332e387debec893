"""Makes fetched tokens resident: copies from host pages into hot slots."""

from __future__ import annotations

import torch

from vllm_kvplugins.ops.bulk import copy_pages
from vllm_kvplugins.ops.device import Reads, moved, staging
from vllm_kvplugins.ops.dispatch import call_compiled, scatter_tokens
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.host_fetch import fetch_tokens
from vllm_kvplugins.ops.layout import PageLayout


def fill_hot(
    heap: torch.Tensor,
    layout: PageLayout,
    host: torch.Tensor,
    table: torch.Tensor,
    wanted: torch.Tensor,
    slot_indices: torch.Tensor,
    token: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
    counts: torch.Tensor,
    reads: Reads | None = None,
) -> torch.Tensor:
    """Put wanted tokens in the place of hot ones that are not wanted.

    What is hot already stays where it is. The first slots are taken first, and the
    best of the tokens that are missing come first; if fewer are wanted than there
    are slots, what was there stays in the others.

    To a heap on a GPU tokens go in bulk (IceCache, section 4.3): gathered into one
    buffer of pinned memory, copied at once, and scattered to their slots there. The
    host does not wait for that. With ``reads`` only their numbers go there, and the GPU
    takes them out of ``host`` itself.

    Args:
        heap: [num_pages, page_elems], written; on any device, its layout as well.
            Everything else is on the CPU.
        host: heap's dtype [host_pages, 2 (keys, values), page_tokens, head_dim].
        table: int64 [requests, heads, pages], host pages of each request and head;
            token t lies in slot ``t % page_tokens`` of entry ``t // page_tokens``.
        wanted: int64 [requests, heads, n], host tokens, distinct, best first; -1
            asks for nothing. Entries beyond a request's count are ignored.
        seats: int64 [requests], rows of the four below, distinct.
        token: int64 [seats, heads, width], host tokens that are hot; updated.
        page, slot: int64 [seats, heads, width], where they are in the heap.
        counts: int64 [seats], how many of ``width`` slots there are.
        reads: of ``host``, which is pinned then, at least the pages of ``table``; what
            is read must not change until that is over.

    Returns:
        int64 [requests], tokens copied, over all heads.

    Raises:
        ValueError: something does not fit, or a token, page or slot does not exist.
            Other requests of the call may have been served by then.

    Cost: copies of ``2 * head_dim`` elements per missing token, and O(width) per
    (request, head); both in parallel over (request, head).
    """
    at_once = heap.device.type == "cpu" and compiled_for(heap.device)[0]
    if at_once:
        return call_compiled(
            "fill_hot",
            heap,
            layout.k_offsets,
            layout.v_offsets,
            layout.block_size,
            host,
            table,
            wanted,
            slot_indices,
            token,
            page,
            slot,
            counts,
        )
    moves, copied = swap_hot(
        host, table, wanted, slot_indices, token, page, slot, counts
    )
    count, dim = moves.shape[1], host.shape[3]
    if count == 0:
        return copied
    if reads is not None:
        keys, values, to_page, to_slot = moved(moves, heap.device)
        rows = host.view(-1, dim)
        fetch_tokens(heap, to_page, to_slot, rows, keys, values, layout)
        reads.note()
        return copied
    staged = staging(2 * count, dim, dtype=host.dtype, device=heap.device)
    copy_pages(staged, None, host.view(-1, dim), moves[:2].flatten())
    keys, values = staged.to(heap.device, non_blocking=True).split(count)
    to_page, to_slot = moved(moves[2:], heap.device)
    scatter_tokens(heap, to_page, to_slot, keys, values, layout)
    return copied


def swap_hot(
    host: torch.Tensor,
    table: torch.Tensor,
    wanted: torch.Tensor,
    slot_indices: torch.Tensor,
    token: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`fill_hot` would copy, copying nothing. Tokens count as hot after it.

    Args:
        all: as of ``fill_hot``.

    Returns:
        int64 [4, n]: rows of ``host`` as ``[host_pages * 2 * page_tokens, head_dim]``
        that hold keys, the same for values, and pages and slots where they go;
        int64 [requests], how many of them are of each.

    Raises:
        ValueError: something does not fit.
    """
    if compiled_for(host.device)[0]:
        moves, copied = call_compiled(
            "swap_hot", host, table, wanted, slot_indices, token, page, slot, counts
        )
        return moves, copied
    copied, parts = torch.zeros_like(slot_indices), [slot_indices.new_empty(4, 0)]
    for request, slot_index in enumerate(slot_indices.tolist()):
        at = (slot_index, slice(None), slice(0, int(counts[slot_index])))
        moves = _swap_one(
            host.shape[2],
            table[request],
            wanted[request, :, : int(counts[slot_index])],
            token[at],
            page[at],
            slot[at],
        )
        copied[request] = moves.shape[1]
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
    """One request, all of its heads."""
    heads = wanted.shape[0]
    # the last entry stands for "nothing"
    there = torch.zeros(heads, table.shape[1] * page_tokens + 1, dtype=torch.bool)
    asked = there.clone()
    there.scatter_(1, token, True)
    there[:, -1] = True
    asked.scatter_(1, wanted.where(wanted >= 0, asked.shape[1] - 1), True)
    missing = ~there.gather(1, wanted.where(wanted >= 0, there.shape[1] - 1))
    leaves = ~asked.gather(1, token)
    leaves &= leaves.cumsum(1) <= missing.sum(1, keepdim=True)
    row, rank = missing.nonzero(as_tuple=True)
    out_row, out = leaves.nonzero(as_tuple=True)
    fetched = wanted[row, rank]
    source = table[row, fetched // page_tokens] * 2 * page_tokens
    source += fetched % page_tokens
    token[out_row, out] = fetched
    places = page[out_row, out], slot[out_row, out]
    return torch.stack([source, source + page_tokens, *places])
