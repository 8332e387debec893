"""The kernels of ``paged_attention``.

A sequence is a (row, KV head) with its own pages and length. A program processes one
sequence: as many new tokens of its row as fit into a tile with the query heads of the
KV head's group, and one of several parts of the slots that they attend to::

    tile   [tokens of the row x query heads of the group, head_dim]
    part   slots [0, end) in SPLITS runs of whole tiles; the last also has the entries,
           the first also has the learned sink
    merge  parts weighted by the exponentials of their maxima (FlashDecoding)

The softmax is computed online, tile by tile (FlashAttention).
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies bfloat16 numbers as integers of their bits. It therefore
# multiplies the rounded numbers as float32, which gives the sums of tensor cores.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _row_of(block, query_start, rows, BLOCK_Q: tl.constexpr):
    """The row of a block. The blocks of row r begin at start[r] // BLOCK_Q + r, so
    every row has room for an incomplete last block."""
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _dot(a, b, TYPE: tl.constexpr):
    """Product of numbers rounded to TYPE; sums are float32."""
    a, b = a.to(TYPE), b.to(TYPE)
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _float16(elements, MANTISSA: tl.constexpr):
    """fp8 elements as float16, which holds each of them; e4m3's divided by 2 ** 8,
    because the exponents of float16 have another bias. Needs no instructions for fp8.
    """
    bits = elements.to(tl.int32)
    bits = ((bits & 128) << 8) | ((bits & 127) << (10 - MANTISSA))
    return tl.cast(tl.cast(bits, tl.int16), tl.float16, bitcast=True)


@triton.jit
def _capped(score, cap):
    """cap * tanh(score / cap), without overflow."""
    return cap * (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0)


@triton.jit
def _add_tile(score, value, highest, total, sums, TYPE: tl.constexpr):
    """Add a tile to the running softmax."""
    new_highest = tl.maximum(highest, tl.max(score, axis=1))
    # The maximum of a row without visible slots is -inf, and -inf - -inf is NaN.
    base = tl.where(new_highest > float("-inf"), new_highest, 0.0)
    weight = tl.exp(score - base[:, None])
    decay = tl.exp(highest - base)
    total = total * decay + tl.sum(weight, axis=1)
    sums = sums * decay[:, None] + _dot(weight, value, TYPE)
    return new_highest, total, sums


# These change from step to step. Triton would compile special kernels for 1 and for
# multiples of 16 while requests wait. They only address single numbers, so the loads of
# keys, values and queries stay as wide as before.
_SIZES = ["rows", "table_stride", "tokens"]
_TABLES = ["query_start", "page_table", "lengths"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_TABLES)
def attend(
    queries,
    query_stride,
    query_start,
    rows,
    heap,
    key_scale,
    value_scale,
    page_stride,
    key_base,
    key_slot_stride,
    key_dim_stride,
    value_base,
    value_slot_stride,
    value_dim_stride,
    page_table,
    table_stride,
    lengths,
    scale,
    sinks,
    softcap,
    entry_keys,
    entry_values,
    entry_bias,
    entry_starts,
    entry_counts,
    out,
    out_stride,
    lse,
    partial,
    maxima,
    tokens,
    head_dim,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ONE_EACH: tl.constexpr,
    HAS_ENTRIES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    FP8_MANTISSA: tl.constexpr,
    TYPE: tl.constexpr,
    ENTRY_TYPE: tl.constexpr,
):
    """One program: BLOCK_Q new tokens of one sequence, one of SPLITS parts.

    FP8_MANTISSA is the number of bits of an fp8 element's mantissa; the heap is then
    uint8. If it is 0, elements are plain, and their scales are not used.
    """
    head, split = tl.program_id(1), tl.program_id(2)
    if ONE_EACH:
        row = tl.program_id(0)
        first, count, skipped = row, 1, 0
    else:
        row = _row_of(tl.program_id(0), query_start, rows, BLOCK_Q)
        first = tl.load(query_start + row)
        count = tl.load(query_start + row + 1) - first
        block = tl.program_id(0) - (first // BLOCK_Q + row)
        skipped = block * BLOCK_Q
        if skipped >= count:
            return
    sequence = (row * NUM_KV_HEADS + head).to(tl.int64)
    length = tl.load(lengths + sequence)

    m = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIMS)
    inside = dim < head_dim
    token = skipped + m // GROUP
    is_query = (m < BLOCK_Q * GROUP) & (token < count)
    q_head = head * GROUP + m % GROUP
    num_q_heads = NUM_KV_HEADS * GROUP
    at = (first + token).to(tl.int64)
    query = tl.load(
        queries
        + at[:, None] * query_stride
        + q_head[:, None] * head_dim
        + dim[None, :],
        mask=is_query[:, None] & inside[None, :],
        other=0.0,
    )
    # The number of slots that each token sees, and the largest of these numbers.
    num_visible = length - count + token + 1
    end = tl.minimum(length, length - count + skipped + BLOCK_Q)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, DIMS], tl.float32)
    if HAS_SINKS and split == 0:
        # As a slot whose value is 0.
        highest = tl.load(sinks + q_head, mask=is_query, other=0.0)
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    tiles = tl.cdiv(tl.maximum(end, 0), TILE)
    share = tl.cdiv(tiles, SPLITS)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        slot = tile * TILE + tl.arange(0, TILE)
        used = slot < end
        table_row = page_table + sequence * table_stride
        if BLOCK_SIZE % TILE == 0:
            page = tl.load(table_row + tile * TILE // BLOCK_SIZE).to(tl.int64)
            start = page * page_stride + tl.zeros([TILE], tl.int64)
        else:
            page = tl.load(table_row + slot // BLOCK_SIZE, mask=used, other=0)
            start = page.to(tl.int64) * page_stride
        within = slot % BLOCK_SIZE
        key = tl.load(
            heap
            + (start + key_base + within * key_slot_stride)[None, :]
            + dim[:, None] * key_dim_stride,
            mask=used[None, :] & inside[:, None],
            other=0,
        )
        value = tl.load(
            heap
            + (start + value_base + within * value_slot_stride)[:, None]
            + dim[None, :] * value_dim_stride,
            mask=used[:, None] & inside[None, :],
            other=0,
        )
        if FP8_MANTISSA:
            key, value = _float16(key, FP8_MANTISSA), _float16(value, FP8_MANTISSA)
        score = _dot(query, key, TYPE) * scale
        if FP8_MANTISSA:
            score *= key_scale
        if HAS_CAP:
            score = _capped(score, softcap)
        score = tl.where(slot[None, :] < num_visible[:, None], score, float("-inf"))
        highest, total, sums = _add_tile(score, value, highest, total, sums, TYPE)

    if FP8_MANTISSA:
        sums *= value_scale
    if HAS_ENTRIES and split == SPLITS - 1:
        start = tl.load(entry_starts + sequence)
        entries = tl.load(entry_counts + sequence)
        for done in range(0, entries, TILE):
            n = done + tl.arange(0, TILE)
            bias = tl.load(
                entry_bias + start + n, mask=n < entries, other=float("-inf")
            )
            on = bias > float("-inf")
            entry = (start + n) * head_dim
            key = tl.load(
                entry_keys + entry[None, :] + dim[:, None],
                mask=on[None, :] & inside[:, None],
                other=0.0,
            )
            value = tl.load(
                entry_values + entry[:, None] + dim[None, :],
                mask=on[:, None] & inside[None, :],
                other=0.0,
            )
            score = _dot(query, key, ENTRY_TYPE) * scale
            if HAS_CAP:
                score = _capped(score, softcap)
            score += bias[None, :]
            highest, total, sums = _add_tile(
                score, value, highest, total, sums, ENTRY_TYPE
            )

    if SPLITS == 1:
        is_any = total > 0
        mean = sums / tl.where(is_any, total, 1.0)[:, None]
        tl.store(
            out + at[:, None] * out_stride + q_head[:, None] * head_dim + dim[None, :],
            mean.to(out.dtype.element_ty),
            mask=is_query[:, None] & inside[None, :],
        )
        logsum = highest + tl.log(tl.where(is_any, total, 1.0))
        tl.store(lse + at * num_q_heads + q_head, logsum, mask=is_query)
    else:
        place = (split.to(tl.int64) * tokens + at) * num_q_heads + q_head
        tl.store(
            partial + place[:, None] * head_dim + dim[None, :],
            sums,
            mask=is_query[:, None] & inside[None, :],
        )
        tl.store(maxima + place * 2, highest, mask=is_query)
        tl.store(maxima + place * 2 + 1, total, mask=is_query)


@triton.jit(do_not_specialize=["tokens"])
def merge(
    partial,
    maxima,
    out,
    out_stride,
    lse,
    tokens,
    head_dim,
    NUM_Q_HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
):
    """One program: all parts of one query."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, ALL_SPLITS), tl.arange(0, DIMS)
    place = (split.to(tl.int64) * tokens + at) * NUM_Q_HEADS + head
    there = split < SPLITS
    highest = tl.load(maxima + place * 2, mask=there, other=float("-inf"))
    total = tl.load(maxima + place * 2 + 1, mask=there, other=0.0)
    top = tl.max(highest, axis=0)
    is_any = top > float("-inf")
    weight = tl.exp(highest - tl.where(is_any, top, 0.0))
    sums = tl.load(
        partial + place[:, None] * head_dim + dim[None, :],
        mask=there[:, None] & (dim < head_dim)[None, :],
        other=0.0,
    )
    whole = tl.where(is_any, tl.sum(weight * total, axis=0), 1.0)
    mean = tl.sum(sums * weight[:, None], axis=0) / whole
    tl.store(
        out + at * out_stride + head * head_dim + dim,
        mean.to(out.dtype.element_ty),
        mask=dim < head_dim,
    )
    logsum = top + tl.log(whole)
    tl.store(lse + at * NUM_Q_HEADS + head, logsum)
