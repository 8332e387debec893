"""Makes fetched tokens resident: copies from host pages into hot slots."""

from __future__ import annotations

import torch

from vllm_kvplugins.ops.dispatch import call_compiled, scatter_tokens
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.layout import PageLayout


def fill_hot(
    heap: torch.Tensor,
    layout: PageLayout,
    host: torch.Tensor,
    table: torch.Tensor,
    wanted: torch.Tensor,
    seats: torch.Tensor,
    token: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """Put wanted tokens in the place of hot ones that are not wanted.

    What is hot already stays where it is. The first slots are taken first, and the
    best of the tokens that are missing come first; if fewer are wanted than there
    are slots, what was there stays in the others.

    Args:
        heap: [num_pages, page_elems], written.
        host: heap's dtype [host_pages, 2 (keys, values), page_tokens, head_dim].
        table: int64 [requests, heads, pages], host pages of each request and head;
            token t lies in slot ``t % page_tokens`` of entry ``t // page_tokens``.
        wanted: int64 [requests, heads, n], host tokens, distinct, best first; -1
            asks for nothing. Entries beyond a request's count are ignored.
        seats: int64 [requests], rows of the four below, distinct.
        token: int64 [seats, heads, width], host tokens that are hot; updated.
        page, slot: int64 [seats, heads, width], where they are in the heap.
        counts: int64 [seats], how many of ``width`` slots there are.

    Returns:
        int64 [requests], tokens copied, over all heads.

    Raises:
        ValueError: something does not fit, or a token, page or slot does not exist.
            Other requests of the call may have been served by then.

    Cost: copies of ``2 * head_dim`` elements per missing token, and O(width) per
    (request, head); both in parallel over (request, head).
    """
    if compiled_for(heap.device)[0]:
        return call_compiled(
            "fill_hot",
            heap,
            layout.k_offsets,
            layout.v_offsets,
            layout.block_size,
            host,
            table,
            wanted,
            seats,
            token,
            page,
            slot,
            counts,
        )
    copied = torch.zeros_like(seats)
    for request, seat in enumerate(seats.tolist()):
        at = (seat, slice(None), slice(0, int(counts[seat])))
        copied[request] = _fill_one(
            heap,
            layout,
            host,
            table[request],
            wanted[request, :, : int(counts[seat])],
            token[at],
            page[at],
            slot[at],
        )
    return copied


def _fill_one(
    heap: torch.Tensor,
    layout: PageLayout,
    host: torch.Tensor,
    table: torch.Tensor,
    wanted: torch.Tensor,
    token: torch.Tensor,
    page: torch.Tensor,
    slot: torch.Tensor,
) -> int:
    """One request, all of its heads."""
    heads, size = wanted.shape[0], host.shape[2]
    # the last entry stands for "nothing"
    there = torch.zeros(heads, table.shape[1] * size + 1, dtype=torch.bool)
    asked = there.clone()
    there.scatter_(1, token, True)
    there[:, -1] = True
    asked.scatter_(1, wanted.where(wanted >= 0, asked.shape[1] - 1), True)
    missing = ~there.gather(1, wanted.where(wanted >= 0, there.shape[1] - 1))
    leaves = ~asked.gather(1, token)
    leaves &= leaves.cumsum(1) <= missing.sum(1, keepdim=True)
    row, rank = missing.nonzero(as_tuple=True)
    if not row.numel():
        return 0
    out_row, out = leaves.nonzero(as_tuple=True)
    fetched = wanted[row, rank]
    source = table[row, fetched // size]
    keys, values = host[source, :, fetched % size].unbind(1)
    scatter_tokens(
        heap,
        page[out_row, out],
        slot[out_row, out],
        keys.contiguous(),
        values.contiguous(),
        layout,
    )
    token[out_row, out] = fetched
    return row.numel()
