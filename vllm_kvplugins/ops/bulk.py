"""Copies of many whole pages at once, for example to a staging buffer.

Compiled if built, in torch otherwise; ``KVP_OPS`` overrides this (``extension.py``).
Checks on CUDA work as ``dispatch.py`` describes.
"""

from __future__ import annotations

import math

import torch

from vllm_kvplugins.ops import checks
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import check_forced, compiled_for

_OP = "copy_pages"
# Torch copies integers of the same size, because some dtypes lack operations.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_pages(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
) -> None:
    """Copy whole pages bit for bit: listed target page i = listed source page i.

    Pass no ``target_ids`` to gather into a dense buffer, no ``source_ids`` to scatter
    from one. The shapes of pages may differ, but not their sizes.

    Args:
        target: [num_pages, ...], pages contiguous and disjoint; any dtype of 1, 2, 4
            or 8 bytes. Changed in place.
        target_ids: int64 [n], distinct; None = the first n pages, in order.
        source: [num_source_pages, ...] of the same dtype, on the same device. Its
            memory range must not overlap that of ``target``.
        source_ids: int64 [n], may repeat; None = the first n pages, in order.

    Without ids, n is the number of source pages.

    Raises:
        ValueError: a shape, dtype, device or page does not fit, a target page
            repeats, or target and source share memory. Nothing is then changed.

    Cost: reads and writes each byte once, bypassing the caches from 8 MiB on, and a
        bit per page of the range of ``target_ids``. One kernel launch on CUDA. In
        torch, one more copy of the pages if both sides have ids.
    """
    compiled = compiled_for(target.device)[0]
    forced = check_forced(target.device)
    if not compiled or forced:
        n = _check(target, target_ids, source, source_ids)
        if target.device.type == "cpu" or forced:
            _check_ids("target", target_ids, len(target))
            _check_ids("source", source_ids, len(source))
            _check_distinct(target_ids)
    if not compiled:
        _in_torch(target, target_ids, source, source_ids, n)
        return
    if target_ids is not None:
        target_ids = target_ids.contiguous()
    if source_ids is not None:
        source_ids = source_ids.contiguous()
    call_compiled(_OP, target, target_ids, source, source_ids)


def _in_torch(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    n: int,
) -> None:
    into, out_of = _rows(target), _rows(source)
    if target_ids is None and source_ids is None:
        into[:n] = out_of[:n]
    elif target_ids is None:
        torch.index_select(out_of, 0, source_ids, out=into[:n])
    elif source_ids is None:
        into.index_copy_(0, target_ids, out_of[:n])
    else:
        into.index_copy_(0, target_ids, out_of.index_select(0, source_ids))


def _rows(pages: torch.Tensor) -> torch.Tensor:
    """[num_pages, page_elems] integers over the same memory."""
    rows = pages.view(len(pages), math.prod(pages.shape[1:]))
    return rows.view(_BITS[pages.dtype.itemsize])


def _check(
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
) -> int:
    """Raise ValueError if an argument does not fit, except for ids out of range.

    Returns n.
    """
    sizes = [_page_bytes("target", target), _page_bytes("source", source)]
    checks.check_device(_OP, "source", source, target, "target")
    checks.check_dtype(_OP, "source", source, target.dtype)
    if sizes[0] != sizes[1]:
        checks.fail(
            _OP,
            "pages of source must have the size of target's, got "
            f"{sizes[1]} and {sizes[0]} bytes",
        )
    _check_apart(target, source, sizes[0])
    for name, ids in (("target_ids", target_ids), ("source_ids", source_ids)):
        if ids is not None:
            checks.check_device(_OP, name, ids, target, "target")
            checks.check_vector(_OP, name, ids)
    if target_ids is not None:
        n = len(target_ids)
    else:
        n = len(source if source_ids is None else source_ids)
    if source_ids is not None:
        checks.check_size(_OP, "source_ids", source_ids, n)
    sides = ("target", target, target_ids), ("source", source, source_ids)
    for name, pages, ids in sides:
        if ids is None and len(pages) < n:
            checks.fail(
                _OP, f"{name} has {len(pages)} pages, but {n} are copied in order"
            )
    return n


def _page_bytes(name: str, pages: torch.Tensor) -> int:
    """Size of a page; checks that pages are contiguous and disjoint."""
    if pages.dim() < 1:
        checks.fail(_OP, f"{name} must be [num_pages, ...], got a scalar")
    elems, contiguous = 1, True
    for size, stride in zip(pages.shape[:0:-1], pages.stride()[:0:-1], strict=True):
        # The stride of a dimension of size 1 means nothing.
        contiguous &= size == 1 or stride == elems
        elems *= size
    overlap = len(pages) > 1 and pages.stride(0) < elems
    if elems > 0 and (not contiguous or overlap):
        checks.fail(
            _OP,
            f"{name} must have contiguous pages that do not overlap, got shape "
            f"{list(pages.shape)} with strides {list(pages.stride())}",
        )
    if pages.dtype.itemsize not in _BITS:
        got = checks.names_of([pages.dtype])
        checks.fail(_OP, f"{name} must have elements of 1, 2, 4 or 8 bytes, got {got}")
    return int(elems * pages.dtype.itemsize)


def _check_apart(target: torch.Tensor, source: torch.Tensor, page_bytes: int) -> None:
    if page_bytes == 0 or len(target) == 0 or len(source) == 0:
        return
    spans, strides = [], []
    for pages in (target, source):
        stride = pages.stride(0) * pages.itemsize if len(pages) > 1 else page_bytes
        first = pages.data_ptr()
        spans.append((first, first + (len(pages) - 1) * stride + page_bytes))
        strides.append(stride)
    if spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]:
        checks.fail(
            _OP,
            f"target and source must not share memory, got pages {strides[0]} bytes "
            f"apart from address {spans[0][0]} and {strides[1]} bytes apart from "
            f"{spans[1][0]}",
        )


def _check_ids(name: str, ids: torch.Tensor | None, num_pages: int) -> None:
    if ids is not None:
        owner = f"{name} has pages"
        checks.check_range(_OP, f"{name}_ids", ids, "page", num_pages, owner)


def _check_distinct(ids: torch.Tensor | None) -> None:
    i = None if ids is None else checks.first_repeat(ids)
    if ids is not None and i is not None:
        checks.fail(
            _OP,
            f"target_ids[{i}] (page {int(ids[i])}) repeats an earlier one; target "
            "pages must differ",
        )
