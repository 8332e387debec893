"""The page operations that the rest of the package calls.

Each takes a :class:`~vllm_kvplugins.ops.layout.PagedKV`. The compiled version runs if
possible and the torch version otherwise; the results are equal bit for bit. The
environment variable ``KVP_OPS`` overrides this (``extension.py``).

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
from vllm_kvplugins.ops.layout import PagedKV, Plane


def gather_tokens(
    kv: PagedKV, pages: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the keys and values of single tokens. Does not modify the heap.

    Args:
        kv: the heap.
        pages: int64 [n], page of each token.
        slots: int64 [n], slot of each token in its page.

    Returns:
        Keys and values, each [n, head_dim] of the heap's dtype.

    Raises:
        ValueError: a shape, dtype, device, page or slot does not fit.

    Cost: O(n * head_dim); one kernel launch on CUDA.
    """
    op = "gather_tokens"
    compiled, checked = _versions(kv)
    if checked:
        checks.check_heap(op, kv)
        _check_tokens(op, kv, (pages, slots), ("pages", "slots"))
    if compiled:
        keys, values = call_compiled(
            op, kv.pages, pages.contiguous(), slots.contiguous(), *layout_args(kv)
        )
        return keys, values
    return torch_ops.gather_tokens(kv, pages, slots)


def scatter_tokens(
    kv: PagedKV,
    pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Write the keys and values of single tokens into the heap, in place.

    Args:
        kv: the heap.
        pages, slots: int64 [n], where each token goes; pairs must differ.
        keys, values: [n, head_dim] of the heap's dtype.

    Raises:
        ValueError: a shape, dtype, device, page or slot does not fit, or a
            destination repeats. The heap is then unchanged.

    Cost: O(n * head_dim), and a bit per slot of the page range written to.
    """
    op = "scatter_tokens"
    compiled, checked = _versions(kv)
    if checked:
        checks.check_heap(op, kv)
        _check_tokens(op, kv, (pages, slots), ("pages", "slots"))
        shape = (len(pages), kv.layout.head_dim)
        checks.check_rows(op, "keys", keys, kv.pages, shape)
        checks.check_rows(op, "values", values, kv.pages, shape)
        if _check_contents(kv):
            checks.check_distinct(op, pages, slots, kv.layout.block_size)
    if compiled:
        tensors = [t.contiguous() for t in (pages, slots, keys, values)]
        call_compiled(op, kv.pages, *tensors, *layout_args(kv))
        return
    torch_ops.scatter_tokens(kv, pages, slots, keys, values)


def move_tokens(
    kv: PagedKV,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """Copy tokens from slot to slot inside the heap, in place.

    No destination may be a source of the same call. The copies can then run in any
    order, and in parallel.

    Args:
        kv: the heap.
        src_pages, src_slots: int64 [n], the place of each token.
        dst_pages, dst_slots: int64 [n], where it goes; pairs must differ.

    Raises:
        ValueError: a shape, dtype, device, page or slot does not fit, a
            destination repeats, or a source is a destination. The heap is then
            unchanged.

    Cost: O(n * head_dim), and a bit per slot of the page range written to.
    """
    op = "move_tokens"
    sources, targets = (src_pages, src_slots), (dst_pages, dst_slots)
    compiled, checked = _versions(kv)
    if checked:
        checks.check_heap(op, kv)
        _check_tokens(op, kv, sources, ("src_pages", "src_slots"))
        checks.check_size(op, "dst_pages", dst_pages, len(src_pages))
        _check_tokens(op, kv, targets, ("dst_pages", "dst_slots"))
        if _check_contents(kv):
            checks.check_distinct(op, *targets, kv.layout.block_size)
            checks.check_disjoint(op, sources, targets, kv.layout.block_size)
    if compiled:
        places = [places.contiguous() for places in (*sources, *targets)]
        call_compiled(op, kv.pages, *places, *layout_args(kv))
        return
    torch_ops.move_tokens(kv, *sources, *targets)


def gather_keys(kv: PagedKV, page_table: torch.Tensor) -> torch.Tensor:
    """Unpack the keys of whole pages. Does not modify the heap.

    Args:
        kv: the heap.
        page_table: int64 [rows, pages_per_row]; a page may occur more than once.

    Returns:
        [rows, pages_per_row * block_size, head_dim] of the heap's dtype, a copy.

    Raises:
        ValueError: a shape, dtype, device or page does not fit.

    Cost: O(size of the result); one kernel launch on CUDA.
    """
    return _gather_plane(kv, kv.layout.keys, page_table)


def gather_values(kv: PagedKV, page_table: torch.Tensor) -> torch.Tensor:
    """Unpack the values of whole pages; see :func:`gather_keys`."""
    return _gather_plane(kv, kv.layout.values, page_table)


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


def _gather_plane(kv: PagedKV, plane: Plane, page_table: torch.Tensor) -> torch.Tensor:
    op, heap = "gather_pages", kv.pages
    compiled, checked = _versions(kv)
    if checked:
        checks.check_heap(op, kv)
        checks.check_indices(op, "page_table", page_table, heap, dim=2)
        if _check_contents(kv):
            checks.check_range(op, "page_table", page_table, "page", len(heap))
    if not compiled:
        return torch_ops.gather_plane(kv, plane, page_table)
    return call_compiled(
        op,
        heap,
        page_table.contiguous(),
        plane.offsets,
        kv.layout.block_size,
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


def layout_args(kv: PagedKV) -> tuple[Any, ...]:
    """The layout arguments of compiled ops."""
    layout = kv.layout
    arguments = layout.k_offsets, layout.v_offsets, layout.block_size
    keys, values = layout.keys, layout.values
    if not keys.row_stride or keys.row_stride != values.row_stride:
        return arguments
    return *arguments, keys.base, values.base, keys.row_stride


def _versions(kv: PagedKV) -> tuple[bool, bool]:
    """Whether the compiled version runs, and whether Python checks its arguments."""
    compiled = compiled_for(kv.pages.device)[0]
    return compiled, not compiled or check_forced(kv.pages.device)


def _check_contents(kv: PagedKV) -> bool:
    return kv.pages.device.type == "cpu" or check_forced(kv.pages.device)


def _check_tokens(
    op: str,
    kv: PagedKV,
    tokens: tuple[torch.Tensor, torch.Tensor],
    names: tuple[str, str],
) -> None:
    """Check the pages and slots of tokens."""
    pages, slots = tokens
    checks.check_indices(op, names[0], pages, kv.pages)
    checks.check_indices(op, names[1], slots, kv.pages)
    checks.check_size(op, names[1], slots, len(pages))
    if _check_contents(kv):
        checks.check_range(op, names[0], pages, "page", len(kv.pages))
        checks.check_range(op, names[1], slots, "slot", kv.layout.block_size)
