"""The page operations in torch, for machines without the compiled extension.

Vectorised over tokens: each operation is a few indexing calls. They trust their
arguments (``checks.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_kvplugins.ops.layout import PageLayout, Plane

# Largest number of elements whose offsets are expanded to int64 indices at a time
# (128 MiB), so that scratch memory does not grow with the call.
_MAX_INDICES = 1 << 24


def gather_tokens(
    heap: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`vllm_kvplugins.ops.dispatch.gather_tokens`."""
    return (
        _load(heap, pages, slots, layout.keys, layout),
        _load(heap, pages, slots, layout.values, layout),
    )


def scatter_tokens(
    heap: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PageLayout,
) -> None:
    """See :func:`vllm_kvplugins.ops.dispatch.scatter_tokens`."""
    _store(heap, pages, slots, layout.keys, layout, keys)
    _store(heap, pages, slots, layout.values, layout, values)


def move_tokens(
    heap: torch.Tensor,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
    layout: PageLayout,
) -> None:
    """See :func:`vllm_kvplugins.ops.dispatch.move_tokens`."""
    for plane in (layout.keys, layout.values):
        rows = _load(heap, src_pages, src_slots, plane, layout)
        _store(heap, dst_pages, dst_slots, plane, layout, rows)


def gather_plane(
    heap: torch.Tensor, page_table: torch.Tensor, plane: Plane, layout: PageLayout
) -> torch.Tensor:
    """One plane of whole pages, in natural order.

    Args:
        heap: [num_pages, page_elems].
        page_table: int64 [rows, pages_per_row].
        plane: ``layout.keys`` or ``layout.values``.
        layout: order of elements in a page.

    Returns:
        [rows, pages_per_row * block_size, head_dim], contiguous.
    """
    rows, per_row = page_table.shape
    shape = (rows, per_row * layout.block_size, layout.head_dim)
    view = _affine_view(heap, plane, layout)
    if view is not None:
        return view[page_table].reshape(shape).contiguous()
    pages = heap.index_select(0, page_table.reshape(-1))
    return pages.index_select(1, plane.offsets).view(shape)


def _affine_view(
    heap: torch.Tensor, plane: Plane, layout: PageLayout
) -> torch.Tensor | None:
    """The plane of all pages as a view [num_pages, block_size, head_dim].

    None if strides cannot express the order of elements.
    """
    if plane.strides is None:
        return None
    return heap.as_strided(
        (len(heap), layout.block_size, layout.head_dim),
        (heap.stride(0), *plane.strides),
        heap.storage_offset() + plane.base,
    )


def _load(
    heap: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    plane: Plane,
    layout: PageLayout,
) -> torch.Tensor:
    """[n, head_dim] rows of one plane."""
    view = _affine_view(heap, plane, layout)
    if view is not None:
        return view[pages, slots]
    rows = heap.new_empty(len(pages), layout.head_dim)
    for part, columns in _indices(slots, plane, layout):
        rows[part] = heap[pages[part, None], columns]
    return rows


def _store(
    heap: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    plane: Plane,
    layout: PageLayout,
    rows: torch.Tensor,
) -> None:
    """Write [n, head_dim] rows to one plane."""
    view = _affine_view(heap, plane, layout)
    if view is not None:
        view[pages, slots] = rows
        return
    for part, columns in _indices(slots, plane, layout):
        heap[pages[part, None], columns] = rows[part]


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
    heap: torch.Tensor,
    layout: PageLayout,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: tuple[torch.Tensor, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`vllm_kvplugins.ops.mixed_attention.attend_mixed`."""
    rows, num_q_heads, dims = queries.shape
    sequences, most_pages = page_table.shape
    if sequences == 0:
        return torch.empty_like(queries), queries.new_empty(
            rows, num_q_heads, dtype=torch.float32
        )
    grouped = queries.float().view(sequences, -1, dims) * scale
    first = torch.arange(most_pages, device=heap.device) * layout.block_size
    pages = page_table.where(first < lengths[:, None], 0).long()
    if not len(heap):
        pages = pages[:, :0]
    keys = gather_plane(heap, pages, layout.keys, layout).float()
    values = gather_plane(heap, pages, layout.values, layout).float()
    there = torch.arange(keys.shape[1], device=heap.device) < lengths[:, None]
    more_keys, more_values, bias, starts, counts = coarse
    entry = torch.arange(int(counts.max()), device=heap.device)
    on = entry < counts[:, None]
    ids = (starts[:, None] + entry).where(on, 0)
    more_bias = bias[ids].masked_fill(~on, -torch.inf)
    keys = torch.cat([keys, more_keys[ids].float()], 1)
    values = torch.cat([values, more_values[ids].float()], 1)
    there = torch.cat([there, more_bias > -torch.inf], 1)
    # A weight of 0 is not enough: values that are not attended to may be NaN.
    values = values.masked_fill(~there[..., None], 0)
    scores = grouped @ keys.transpose(1, 2)
    scores[..., scores.shape[2] - len(entry) :] += more_bias[:, None]
    scores.masked_fill_(~there[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    some = there.any(1)[:, None, None]
    out = torch.where(some, scores.softmax(-1).where(some, 0) @ values, 0)
    return out.view(queries.shape).to(queries.dtype), lse.view(rows, num_q_heads)
