"""The page operations that the rest of the package calls.

Each takes a heap, viewed as ``[num_pages, page_elems]``, and a layout. It runs the
compiled version if possible and the torch version otherwise; the results are equal
bit for bit. The environment variable ``KVP_OPS`` overrides this (``extension.py``).

The compiled version checks its arguments itself (``csrc/binding.hpp``); the torch
version relies on ``checks.py``. Contents of index tensors are checked on the CPU. On
CUDA that would wait for the stream: an index out of range stops the kernel with a CUDA
error, and duplicate destinations go undetected, unless ``KVP_OPS_CHECK=1`` is set.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvplugins.ops import checks, torch_ops
from vllm_kvplugins.ops.extension import (
    EXTENSION_PATH,
    check_forced,
    compiled_for,
    load_extension,
)
from vllm_kvplugins.ops.layout import PageLayout, Plane


def gather_tokens(
    heap: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the keys and values of single tokens. Does not modify the heap.

    Args:
        heap: float32, float16 or bfloat16 [num_pages, page_elems].
        pages: int64 [n], page of each token.
        slots: int64 [n], slot of each token in its page.
        layout: order of elements in a page, on the heap's device.

    Returns:
        Keys and values, each [n, head_dim] of the heap's dtype.

    Raises:
        ValueError: a shape, dtype, device, page or slot does not fit.

    Cost: O(n * head_dim); one kernel launch on CUDA.
    """
    op = "gather_tokens"
    compiled = _use_compiled(heap)
    if not compiled or check_forced(heap.device):
        checks.check_heap(op, heap, layout)
        _check_tokens(op, heap, pages, slots, layout, ("pages", "slots"))
    if compiled:
        places = pages.contiguous(), slots.contiguous()
        found: tuple[torch.Tensor, torch.Tensor] = call_compiled(
            op, heap, *places, *layout_args(layout)
        )
        return found
    return torch_ops.gather_tokens(heap, pages, slots, layout)


