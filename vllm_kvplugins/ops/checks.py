"""Argument checks of the page operations in torch.

The compiled ops check their arguments themselves, with the same messages in the same
order: a caller sees the same error whichever version runs.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.ops.layout import PageLayout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_heap(op: str, heap: torch.Tensor, layout: PageLayout) -> None:
    """Raise ValueError unless ``heap`` is pages of ``layout``, on its device."""
    if heap.dim() != 2:
        _fail(op, f"heap must have 2 dimension(s), got shape {list(heap.shape)}")
    if heap.dtype not in DTYPES:
        _fail(op, f"heap must be float32, float16 or bfloat16, got {heap.dtype}")
    if heap.stride(1) != 1 or (len(heap) > 1 and heap.stride(0) < heap.shape[1]):
        _fail(
            op,
            "heap must have contiguous pages that do not overlap, got strides "
            f"{list(heap.stride())} for pages of {heap.shape[1]} elements",
        )
    if heap.shape[1] != layout.page_elems:
        _fail(
            op,
            "heap pages must hold 2 * block_size * head_dim elements, got "
            f"{heap.shape[1]} instead of {layout.page_elems}",
        )
    _check_device(op, "k_offsets", layout.k_offsets, heap)


def check_rows(
    op: str, name: str, rows: torch.Tensor, heap: torch.Tensor, shape: tuple[int, int]
) -> None:
    """Raise ValueError unless ``rows`` has a shape and the heap's dtype and device."""
    _check_device(op, name, rows, heap)
    if rows.dtype != heap.dtype:
        _fail(op, f"{name} must be {heap.dtype}, got {rows.dtype}")
    if rows.shape != shape:
        _fail(op, f"{name} must have shape {list(shape)}, got {list(rows.shape)}")


def check_indices(
    op: str, name: str, indices: torch.Tensor, heap: torch.Tensor, dim: int = 1
) -> None:
    """Raise ValueError unless ``indices`` is int64, ``dim``-D, on the heap's device."""
    _check_device(op, name, indices, heap)
    if indices.dim() != dim:
        _fail(
            op, f"{name} must have {dim} dimension(s), got shape {list(indices.shape)}"
        )
    if indices.dtype != torch.int64:
        _fail(op, f"{name} must be int64, got {indices.dtype}")


def check_size(op: str, name: str, indices: torch.Tensor, size: int) -> None:
    """Raise ValueError unless ``indices`` has ``size`` entries."""
    if len(indices) != size:
        _fail(op, f"{name} must have {size} entries, got {len(indices)}")


def check_range(
    op: str, name: str, indices: torch.Tensor, what: str, limit: int
) -> None:
    """Raise ValueError at the first index outside ``[0, limit)``; a host sync."""
    flat = indices.reshape(-1)
    wrong = ((flat < 0) | (flat >= limit)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        owners = {"page": "the heap has", "row": "there are"}
        owner = owners.get(what, "pages have")
        _fail(
            op,
            f"{name}[{i}] is {what} {int(flat[i])}, but {owner} {what}s 0 to "
            f"{limit - 1}",
        )


def check_distinct(
    op: str, pages: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    """Raise ValueError if a destination occurs twice; a sort and a host sync."""
    places = pages * block_size + slots
    ordered, order = places.sort(stable=True)
    repeated = order[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        i = int(repeated.min())
        _fail(
            op,
            f"destination {i} (page {int(pages[i])}, slot {int(slots[i])}) repeats "
            "an earlier one; destinations must differ",
        )


def check_disjoint(
    op: str,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
    block_size: int,
) -> None:
    """Raise ValueError if a source is also a destination; a sort and a host sync."""
    shared = torch.isin(
        src_pages * block_size + src_slots, dst_pages * block_size + dst_slots
    ).nonzero()
    if len(shared):
        i = int(shared[0])
        _fail(
            op,
            f"source {i} (page {int(src_pages[i])}, slot {int(src_slots[i])}) is also "
            "a destination; move through a free page instead",
        )


def _check_device(op: str, name: str, tensor: torch.Tensor, heap: torch.Tensor) -> None:
    if tensor.device != heap.device:
        _fail(op, f"{name} must be on the device of the heap")


def _fail(op: str, problem: str) -> None:
    raise ValueError(f"kvp.{op}: {problem}")
