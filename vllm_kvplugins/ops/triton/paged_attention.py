"""Attention of new tokens to page lists and coarse entries, for GPUs.

Correctness is tested in Triton's interpreter; it has never been timed.

The kernels are in ``paged_attention_kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PagedKV, Plane
from vllm_kvplugins.ops.triton.paged_attention_kernels import attend, merge
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

_MAX_SPLITS = 16
_TILE_BYTES = 16 << 10


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """The new tokens of all rows, one row after the other.

    Args:
        queries: float32, float16 or bfloat16 [tokens, num_q_heads, head_dim], heads and
            dimensions contiguous.
        row_starts: int32 [rows + 1], first token of each row; None = one token each.
        max_per_row: the largest number of new tokens of a row.
    """

    queries: torch.Tensor
    row_starts: torch.Tensor | None = None
    max_per_row: int = 1

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        starts = self.row_starts
        return len(self.queries) if starts is None else starts.numel() - 1


@dataclass(frozen=True, slots=True)
class Fp8Elements:
    """How to read a heap of fp8 elements.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        key_scale, value_scale: an element times its scale is the value.
    """

    dtype: torch.dtype
    key_scale: float
    value_scale: float

    @property
    def mantissa(self) -> int:
        """Bits of an element's mantissa."""
        return _MANTISSAS[self.dtype]

    @property
    def scales(self) -> tuple[float, float]:
        """The scales of keys and values as the kernel reads them, in float16."""
        unit = 2.0**8 if self.dtype == torch.float8_e4m3fn else 1.0
        return self.key_scale * unit, self.value_scale * unit


