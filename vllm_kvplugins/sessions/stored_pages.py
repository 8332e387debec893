"""How pages and queries of a session lie in host memory and in files.

::

    auto         bit for bit, in the order of the attention kernel
    int8, int4   [ keys of slot 0 | keys of slot 1 | ... | values of slot 0 | ... ],
                 each a row of ``QuantizedRows``

Quantized pages do not depend on the order of the attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.bulk import copy_pages
from vllm_kvplugins.ops.device import AsyncHostCopy, moved
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.quantized_rows import BITS, QuantizedRows
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.sessions.settings import SessionDtype

# Pages are copied in pieces of this size, through pinned memory. A GPU whose memory
# belongs to the pool has no room for a second copy of a long request.
PIECE_BYTES = 32 << 20
# What is quantized at once, so that no second copy of a long request is made.
QUANTIZED_PIECE_BYTES = 8 << 20

# Queries decide which tokens stay, and they are few: they are never stored in 4 bits.
_QUERY_BITS = 8


def query_rows(dtype: SessionDtype, head_dim: int) -> QuantizedRows | None:
    """The format of stored queries; None: as the model computed them."""
    return None if dtype == "auto" else QuantizedRows(head_dim, _QUERY_BITS)


def page_rows(dtype: SessionDtype, head_dim: int) -> QuantizedRows | None:
    """The format of stored keys and values; None: as in the cache."""
    return None if dtype == "auto" else QuantizedRows(head_dim, BITS[dtype])


def stored_bytes(slots: int, geometry: Geometry, dtype: SessionDtype) -> int:
    """Bytes of stored pages, over all layers and the KV heads of all ranks.

    Args:
        slots: of the pages, per KV head.
        dtype: the setting ``session_dtype``.
    """
    cached = slots * geometry.kv_bytes_per_token
    if dtype == "auto":
        return cached
    dim, element_bytes = geometry.head_dim, geometry.element_bytes
    assert dim is not None, "whoever counts sessions knows the size of rows"
    assert element_bytes is not None
    rows = page_rows(dtype, dim)
    assert rows is not None
    return rows.quantized_bytes(cached, element_bytes)


def pack_queries(queries: torch.Tensor, dtype: SessionDtype) -> torch.Tensor:
    """Queries as they are stored.

    Args:
        queries: [num_layers, n, num_q_heads, head_dim].
        dtype: the setting ``session_dtype``.

    Returns:
        The same, or uint8 [num_layers, n, num_q_heads, row bytes] in host memory.
    """
    rows = query_rows(dtype, queries.shape[-1])
    return queries if rows is None else _quantized(rows, queries)


def unpack_queries(
    stored: torch.Tensor,
    dtype: SessionDtype,
    head_dim: int,
    elem_dtype: torch.dtype,
) -> torch.Tensor:
    """Stored queries: [num_layers, n, num_q_heads, head_dim], where they lie.

    Args:
        dtype: the setting ``session_dtype`` with which they were stored.
        elem_dtype: dtype in which the model computed them.
    """
    rows = query_rows(dtype, head_dim)
    return stored if rows is None else _dequantized(rows, stored, elem_dtype)


class StoredPages(Protocol):
    """A format of pages in host memory, and the copies to and from the pool.

    Attributes:
        dtype: the setting ``session_dtype``.
        layout: pages of the same dtype and layout have the same order of elements.
        elem_dtype: of stored pages.
        page_elems: elements of a stored page.
    """

    dtype: SessionDtype
    layout: str
    elem_dtype: torch.dtype
    page_elems: int

    def copy_out(self, ids: torch.Tensor) -> torch.Tensor:
        """Copy pages of the pool to host memory.

        Args:
            ids: int64 [n], page IDs, on the pool's device.

        Returns:
            [n, page_elems] of ``elem_dtype``.
        """

    def copy_in(
        self, ids: torch.Tensor, pages: torch.Tensor, which: torch.Tensor | None = None
    ) -> None:
        """Copy pages from host memory into the pool.

        Args:
            ids: int64 [n], target page IDs, on the pool's device.
            pages: [at least n, page_elems], in host memory.
            which: int64 [n], rows of ``pages``, in host memory; None: the first n.
        """

    def read_tokens(
        self, pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read single tokens of stored pages.

        Args:
            pages: [n, page_elems].
            page: int64 [heads, tokens], rows of ``pages``.
            slot: int64, same shape or [tokens].

        Returns:
            Keys and values, two [heads, tokens, head_dim] in host memory, elements of
            the cache.
        """

    def clear(self, pages: torch.Tensor, used: int) -> None:
        """Zero all slots of stored pages except for the first ``used``.

        They may contain tokens of other requests.
        """

    def slot_elements(self) -> torch.Tensor:
        """Elements of a stored page that belong to each slot.

        Returns:
            int64 [block_size, elements per slot], in host memory.
        """


def stored_pages(heap: Heap, dtype: SessionDtype) -> StoredPages:
    """The format of a heap's pages in sessions.

    Args:
        dtype: the setting ``session_dtype``.
    """
    rows = page_rows(dtype, heap.layout.head_dim)
    return ExactPages(heap) if rows is None else QuantizedPages(heap, dtype, rows)


