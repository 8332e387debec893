"""Argument checks of the torch and Triton versions of the ops.

The compiled ops check their arguments themselves (``csrc/binding.hpp``), with the same
messages: a caller sees the same error whichever version runs. Every check raises
ValueError with ``kvp.``, the name of the op and the problem.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from vllm_kvplugins.ops.layout import PagedKV

MAX_HEAD_DIM = 512  # kMaxHeadDim in csrc/include/kvp/elements.hpp
KEY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# uint8: elements of fp8, which moves copy bit by bit.
HEAP_DTYPES = (*KEY_DTYPES, torch.uint8)
# Low-rank factors, and queries and coarse entries of the mixed attention.
FACTOR_DTYPES = (torch.float32, torch.bfloat16)
# Pages that the mixed attention reads.
ATTENDED_DTYPES = (*FACTOR_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)

# What an index of each kind points into.
_OWNERS = {
    "page": "the heap has pages",
    "slot": "pages have slots",
    "row": "there are rows",
    "matrix": "there are",
}


def fail(op: str, problem: str) -> NoReturn:
    """Raise the ValueError of an op."""
    raise ValueError(f"kvp.{op}: {problem}")


# -- one tensor --------------------------------------------------------------------


def check_dim(op: str, name: str, tensor: torch.Tensor, dim: int) -> None:
    """Raise ValueError unless ``tensor`` has ``dim`` dimensions."""
    if tensor.dim() != dim:
        fail(op, f"{name} must have {dim} dimension(s), got shape {list(tensor.shape)}")


def check_dtype(op: str, name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Raise ValueError unless ``tensor`` has one of some dtypes."""
    if tensor.dtype not in dtypes:
        fail(op, f"{name} must be {names_of(dtypes)}, got {names_of([tensor.dtype])}")


def check_shape(
    op: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]
) -> None:
    """Raise ValueError unless ``tensor`` has a shape."""
    if tensor.shape != shape:
        fail(op, f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def check_size(op: str, name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise ValueError unless ``tensor`` has ``size`` entries."""
    if len(tensor) != size:
        fail(op, f"{name} must have {size} entries, got {len(tensor)}")


def check_device(
    op: str, name: str, tensor: torch.Tensor, like: torch.Tensor, owner: str
) -> None:
    """Raise ValueError unless ``tensor`` is on the device of ``like``, the owner's."""
    if tensor.device != like.device:
        fail(op, f"{name} must be on the device of {owner}")


def check_vector(
    op: str,
    name: str,
    vector: torch.Tensor,
    size: int | None = None,
    dtype: torch.dtype = torch.int64,
) -> None:
    """Raise ValueError unless ``vector`` is 1-D with a dtype and, if given, a size."""
    check_dim(op, name, vector, 1)
    check_dtype(op, name, vector, dtype)
    if size is not None:
        check_size(op, name, vector, size)


def check_range(
    op: str,
    name: str,
    indices: torch.Tensor,
    kind: str,
    limit: int,
    owner: str | None = None,
) -> None:
    """Raise ValueError at the first index outside ``[0, limit)``; a host sync.

    Args:
        kind: ``page``, ``slot``, ``row`` or ``matrix``, for the message.
        owner: what has ``limit`` of them, and the verb; None = the usual one.
    """
    flat = indices.reshape(-1)
    wrong = ((flat < 0) | (flat >= limit)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        fail(
            op,
            f"{name}[{i}] is {kind} {int(flat[i])}, but {owner or _OWNERS[kind]} 0 to "
            f"{limit - 1}",
        )


def first_repeat(indices: torch.Tensor) -> int | None:
    """Number of the first entry that repeats an earlier one; a sort, a host sync."""
    ordered, order = indices.sort(stable=True)
    repeated = order[1:][ordered[1:] == ordered[:-1]]
    return int(repeated.min()) if len(repeated) else None


def names_of(dtypes: list[torch.dtype] | tuple[torch.dtype, ...]) -> str:
    """The names of dtypes for a message: ``float32, float16 or bfloat16``."""
    *first, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(first)} or {last}" if first else last


# -- tensors of an op that takes a heap ----------------------------------------------


def check_heap(
    op: str, kv: PagedKV, dtypes: tuple[torch.dtype, ...] = HEAP_DTYPES
) -> None:
    """Raise ValueError unless the heap is pages of its layout, on one device."""
    heap, layout = kv.pages, kv.layout
    check_dim(op, "heap", heap, 2)
    check_dtype(op, "heap", heap, *dtypes)
    if heap.stride(1) != 1 or (len(heap) > 1 and heap.stride(0) < heap.shape[1]):
        fail(
            op,
            "heap must have contiguous pages that do not overlap, got strides "
            f"{list(heap.stride())} for pages of {heap.shape[1]} elements",
        )
    if heap.shape[1] != layout.page_elems:
        fail(
            op,
            "heap pages must hold 2 * block_size * head_dim elements, got "
            f"{heap.shape[1]} instead of {layout.page_elems}",
        )
    check_device(op, "k_offsets", layout.k_offsets, heap, "the heap")


def check_rows(
    op: str, name: str, rows: torch.Tensor, heap: torch.Tensor, shape: tuple[int, int]
) -> None:
    """Raise ValueError unless ``rows`` has a shape and the heap's dtype and device."""
    check_device(op, name, rows, heap, "the heap")
    check_dtype(op, name, rows, heap.dtype)
    check_shape(op, name, rows, shape)


def check_indices(
    op: str, name: str, indices: torch.Tensor, heap: torch.Tensor, dim: int = 1
) -> None:
    """Raise ValueError unless ``indices`` is int64, ``dim``-D, on the heap's device."""
    check_device(op, name, indices, heap, "the heap")
    check_dim(op, name, indices, dim)
    check_dtype(op, name, indices, torch.int64)


def check_distinct(
    op: str, pages: torch.Tensor, slots: torch.Tensor, block_size: int
) -> None:
    """Raise ValueError if a destination occurs twice; a sort and a host sync."""
    i = first_repeat(pages * block_size + slots)
    if i is not None:
        fail(
            op,
            f"destination {i} (page {int(pages[i])}, slot {int(slots[i])}) repeats "
            "an earlier one; destinations must differ",
        )


def check_disjoint(
    op: str,
    sources: tuple[torch.Tensor, torch.Tensor],
    destinations: tuple[torch.Tensor, torch.Tensor],
    block_size: int,
) -> None:
    """Raise ValueError if a source is also a destination; a sort and a host sync.

    Args:
        sources, destinations: pages and slots of each.
    """
    (src_pages, src_slots), (dst_pages, dst_slots) = sources, destinations
    shared = torch.isin(
        src_pages * block_size + src_slots, dst_pages * block_size + dst_slots
    ).nonzero()
    if len(shared):
        i = int(shared[0])
        fail(
            op,
            f"source {i} (page {int(src_pages[i])}, slot {int(src_slots[i])}) is also "
            "a destination; move through a free page instead",
        )
