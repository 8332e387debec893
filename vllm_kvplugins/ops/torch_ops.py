"""The page operations in torch, for machines without the compiled extension.

Vectorised over tokens: each operation is a few indexing calls. They trust their
arguments (``checks.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PagedKV, PageLayout, Plane

# Largest number of elements whose offsets are expanded to int64 indices at a time
# (128 MiB), so that scratch memory does not grow with the call.
_MAX_INDICES = 1 << 24


def gather_tokens(
    kv: PagedKV, pages: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`vllm_kvplugins.ops.dispatch.gather_tokens`."""
    return (
        _load(kv, kv.layout.keys, pages, slots),
        _load(kv, kv.layout.values, pages, slots),
    )


def scatter_tokens(
    kv: PagedKV,
    pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """See :func:`vllm_kvplugins.ops.dispatch.scatter_tokens`."""
    _store(kv, kv.layout.keys, pages, slots, keys)
    _store(kv, kv.layout.values, pages, slots, values)


def move_tokens(
    kv: PagedKV,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """See :func:`vllm_kvplugins.ops.dispatch.move_tokens`."""
    for plane in (kv.layout.keys, kv.layout.values):
        rows = _load(kv, plane, src_pages, src_slots)
        _store(kv, plane, dst_pages, dst_slots, rows)


def gather_plane(kv: PagedKV, plane: Plane, page_table: torch.Tensor) -> torch.Tensor:
    """One plane of whole pages, in natural order.

    Args:
        kv: the heap.
        plane: ``kv.layout.keys`` or ``kv.layout.values``.
        page_table: int64 [rows, pages_per_row].

    Returns:
        [rows, pages_per_row * block_size, head_dim], contiguous.
    """
    rows, per_row = page_table.shape
    shape = (rows, per_row * kv.layout.block_size, kv.layout.head_dim)
    view = _affine_view(kv, plane)
    if view is not None:
        return view[page_table].reshape(shape).contiguous()
    pages = kv.pages.index_select(0, page_table.reshape(-1))
    return pages.index_select(1, plane.offsets).view(shape)


def _widened_plane(kv: PagedKV, plane: Plane, page_table: torch.Tensor) -> torch.Tensor:
    """The result of :func:`gather_plane` in float32; the heap may be fp8."""
    dtype = kv.pages.dtype
    if dtype.itemsize > 1:
        return gather_plane(kv, plane, page_table).float()
    elements = PagedKV(kv.pages.view(torch.uint8), kv.layout)  # torch indexes no fp8
    return gather_plane(elements, plane, page_table).view(dtype).float()


def _affine_view(kv: PagedKV, plane: Plane) -> torch.Tensor | None:
    """The plane of all pages as a view [num_pages, block_size, head_dim].

    None if strides cannot express the order of elements.
    """
    if plane.strides is None:
        return None
    heap = kv.pages
    return heap.as_strided(
        (len(heap), kv.layout.block_size, kv.layout.head_dim),
        (heap.stride(0), *plane.strides),
        heap.storage_offset() + plane.base,
    )


def _load(
    kv: PagedKV, plane: Plane, pages: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """[n, head_dim] rows of one plane."""
    view = _affine_view(kv, plane)
    if view is not None:
        return view[pages, slots]
    rows = kv.pages.new_empty(len(pages), kv.layout.head_dim)
    for part, columns in _indices(slots, plane, kv.layout):
        rows[part] = kv.pages[pages[part, None], columns]
    return rows


def _store(
    kv: PagedKV,
    plane: Plane,
    pages: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Write [n, head_dim] rows to one plane."""
    view = _affine_view(kv, plane)
    if view is not None:
        view[pages, slots] = rows
        return
    for part, columns in _indices(slots, plane, kv.layout):
        kv.pages[pages[part, None], columns] = rows[part]


def _indices(
    slots: torch.Tensor, plane: Plane, layout: PageLayout
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of tokens, each with its offsets [tokens, head_dim], int64."""
    table = plane.offsets.view(layout.block_size, layout.head_dim)
    step = max(1, _MAX_INDICES // layout.head_dim)
    for start in range(0, len(slots), step):
        part = slice(start, start + step)
        yield part, table[slots[part]].long()


def attend_mixed(
    queries: torch.Tensor,
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`vllm_kvplugins.ops.mixed_attention.attend_mixed`."""
    rows, num_q_heads, head_dim = queries.shape
    sequences, max_pages = page_table.shape
    if sequences == 0:
        return torch.empty_like(queries), queries.new_empty(
            rows, num_q_heads, dtype=torch.float32
        )
    heap, layout = kv.pages, kv.layout
    grouped = queries.float().view(sequences, -1, head_dim) * scale
    first_slots = torch.arange(max_pages, device=heap.device) * layout.block_size
    pages = page_table.where(first_slots < lengths[:, None], 0).long()
    if not len(heap):
        pages = pages[:, :0]
    keys = _widened_plane(kv, layout.keys, pages)
    values = _widened_plane(kv, layout.values, pages)
    attended = torch.arange(keys.shape[1], device=heap.device) < lengths[:, None]
    entry = torch.arange(int(coarse.counts.max()), device=heap.device)
    own = entry < coarse.counts[:, None]
    ids = (coarse.starts[:, None] + entry).where(own, 0)
    bias = coarse.bias[ids].masked_fill(~own, -torch.inf)
    keys = torch.cat([keys, coarse.keys[ids].float()], 1)
    values = torch.cat([values, coarse.values[ids].float()], 1)
    attended = torch.cat([attended, bias > -torch.inf], 1)
    # A weight of 0 is not enough: values that are not attended to may be NaN.
    values = values.masked_fill(~attended[..., None], 0)
    scores = grouped @ keys.transpose(1, 2)
    scores[..., scores.shape[2] - len(entry) :] += bias[:, None]
    scores.masked_fill_(~attended[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    attends = attended.any(1)[:, None, None]
    out = torch.where(attends, scores.softmax(-1).where(attends, 0) @ values, 0)
    return out.view(queries.shape).to(queries.dtype), lse.view(rows, num_q_heads)