class ExactPages:
    """Pages bit for bit, in the order of the attention kernel."""

    dtype: SessionDtype = "auto"

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.layout = heap.layout.digest
        self.elem_dtype = heap.pages.dtype
        self.page_elems = heap.layout.page_elems

    def copy_out(self, ids: torch.Tensor) -> torch.Tensor:
        pool = self._heap.pages
        on_host = pool.device.type == "cpu"
        out = torch.empty(len(ids), self.page_elems, dtype=pool.dtype, device="cpu")
        for piece in _pieces(self._heap, len(ids), PIECE_BYTES):
            part = out[piece] if on_host else pool.new_empty(out[piece].shape)
            copy_pages(part, None, pool, ids[piece])
            if not on_host:
                out[piece] = AsyncHostCopy(part).wait()
        return out

    def copy_in(
        self, ids: torch.Tensor, pages: torch.Tensor, which: torch.Tensor | None = None
    ) -> None:
        pool = self._heap.pages
        for piece in _pieces(self._heap, len(ids), PIECE_BYTES):
            part = pages[piece] if which is None else pages[which[piece]]
            copy_pages(pool, ids[piece], moved(part, pool.device), None)

    def read_tokens(
        self, pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kv = PagedKV(pages, self._heap.layout.to("cpu"))
        slot = slot.expand_as(page).reshape(-1)
        keys, values = ops.gather_tokens(kv, page.reshape(-1), slot)
        return keys.view(*page.shape, -1), values.view(*page.shape, -1)

    def clear(self, pages: torch.Tensor, used: int) -> None:
        layout = self._heap.layout
        for offsets in (layout.k_offsets, layout.v_offsets):
            unused = offsets.view(layout.block_size, -1)[used:].flatten().long()
            pages[:, unused.cpu()] = 0

    def slot_elements(self) -> torch.Tensor:
        layout = self._heap.layout
        planes = (layout.k_offsets, layout.v_offsets)
        keys, values = (each.view(layout.block_size, -1) for each in planes)
        return torch.cat([keys, values], 1).long().cpu()


class QuantizedPages:
    """Pages as quantized rows: all keys, then all values, in the order of slots.

    Args:
        heap: its elements are float32, float16 or bfloat16.
        rows: the format of one key or value.
    """

    layout = "rows"
    elem_dtype = torch.uint8

    def __init__(self, heap: Heap, dtype: SessionDtype, rows: QuantizedRows) -> None:
        assert heap.fp8 is None, "refused at start-up"
        self.dtype = dtype
        self._heap = heap
        self._rows = rows
        self._shape = 2, heap.layout.block_size, rows.row_bytes
        self.page_elems = 2 * heap.layout.block_size * rows.row_bytes

    def copy_out(self, ids: torch.Tensor) -> torch.Tensor:
        kv = self._heap.kv
        out = torch.empty(len(ids), *self._shape, dtype=torch.uint8, device="cpu")
        for piece in _pieces(self._heap, len(ids), QUANTIZED_PIECE_BYTES):
            listed = ids[piece][:, None]
            for plane, gather in enumerate((ops.gather_keys, ops.gather_values)):
                out[piece, plane] = _quantized(self._rows, gather(kv, listed))
        return out.view(len(ids), self.page_elems)

    def copy_in(
        self, ids: torch.Tensor, pages: torch.Tensor, which: torch.Tensor | None = None
    ) -> None:
        pool, size = self._heap.pages, self._heap.layout.block_size
        slots = torch.arange(size, device=pool.device)
        for piece in _pieces(self._heap, len(ids), QUANTIZED_PIECE_BYTES):
            part = pages[piece] if which is None else pages[which[piece]]
            planes = part.view(-1, *self._shape).transpose(0, 1).contiguous()
            planes = _dequantized(self._rows, planes, pool.dtype)
            keys, values = planes.to(pool.device).flatten(1, 2)
            count = len(part)
            ops.scatter_tokens(
                self._heap.kv,
                ids[piece].repeat_interleave(size),
                slots.repeat(count),
                keys,
                values,
            )

    def read_tokens(
        self, pages: torch.Tensor, page: torch.Tensor, slot: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planes, dtype = pages.view(-1, *self._shape), self._heap.pages.dtype
        keys, values = (
            _dequantized(self._rows, planes[page, plane, slot], dtype)
            for plane in (0, 1)
        )
        return keys, values

    def clear(self, pages: torch.Tensor, used: int) -> None:
        pages.view(-1, *self._shape)[:, :, used:] = 0  # rows of zeros

    def slot_elements(self) -> torch.Tensor:
        elements = torch.arange(self.page_elems).view(self._shape)
        return elements.transpose(0, 1).flatten(1)


def _quantized(rows: QuantizedRows, values: torch.Tensor) -> torch.Tensor:
    """Quantized rows in host memory, of values on any device."""
    on_host = values.cpu()
    half = on_host.dtype == torch.float16  # the kernels read float32 and bfloat16
    return rows.quantize(on_host.float() if half else on_host)


def _dequantized(
    rows: QuantizedRows, stored: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Values of quantized rows in host memory."""
    half = dtype == torch.float16
    return rows.dequantize(stored, torch.float32 if half else dtype).to(dtype)


def _pieces(heap: Heap, pages: int, piece_bytes: int) -> Iterator[slice]:
    """Slices of up to ``piece_bytes`` that cover ``pages`` pages of the pool."""
    at_once = max(piece_bytes // heap.pages[:1].nbytes, 1)
    for first in range(0, pages, at_once):
        yield slice(first, min(first + at_once, pages))