_MANTISSAS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def attend_paged(
    new: NewTokens,
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries | None = None,
    *,
    rules: LogitRules = PLAIN,
    fp8: Fp8Elements | None = None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row's new tokens to its pages and coarse entries.

    The new tokens are a row's newest. The first of ``n`` sees all tokens of each of its
    sequences except for the last ``n - 1``, and so on. All of them see all entries.

    Args:
        new: the new tokens.
        kv: the heap; its planes must have strides.
        page_table: int32 [rows * num_kv_heads, max_pages], a row contiguous.
        lengths: int32 [rows * num_kv_heads], tokens, including the new ones; 0 for a
            padded row.
        scale: softmax scale.
        coarse: coarse entries; None = there are none.
        rules: a cap of the scaled logits, and a learned sink per query head, on the
            device of the queries.
        fp8: set if the heap is uint8 with fp8 elements; None = its elements are plain.
            Coarse entries are plain in any case.
        out: shape and dtype of the queries; None = a new tensor.
        splits: parts that sequences are cut into; None = as many as keep the GPU busy.

    Returns:
        ``out`` and the float32 [tokens, num_q_heads] log-sum-exp (natural logarithm),
        sinks included. A head with nothing to attend to gets 0, and -inf or its sink.

    Raises:
        ValueError: the layout's planes have no strides.

    Contents are not checked. Sums are float32. Scores and weights are multiplied in the
    heap's dtype, or in float32 if the queries have another. Fp8 elements are multiplied
    in the dtype of the queries, which holds them exactly, and scaled in float32. Equal
    arguments give equal bits.

    Cost: one launch, two with several splits; no host sync.
    """
    queries, heap, layout = new.queries, kv.pages, kv.layout
    if layout.keys.strides is None or layout.values.strides is None:
        raise ValueError("Triton's kernel needs pages of rows or columns")
    tokens, num_q_heads, head_dim = queries.shape
    rows, row_starts = new.num_rows, new.row_starts
    heads = len(page_table) // max(rows, 1)
    out = torch.empty_like(queries) if out is None else out
    float32 = {"dtype": torch.float32, "device": queries.device}
    lse = torch.empty(tokens, num_q_heads, **float32)
    if not tokens or not rows:
        return out, lse
    group = num_q_heads // heads
    block_m = _tile_rows(group, new.max_per_row)
    block_q = block_m // group
    one_each = new.max_per_row == 1
    blocks = rows if one_each else tokens // block_q + rows
    dtypes = [queries.dtype, heap.dtype] + ([coarse.keys.dtype] if coarse else [])
    tile = _tile_slots(head_dim, max(dtype.itemsize for dtype in dtypes))
    room = page_table.shape[1] * layout.block_size
    if splits is None:
        splits = _splits(queries.device, blocks * heads, room, tile)
    partial = maxima = out
    if splits > 1:
        shape = (splits, tokens, num_q_heads)
        partial = torch.empty(*shape, head_dim, **float32)
        maxima = torch.empty(*shape, 2, **float32)
    same_dtype = fp8 is not None or queries.dtype == heap.dtype
    attend[(blocks, heads, splits)](
        queries,
        queries.stride(0),
        lengths if row_starts is None else row_starts,
        rows,
        heap,
        *(fp8.scales if fp8 else (1.0, 1.0)),
        heap.stride(0),
        *_plane(layout.keys),
        *_plane(layout.values),
        page_table,
        page_table.stride(0),
        lengths,
        scale,
        queries if rules.sinks is None else rules.sinks,
        rules.softcap,
        *_entries(coarse, queries),
        out,
        out.stride(0),
        lse,
        partial,
        maxima,
        tokens,
        head_dim,
        NUM_KV_HEADS=heads,
        GROUP=group,
        BLOCK_SIZE=layout.block_size,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        TILE=tile,
        DIMS=max(triton.next_power_of_2(head_dim), 16),
        SPLITS=splits,
        ONE_EACH=one_each,
        HAS_ENTRIES=coarse is not None,
        HAS_SINKS=rules.sinks is not None,
        HAS_CAP=rules.softcap > 0,
        FP8_MANTISSA=fp8.mantissa if fp8 else 0,
        TYPE=_DTYPES[queries.dtype] if same_dtype else tl.float32,
        ENTRY_TYPE=_entry_type(coarse, queries),
        num_warps=4 if block_m <= 64 else 8,
    )
    if splits > 1:
        merge[(tokens, num_q_heads)](
            partial,
            maxima,
            out,
            out.stride(0),
            lse,
            tokens,
            head_dim,
            NUM_Q_HEADS=num_q_heads,
            DIMS=triton.next_power_of_2(head_dim),
            SPLITS=splits,
            ALL_SPLITS=triton.next_power_of_2(splits),
        )
    return out, lse


_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def _tile_rows(group: int, max_per_row: int) -> int:
    """Rows of a tile: at least 16, for tensor cores, and 64 for many tokens per row."""
    rows = max(triton.next_power_of_2(group), 16)
    return int(rows if max_per_row == 1 else max(rows, 64))


def _tile_slots(head_dim: int, itemsize: int) -> int:
    """Slots of a tile, of one page or several: up to 16 KiB of keys, because shared
    memory is small, and at least 16, for tensor cores."""
    fitting = _TILE_BYTES // (triton.next_power_of_2(head_dim) * itemsize)
    return int(min(max(fitting, 16), 64))


def _splits(device: torch.device, programs: int, room: int, tile: int) -> int:
    """A power of two: the kernel is compiled for each number that occurs."""
    if device.type != "cuda":
        return 1
    units = torch.cuda.get_device_properties(device).multi_processor_count
    # Merging a part of fewer than four tiles takes longer than the split saves.
    limit = min(2 * units // programs, room // (4 * tile), _MAX_SPLITS)
    return 1 << (int(max(limit, 1)).bit_length() - 1)


def _plane(plane: Plane) -> tuple[int, int, int]:
    assert plane.strides is not None
    return plane.base, *plane.strides


def _entries(coarse: CoarseEntries | None, queries: torch.Tensor) -> tuple[Any, ...]:
    """Pointers to the entries; if there are none, pointers that the kernel ignores."""
    if coarse is None:
        return (queries,) * 5
    return tuple(tensor.contiguous() for tensor in coarse.tensors)


def _entry_type(coarse: CoarseEntries | None, queries: torch.Tensor) -> Any:
    same_dtype = coarse is not None and coarse.keys.dtype == queries.dtype
    return _DTYPES[queries.dtype] if same_dtype else tl.float32
