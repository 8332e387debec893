"""Host memory that a GPU reads directly, and tokens that it fetches from there."""

from __future__ import annotations

import torch

from vllm_kvplugins.ops import checks, torch_ops
from vllm_kvplugins.ops.dispatch import call_compiled, layout_args
from vllm_kvplugins.ops.extension import check_forced, compiled_for
from vllm_kvplugins.ops.layout import PagedKV

_OP = "fetch_tokens"


def direct_problem(device: torch.device) -> str | None:
    """Why a device cannot read host memory directly; None if it can."""
    if device.type != "cuda":
        return f"a {device.type} device cannot read host memory directly"
    compiled, reason = compiled_for(device)
    return None if compiled else reason


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Pin host memory and map it, so that GPUs can read it at the same address.

    Args:
        memory: one dimension, contiguous, on the CPU; whole pages of the operating
            system. None of it may be pinned already.
        device: the device whose context registers it; all devices can read it.

    Raises:
        ValueError: the driver or the operating system refuses; the message has the
            reason.

    Cost: allocates physical memory for pages that were never touched. Other threads
        continue.
    """
    call_compiled("pin_host", memory, device.index or 0)


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`. No GPU may still be reading the memory.

    Raises:
        ValueError: the memory is not pinned.
    """
    call_compiled("unpin_host", memory)


def fetch_tokens(
    kv: PagedKV,
    pages: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
) -> None:
    """Write keys and values of single tokens from host memory into the heap, in place.

    On CUDA the GPU reads the rows itself, in stream order: until then they must stay
    pinned (:func:`pin`) and unchanged.

    Args:
        kv: the heap.
        pages, slots: int64 [n], where each token goes; pairs must differ.
        rows: [num_rows, head_dim] of the heap's dtype, on the CPU.
        key_rows, value_rows: int64 [n], rows of keys and of values; like ``pages``
            and ``slots`` on the heap's device.

    Raises:
        ValueError: an argument does not fit; the heap is then unchanged. On CUDA an
            index out of range stops the kernel instead.
        RuntimeError: the device of the heap cannot read host memory.

    Cost: O(n * head_dim); one kernel launch on CUDA.
    """
    heap = kv.pages
    compiled = compiled_for(heap.device)[0]
    if not compiled and heap.device.type != "cpu":
        raise RuntimeError(f"kvp.{_OP}: {direct_problem(heap.device)}")
    if not compiled or check_forced(heap.device):
        _check(kv, pages, slots, rows, key_rows, value_rows)
    if compiled:
        ids = [each.contiguous() for each in (pages, slots, key_rows, value_rows)]
        places, sources = ids[:2], ids[2:]
        call_compiled(_OP, heap, *places, rows, *sources, *layout_args(kv))
        return
    torch_ops.scatter_tokens(kv, pages, slots, rows[key_rows], rows[value_rows])


def _check(
    kv: PagedKV,
    pages: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
    key_rows: torch.Tensor,
    value_rows: torch.Tensor,
) -> None:
    """Raise ValueError if an argument does not fit; on CUDA waits for the stream."""
    checks.check_heap(_OP, kv)
    heap, layout = kv.pages, kv.layout
    # Rows are on the host, whatever the device of the heap.
    on_host = torch.empty(0, dtype=heap.dtype)
    checks.check_rows(_OP, "rows", rows, on_host, (len(rows), layout.head_dim))
    for name, each, what, limit in (
        ("pages", pages, "page", len(heap)),
        ("slots", slots, "slot", layout.block_size),
        ("key_rows", key_rows, "row", len(rows)),
        ("value_rows", value_rows, "row", len(rows)),
    ):
        checks.check_indices(_OP, name, each, heap)
        checks.check_size(_OP, name, each, len(pages))
        checks.check_range(_OP, name, each, what, limit)
    checks.check_distinct(_OP, pages, slots, layout.block_size)
