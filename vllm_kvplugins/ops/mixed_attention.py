"""Attention of new tokens to pages and coarse entries under one softmax.

Runs the compiled kernel on CPUs if it is built, a Triton kernel on CUDA, and torch
otherwise; the environment variable ``KVP_OPS`` overrides this (``extension.py``).
"""

from __future__ import annotations

import math

import torch

from vllm_kvplugins.ops import checks, torch_ops
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for, triton_for
from vllm_kvplugins.ops.layout import PagedKV

_OP = "attend_mixed"


def attend_mixed(
    queries: torch.Tensor,
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention of one token per row over a memory of mixed resolution.

    SeKV, section 3.3: tokens at full resolution and coarse entries share one softmax;
    the score of an entry is ``scale * q.k + bias``. A sequence is one (row, KV head)
    pair, in this order, with its own pages and entries. Does not modify its arguments.

    Args:
        queries: float32 or bfloat16 [rows, num_q_heads, head_dim], after RoPE;
            num_q_heads is a multiple of the number of KV heads.
        kv: the heap, float32 or bfloat16; or float8_e4m3fn or float8_e5m2, elements of
            an fp8 cache without the scales of their layer: the scale of keys belongs
            into ``scale``, and that of values the caller applies to the output.
        page_table: int32 [sequences, max_pages]; ids beyond a sequence's length are
            ignored.
        lengths: int32 [sequences], tokens; the last page may be partly full.
        scale: softmax scale, 1/sqrt(head_dim) unless the model overrides it.
        coarse: coarse entries; None = there are none.

    Returns:
        [rows, num_q_heads, head_dim] of the dtype of ``queries``, and the float32
        [rows, num_q_heads] log-sum-exp of all scores (natural logarithm). A head with
        nothing to attend to gets 0 and -inf.

    Raises:
        ValueError: a shape, dtype, device, page, length, start or bias does not fit.

    Sums are float32. The compiled version computes weights to 1e-6 of the largest one
    and none below exp(-60) of it, so the log-sum-exp is no more exact than that about
    tokens with tiny weights. Its results are the same bits for any number of threads
    and whatever other rows are in the call. Slots after the last token may hold
    anything. Pages of fp8 give the bits that pages of their float32 values give.

    Cost: reads every key and value once; ``4 * group * head_dim`` operations and
        ``group`` exponentials per token and KV head. Pages whose keys are neither rows
        nor columns are copied first, which is several times slower. Pages of fp8 are
        widened to float32, 256 tokens at a time. The torch version
        copies all pages to float32, padded to the longest sequence.
    """
    heap, layout = kv.pages, kv.layout
    if heap.device.type == "cpu" and compiled_for(heap.device)[0]:
        entries: tuple[torch.Tensor | None, ...] = (None,) * 5
        if coarse is not None:
            entries = tuple(entry.contiguous() for entry in coarse.tensors)
        out, lse = call_compiled(
            _OP,
            queries.contiguous(),
            heap,
            page_table.contiguous(),
            lengths.contiguous(),
            layout.k_offsets,
            layout.v_offsets,
            layout.block_size,
            scale,
            *entries,
        )
        return out, lse
    all_entries = coarse or CoarseEntries.none(len(page_table), queries)
    _check(queries, kv, page_table, lengths, scale, all_entries)
    if triton_for(heap.device):
        return _attend_on_gpu(queries, kv, page_table, lengths, scale, coarse)
    return torch_ops.attend_mixed(queries, kv, page_table, lengths, scale, all_entries)


def _attend_on_gpu(
    queries: torch.Tensor,
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm_kvplugins.ops.triton.paged_attention import (
        Fp8Elements,
        NewTokens,
        attend_paged,
    )

    dtype, fp8 = kv.pages.dtype, None
    if dtype.itemsize == 1:
        fp8 = Fp8Elements(dtype, key_scale=1.0, value_scale=1.0)
        kv = PagedKV(kv.pages.view(torch.uint8), kv.layout)
    tokens, tables = NewTokens(queries.contiguous()), page_table.contiguous()
    return attend_paged(tokens, kv, tables, lengths, scale, coarse, fp8=fp8)


def _check(
    queries: torch.Tensor,
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries,
) -> None:
    """The checks of csrc/paged_decode.cpp; of contents only on the CPU."""
    if not math.isfinite(scale):
        checks.fail(_OP, f"scale must be finite, got {scale}")
    checks.check_heap(_OP, kv, checks.ATTENDED_DTYPES)
    heap, layout = kv.pages, kv.layout
    _check_sizes(queries, page_table, layout.head_dim)
    entries, dims, sequences = len(coarse.keys), layout.head_dim, len(page_table)
    float32_or_bfloat16 = checks.FACTOR_DTYPES
    expected = {
        "queries": (queries, queries.shape, float32_or_bfloat16),
        "page_table": (page_table, page_table.shape, (torch.int32,)),
        "lengths": (lengths, (sequences,), (torch.int32,)),
        "coarse_keys": (coarse.keys, (entries, dims), float32_or_bfloat16),
        "coarse_values": (coarse.values, (entries, dims), (coarse.keys.dtype,)),
        "bias": (coarse.bias, (entries,), (torch.float32,)),
        "starts": (coarse.starts, (sequences,), (torch.int64,)),
        "counts": (coarse.counts, (sequences,), (torch.int64,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        checks.check_shape(_OP, name, tensor, tuple(shape))
        checks.check_dtype(_OP, name, tensor, *dtypes)
        checks.check_device(_OP, name, tensor, heap, "the heap")
    if heap.device.type == "cpu":
        _check_contents(kv, page_table, lengths, coarse)


def _check_sizes(
    queries: torch.Tensor, page_table: torch.Tensor, head_dim: int
) -> None:
    checks.check_dim(_OP, "queries", queries, 3)
    checks.check_dim(_OP, "page_table", page_table, 2)
    rows, num_q_heads, _ = queries.shape
    checks.check_shape(_OP, "queries", queries, (rows, num_q_heads, head_dim))
    sequences = len(page_table)
    if sequences % rows if rows else sequences:
        checks.fail(
            _OP,
            f"page_table must have a row for each KV head of {rows} rows, "
            f"got {sequences}",
        )
    heads = sequences // rows if rows else 1
    if heads == 0 or num_q_heads % heads:
        checks.fail(
            _OP,
            f"queries must have a multiple of {heads} KV heads, got shape "
            f"{list(queries.shape)}",
        )


def _check_contents(
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    coarse: CoarseEntries,
) -> None:
    heap, block_size = kv.pages, kv.layout.block_size
    room = page_table.shape[1] * block_size
    for i, length in enumerate(lengths.tolist()):
        if not 0 <= length <= room:
            checks.fail(
                _OP,
                f"lengths[{i}] is {length}, but page lists have room for 0 to {room} "
                "tokens",
            )
    first_slots = torch.arange(page_table.shape[1]) * block_size
    used = first_slots < lengths[:, None]
    listed = page_table.where(used, 0) if len(heap) else page_table[used]
    checks.check_range(_OP, "page_table", listed, "page", len(heap))
    entries = len(coarse.keys)
    runs = list(zip(coarse.starts.tolist(), coarse.counts.tolist(), strict=True))
    for i, (start, count) in enumerate(runs):
        if start < 0 or count < 0 or start + count > entries:
            checks.fail(
                _OP,
                f"starts[{i}] is {start}, but a run must lie within the {entries} "
                "entries",
            )
    for start, count in runs:
        wrong = (~(coarse.bias[start : start + count] < math.inf)).nonzero()
        if len(wrong):
            checks.fail(
                _OP,
                f"bias[{start + int(wrong[0])}] must be finite, or -infinity for an "
                "entry that is off",
            )
