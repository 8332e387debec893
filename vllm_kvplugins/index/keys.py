"""Memory layout of the keys of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from vllm_kvplugins.ops.quantized_rows import QuantizedRows

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _no_table() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """A description of keys in memory, which an index reads in place.

    Keys are float32 or bfloat16, on the CPU, with any strides: a transposed page
    (``[head_dim, block_size]``, vLLM's CPU backend) is the ``transpose`` of its
    view. Rows with contiguous elements are read fastest. Keys in host memory may also
    be quantized, or rows of fp8 elements, which are read without a scale.

    Args:
        data: [requests, heads, n, head_dim], or with a table pages
            [num_pages, block_size, head_dim] that all requests and heads share.
        table: int64 [requests, heads, pages]: slot ``s`` of a head is slot
            ``s % block_size`` of page ``table[..., s // block_size]``.
        by_page: the keys are in the places that the index gave them
            (:meth:`CompiledIndex.places`) instead of in the order of their slots.
            Neighbours in the tree are then neighbours in memory.
        quantized: the format of quantized keys: ``data`` is then uint8 and has rows of
            bytes instead of head_dim. :meth:`gather` and the compiled indices read
            them; ``None``: ``data`` has the keys.
    """

    data: torch.Tensor
    table: torch.Tensor = field(default_factory=_no_table)
    by_page: bool = False
    quantized: QuantizedRows | None = None

    @classmethod
    def dense(cls, keys: torch.Tensor, by_page: bool = False) -> Keys:
        """Keys in one tensor.

        Args:
            keys: [heads, n, head_dim] of one request, or of several with a first
                dimension for them.
            by_page: see the class.
        """
        return cls(_with_requests(keys, 4), by_page=by_page)

    @classmethod
    def paged(
        cls,
        pages: torch.Tensor,
        table: torch.Tensor,
        by_page: bool = False,
        quantized: QuantizedRows | None = None,
    ) -> Keys:
        """Keys in pages.

        Args:
            pages: [num_pages, block_size, head_dim], a view of any strides.
            table: int64 [heads, pages] of one request, or of several with a first
                dimension for them.
            by_page, quantized: see the class.
        """
        return cls(pages, _with_requests(table, 3).contiguous(), by_page, quantized)

    def of(self, request: int) -> Keys:
        """The keys of one request."""
        part = slice(request, request + 1)
        if self.data.dim() == 4:
            return replace(self, data=self.data[part])
        return replace(self, table=self.table[part])

    @property
    def capacity(self) -> int:
        """Slots per head."""
        if self.data.dim() == 4:
            return int(self.data.shape[2])
        return int(self.table.shape[2] * self.data.shape[1])

    def gather(self) -> torch.Tensor:
        """A copy of all keys: [requests, heads, capacity, head_dim].

        Quantized and fp8 keys become float32.
        """
        rows = self.data
        fp8 = rows.dtype if rows.dtype in _FP8 else None
        if fp8 is not None:
            rows = rows.view(torch.uint8)  # torch cannot index fp8
        if rows.dim() == 3:
            rows = rows[self.table].flatten(2, 3)
        if fp8 is not None:
            return rows.view(fp8).float()
        if self.quantized is not None:
            return self.quantized.dequantize(rows)
        return rows.clone() if rows is self.data else rows


def _with_requests(tensor: torch.Tensor, dims: int) -> torch.Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == dims - 1 else tensor