def scatter_tokens(
    heap: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Write the keys and values of single tokens into the heap, in place.

    Args:
        heap: float32, float16 or bfloat16 [num_pages, page_elems].
        pages, slots: int64 [n], where each token goes; pairs must differ.
        keys, values: [n, head_dim] of the heap's dtype.
        layout: order of elements in a page, on the heap's device.

    Raises:
        ValueError: a shape, dtype, device, page or slot does not fit, or a
            destination repeats. The heap is then unchanged.

    Cost: O(n * head_dim), and a bit per slot of the page range written to.
    """
    op = "scatter_tokens"
    compiled = _use_compiled(heap)
    if not compiled or check_forced(heap.device):
        checks.check_heap(op, heap, layout)
        _check_tokens(op, heap, pages, slots, layout, ("pages", "slots"))
        shape = (len(pages), layout.head_dim)
        checks.check_rows(op, "keys", keys, heap, shape)
        checks.check_rows(op, "values", values, heap, shape)
        if _check_contents(heap):
            checks.check_distinct(op, pages, slots, layout.block_size)
    if compiled:
        tensors = [t.contiguous() for t in (pages, slots, keys, values)]
        call_compiled(op, heap, *tensors, *layout_args(layout))
        return
    torch_ops.scatter_tokens(heap, pages, slots, keys, values, layout)


def move_tokens(
    heap: torch.Tensor,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Copy tokens from slot to slot inside the heap, in place.

    No destination may be a source of the same call. The copies can then run in any
    order, and in parallel.

    Args:
        heap: float32, float16 or bfloat16 [num_pages, page_elems].
        src_pages, src_slots: int64 [n], the place of each token.
        dst_pages, dst_slots: int64 [n], where it goes; pairs must differ.
        layout: order of elements in a page, on the heap's device.

    Raises:
        ValueError: a shape, dtype, device, page or slot does not fit, a
            destination repeats, or a source is a destination. The heap is then
            unchanged.

    Cost: O(n * head_dim), and a bit per slot of the page range written to.
    """
    op = "move_tokens"
    sources, targets = (src_pages, src_slots), (dst_pages, dst_slots)
    compiled = _use_compiled(heap)
    if not compiled or check_forced(heap.device):
        checks.check_heap(op, heap, layout)
        _check_tokens(op, heap, *sources, layout, ("src_pages", "src_slots"))
        checks.check_size(op, "dst_pages", dst_pages, len(src_pages))
        _check_tokens(op, heap, *targets, layout, ("dst_pages", "dst_slots"))
        if _check_contents(heap):
            checks.check_distinct(op, *targets, layout.block_size)
            checks.check_disjoint(op, sources, targets, layout.block_size)
    if compiled:
        places = [places.contiguous() for places in (*sources, *targets)]
        call_compiled(op, heap, *places, *layout_args(layout))
        return
    torch_ops.move_tokens(heap, *sources, *targets, layout)


def gather_keys(
    heap: torch.Tensor, page_table: torch.Tensor, layout: PageLayout
) -> torch.Tensor:
    """Unpack the keys of whole pages. Does not modify the heap.

    Args:
        heap: float32, float16 or bfloat16 [num_pages, page_elems].
        page_table: int64 [rows, pages_per_row]; a page may occur more than once.
        layout: order of elements in a page, on the heap's device.

    Returns:
        [rows, pages_per_row * block_size, head_dim] of the heap's dtype, a copy.

    Raises:
        ValueError: a shape, dtype, device or page does not fit.

    Cost: O(size of the result); one kernel launch on CUDA.
    """
    return _gather_plane(heap, page_table, layout.keys, layout)


def gather_values(
    heap: torch.Tensor, page_table: torch.Tensor, layout: PageLayout
) -> torch.Tensor:
    """Unpack the values of whole pages; see :func:`gather_keys`."""
    return _gather_plane(heap, page_table, layout.values, layout)


def backend_in_use(device: torch.device | str = "cpu") -> str:
    """The version that runs on a device: ``compiled``, or ``torch: <reason>``.

    Raises:
        ValueError, RuntimeError: ``KVP_OPS`` is invalid or cannot be satisfied.
    """
    compiled, reason = compiled_for(torch.device(device))
    return "compiled" if compiled else f"torch: {reason}"


def extension_info() -> dict[str, Any]:
    """Facts about the compiled extension, for ``kvplugins doctor``.

    Returns:
        ``path``, ``exists``, ``loaded``, ``reason`` (empty if loaded), ``cuda``
        (has CUDA kernels), ``build_type``, and, if loaded, the other facts that
        the library reports about its build (compiler, OpenMP, torch headers).
    """
    extension = load_extension()
    return {
        **extension.facts,
        "path": str(EXTENSION_PATH),
        "exists": EXTENSION_PATH.exists(),
        "loaded": not extension.reason,
        "reason": extension.reason,
        "cuda": extension.has_cuda,
        "build_type": extension.facts.get("build_type", ""),
    }


def _gather_plane(
    heap: torch.Tensor, page_table: torch.Tensor, plane: Plane, layout: PageLayout
) -> torch.Tensor:
    op = "gather_pages"
    compiled = _use_compiled(heap)
    if not compiled or check_forced(heap.device):
        checks.check_heap(op, heap, layout)
        checks.check_indices(op, "page_table", page_table, heap, dim=2)
        if _check_contents(heap):
            checks.check_range(op, "page_table", page_table, "page", len(heap))
    if not compiled:
        return torch_ops.gather_plane(heap, page_table, plane, layout)
    return call_compiled(
        op,
        heap,
        page_table.contiguous(),
        plane.offsets,
        layout.block_size,
        *((plane.base, plane.row_stride) if plane.row_stride else ()),
    )


def call_compiled(op: str, *arguments: Any) -> Any:
    """Run a compiled op; turn its errors about arguments into ValueError."""
    try:
        return getattr(torch.ops.kvp, op)(*arguments)
    except RuntimeError as error:
        if str(error).startswith("kvp."):
            raise ValueError(str(error)) from None
        raise


def layout_args(layout: PageLayout) -> tuple[Any, ...]:
    """The layout arguments of compiled ops."""
    arguments = layout.k_offsets, layout.v_offsets, layout.block_size
    keys, values = layout.keys, layout.values
    if not keys.row_stride or keys.row_stride != values.row_stride:
        return arguments
    return *arguments, keys.base, values.base, keys.row_stride


def _use_compiled(heap: torch.Tensor) -> bool:
    return compiled_for(heap.device)[0]


def _check_contents(heap: torch.Tensor) -> bool:
    return heap.device.type == "cpu" or check_forced(heap.device)


def _check_tokens(
    op: str,
    heap: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    layout: PageLayout,
    names: tuple[str, str],
) -> None:
    checks.check_indices(op, names[0], pages, heap)
    checks.check_indices(op, names[1], slots, heap)
    checks.check_size(op, names[1], slots, len(pages))
    if _check_contents(heap):
        checks.check_range(op, names[0], pages, "page", len(heap))
        checks.check_range(op, names[1], slots, "slot", layout.block_size)
