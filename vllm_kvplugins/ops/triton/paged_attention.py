"""Attention of new tokens to page lists and coarse entries, for GPUs.

Correctness is tested in Triton's interpreter; it has never been timed.

The kernels are in ``paged_attention_kernels``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PageLayout, Plane
from vllm_kvplugins.ops.triton.paged_attention_kernels import attend, merge

_MOST_SPLITS = 16
_TILE_BYTES = 16 << 10


def attend_paged(
    queries: torch.Tensor,
    query_start: torch.Tensor | None,
    most_queries: int,
    heap: torch.Tensor,
    layout: PageLayout,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries | None = None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row's new tokens, which are its newest ones.

    The first of ``n`` new tokens of a row sees all but the last ``n - 1`` tokens of
    each of its sequences, and so on; all of them see all entries.

    Args:
        queries: float32, float16 or bfloat16 [tokens, num_q_heads, head_dim], heads and
            dimensions contiguous.
        query_start: int32 [rows + 1], first token of each row; None = one token each.
        most_queries: of any row.
        heap: float32, float16 or bfloat16 [num_pages, page_elems].
        layout: of pages whose planes have strides.
        page_table: int32 [rows * num_kv_heads, most_pages], a row contiguous.
        lengths: int32 [rows * num_kv_heads], tokens, the new ones included; 0 for a
            padded row.
        scale: of the scores.
        coarse: entries to attend to in addition to the pages; None: none.
        out: like ``queries``; None = a new tensor.
        splits: parts that sequences are cut into; None = as many as keep the GPU busy.

    Returns:
        ``out`` and the float32 [tokens, num_q_heads] log-sum-exp (natural logarithm);
        0 and -inf for who has nothing to attend to.

    Raises:
        ValueError: the layout's planes have no strides.

    Contents are not checked. Sums are of float32; scores and weights are multiplied in
    the heap's type, or in float32 where queries have another. Equal arguments give
    equal bits.

    Cost: one launch, two with several splits; no host sync.
    """
    if layout.keys.strides is None or layout.values.strides is None:
        raise ValueError("Triton's kernel needs pages of rows or columns")
    tokens, num_q_heads, head_dim = queries.shape
    rows = tokens if query_start is None else query_start.numel() - 1
    heads = len(page_table) // max(rows, 1)
    out = torch.empty_like(queries) if out is None else out
    on = {"dtype": torch.float32, "device": queries.device}
    lse = torch.empty(tokens, num_q_heads, **on)
    if not tokens or not rows:
        return out, lse
    group = num_q_heads // heads
    block_m = _tile_rows(group, most_queries)
    block_q = block_m // group
    blocks = rows if most_queries == 1 else tokens // block_q + rows
    types = [queries.dtype, heap.dtype] + ([coarse.keys.dtype] if coarse else [])
    tile = _tile_slots(head_dim, max(each.itemsize for each in types))
    room = page_table.shape[1] * layout.block_size
    if splits is None:
        splits = _splits(queries.device, blocks * heads, room, tile)
    partial = maxima = out
    if splits > 1:
        shape = (splits, tokens, num_q_heads)
        partial = torch.empty(*shape, head_dim, **on)
        maxima = torch.empty(*shape, 2, **on)
    same = queries.dtype == heap.dtype
    attend[(blocks, heads, splits)](
        queries,
        queries.stride(0),
        lengths if query_start is None else query_start,
        rows,
        heap,
        heap.stride(0),
        *_plane(layout.keys),
        *_plane(layout.values),
        page_table,
        page_table.stride(0),
        lengths,
        scale,
        *_entries(coarse, queries),
        out,
        out.stride(0),
        lse,
        partial,
        maxima,
        tokens,
        head_dim,
        NUM_KV_HEADS=heads,
        GROUP=group,
        BLOCK_SIZE=layout.block_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        TILE=tile,
        DIMS=max(triton.next_power_of_2(head_dim), 16),
        SPLITS=splits,
        ONE_EACH=most_queries == 1,
        HAS_ENTRIES=coarse is not None,
        TYPE=_DTYPES[heap.dtype] if same else tl.float32,
        ENTRY_TYPE=_entry_type(coarse, queries),
        num_warps=4 if block_m <= 64 else 8,
    )
    if splits > 1:
        merge[(tokens, num_q_heads)](
            partial,
            maxima,
            out,
            out.stride(0),
            lse,
            tokens,
            head_dim,
            NUM_Q_HEADS=num_q_heads,
            DIMS=triton.next_power_of_2(head_dim),
            SPLITS=splits,
            ALL_SPLITS=triton.next_power_of_2(splits),
        )
    return out, lse


_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def _tile_rows(group: int, most_queries: int) -> int:
    """Rows of a tile: 16 at least, for tensor cores, 64 where there are many tokens."""
    least = max(triton.next_power_of_2(group), 16)
    return int(least if most_queries == 1 else max(least, 64))


def _tile_slots(head_dim: int, itemsize: int) -> int:
    """Slots of a tile, of one page or several: 16 KiB of keys or less, as shared memory
    is small, and 16 at least, for tensor cores."""
    fitting = _TILE_BYTES // (triton.next_power_of_2(head_dim) * itemsize)
    return int(min(max(fitting, 16), 64))


def _splits(device: torch.device, programs: int, room: int, tile: int) -> int:
    """A power of two: the kernel is compiled for each number that occurs."""
    if device.type != "cuda":
        return 1
    units = torch.cuda.get_device_properties(device).multi_processor_count
    # a part of less than four tiles costs more in the merge than it saves
    most = min(2 * units // programs, room // (4 * tile), _MOST_SPLITS)
    return 1 << (int(max(most, 1)).bit_length() - 1)


def _plane(plane: Plane) -> tuple[int, int, int]:
    assert plane.strides is not None
    return plane.base, *plane.strides


def _entries(coarse: CoarseEntries | None, queries: torch.Tensor) -> tuple[Any, ...]:
    """Pointers to the entries; to anything where there are none."""
    if coarse is None:
        return (queries,) * 5
    return tuple(tensor.contiguous() for tensor in coarse.tensors)


def _entry_type(coarse: CoarseEntries | None, queries: torch.Tensor) -> Any:
    same = coarse is not None and coarse.keys.dtype == queries.dtype
    return _DTYPES[queries.dtype] if same else tl.float32
