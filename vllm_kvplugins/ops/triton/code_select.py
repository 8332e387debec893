"""Selection of tokens on GPUs: see ``ops.code_select``.

Correctness is tested in Triton's interpreter; it has never been timed.

A pair is a (request, KV head). ``score`` and ``vote`` process a tile of the tokens of a
pair per program, ``swap`` all tokens of a pair, ``fetch`` some hot slots of a pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from vllm_kvplugins.ops.layout import PagedKV, Plane

if TYPE_CHECKING:
    from vllm_kvplugins.ops.code_select import HostRequests, HotTokens, KeyCodes

_TILE = 128  # tokens whose codes a program of `score` reads
_QUERIES = 16  # at once; at least 16, for tensor cores
_VOTES = 1024  # a program of `vote`
_CHUNK = 2048  # votes that `swap` reads at once
_SLOTS = 16  # a program of `fetch`
# Sizes that change from step to step are not specialized. Triton would compile other
# kernels for 1 and for multiples of 16 while requests wait.


def code_votes(
    queries: torch.Tensor,
    width: torch.Tensor,
    keys: KeyCodes,
    host: HostRequests,
    scale: float,
) -> torch.Tensor:
    """See :func:`vllm_kvplugins.ops.code_select.code_votes`."""
    requests, heads, group, head_dim = queries.shape
    pages = host.table.shape[2]
    tokens, pairs = pages * keys.page_tokens, requests * heads
    tiles = triton.cdiv(tokens, _TILE)
    float32 = {"dtype": torch.float32, "device": queries.device}
    logits = torch.empty(pairs, group, tokens, **float32)
    partial = torch.empty(pairs, group, tiles, **float32)
    votes = torch.empty(requests, heads, tokens, **float32)
    if votes.numel() == 0:
        return votes
    table, lengths = host.table.contiguous(), host.lengths
    score[(tiles, pairs)](
        queries.contiguous(),
        width.contiguous(),
        keys.codes,
        keys.scales,
        table,
        lengths,
        scale,
        logits,
        partial,
        tokens,
        pages,
        tiles,
        head_dim,
        HEADS=heads,
        GROUP=group,
        PAGE_TOKENS=keys.page_tokens,
        QUERIES=_QUERIES,
        TILE=_TILE,
        DIMS=max(triton.next_power_of_2(head_dim), 32),
        num_warps=4,
    )
    # -inf for requests without tokens
    total = partial.logsumexp(-1)
    vote[(triton.cdiv(tokens, _VOTES), pairs)](
        logits,
        total,
        lengths,
        votes,
        tokens,
        HEADS=heads,
        GROUP=group,
        TILE=_VOTES,
        num_warps=4,
    )
    return votes


def swap_tokens(
    votes: torch.Tensor, page_tokens: int, host: HostRequests, hot: HotTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`vllm_kvplugins.ops.code_select.swap_tokens`."""
    requests, heads, tokens = votes.shape
    device, width = votes.device, hot.width
    rows = torch.empty(requests, heads, width, dtype=torch.int64, device=device)
    fetched = torch.empty(requests, heads, dtype=torch.int64, device=device)
    if requests == 0:
        return rows, fetched
    swap[(requests * heads,)](
        votes.contiguous(),
        host.table.contiguous(),
        host.lengths,
        hot.token,
        hot.slot_indices,
        hot.counts,
        torch.zeros(requests * heads, tokens, dtype=torch.int8, device=device),
        torch.empty(requests * heads, max(width, 1), dtype=torch.int64, device=device),
        rows,
        fetched,
        tokens,
        host.table.shape[2],
        width,
        hot.token.shape[2],
        HEADS=heads,
        PAGE_TOKENS=page_tokens,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return rows, fetched


def fetch_rows(
    kv: PagedKV,
    host_pages: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See :func:`vllm_kvplugins.ops.code_select.fetch_rows`."""
    requests, heads, width = rows.shape
    page_tokens, head_dim = host_pages.shape[2:]
    if rows.numel() == 0:
        return
    fetch[(triton.cdiv(width, _SLOTS), requests * heads)](
        kv.pages,
        kv.pages.stride(0),
        *_plane(kv.layout.keys),
        *_plane(kv.layout.values),
        host_pages,
        rows,
        pages,
        slots,
        width,
        head_dim,
        PAGE_TOKENS=page_tokens,
        SLOTS=_SLOTS,
        DIMS=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def _plane(plane: Plane) -> tuple[int, int, int]:
    assert plane.strides is not None, "kernels on GPUs have pages of rows or columns"
    return plane.base, *plane.strides


@triton.jit
def _nearest(x):
    """Round to the nearest whole number, ties to even; for up to 2**22."""
    magic = 12582912.0
    return (x + magic) - magic


@triton.jit(do_not_specialize=["tokens", "pages_per_row", "tiles"])
def score(
    queries,
    width,
    codes,
    scales,
    table,
    lengths,
    scale,
    logits,
    partial,
    tokens,
    pages_per_row,
    tiles,
    head_dim,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program: the logits of TILE tokens for all queries of a pair."""
    tile, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tile * TILE + tl.arange(0, TILE)
    exists = slot < tl.load(lengths + pair // HEADS)
    page = tl.load(
        table + pair * pages_per_row + slot // PAGE_TOKENS, mask=exists, other=0
    )
    at = page * PAGE_TOKENS + slot % PAGE_TOKENS
    dim = tl.arange(0, DIMS)
    inside = dim < head_dim
    code = tl.load(
        codes + at[None, :] * head_dim + dim[:, None],
        mask=exists[None, :] & inside[:, None],
        other=0,
    )
    own = tl.load(scales + at, mask=exists, other=0.0)
    wide = tl.load(width + pair * head_dim + dim, mask=inside, other=0.0)
    for first in range(0, GROUP, QUERIES):
        m = first + tl.arange(0, QUERIES)
        is_query = m < GROUP
        query = tl.load(
            queries + (pair * GROUP + m)[:, None] * head_dim + dim[None, :],
            mask=is_query[:, None] & inside[None, :],
            other=0.0,
        )
        query = query.to(tl.float32) * wide[None, :]
        # Also drops NaN, which is not smaller than anything.
        query = tl.where(tl.abs(query) <= 3.4028234663852886e38, query, 0.0)
        peak = tl.max(tl.abs(query), axis=1)
        inverse = tl.math.div_rn(127.0, tl.where(peak > 0, peak, 1.0))
        inverse = tl.minimum(inverse, 3.4028234663852886e38)
        query_code = _nearest(query * inverse[:, None])
        product = tl.dot(query_code.to(tl.int8), code)
        step = peak * 0.007874015748031496 * scale
        logit = product.to(tl.float32) * own[None, :] * step[:, None]
        place = (pair * GROUP + m) * tokens
        tl.store(
            logits + place[:, None] + slot[None, :],
            logit,
            mask=is_query[:, None] & exists[None, :],
        )
        logit = tl.where(exists[None, :], logit, float("-inf"))
        top = tl.max(logit, axis=1)
        base = tl.where(top > float("-inf"), top, 0.0)
        total = tl.sum(tl.exp(logit - base[:, None]), axis=1)
        tl.store(
            partial + (pair * GROUP + m) * tiles + tile,
            base
            + tl.log(tl.where(total > 0, total, 1.0))
            + tl.where(total > 0, 0.0, float("-inf")),
            mask=is_query,
        )


@triton.jit(do_not_specialize=["tokens"])
def vote(
    logits,
    total,
    lengths,
    votes,
    tokens,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: the votes of all queries of a pair for TILE tokens."""
    pair = tl.program_id(1).to(tl.int64)
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    exists = slot < tl.load(lengths + pair // HEADS)
    sums = tl.zeros([TILE], tl.float32)
    for query in range(GROUP):
        row = pair * GROUP + query
        logit = tl.load(logits + row * tokens + slot, mask=exists, other=float("-inf"))
        whole = tl.load(total + row)
        sums += tl.exp(logit - tl.where(whole > float("-inf"), whole, 0.0))
    sums = tl.where(exists, sums, -1.0)
    tl.store(votes + pair * tokens + slot, sums, mask=slot < tokens)


@triton.jit
def _threshold(votes, length, count, CHUNK: tl.constexpr):
    """The bits of the count-th largest vote, and how many equal votes are among them.

    Votes are not negative, so their bits have their order. Finds eight bits at a time.
    """
    digits = tl.arange(0, 256)
    prefix, remaining = 0, count
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        histogram = tl.zeros([256], tl.int32)
        for first in range(0, length, CHUNK):
            slot = first + tl.arange(0, CHUNK)
            exists = slot < length
            bits = tl.load(votes + slot, mask=exists, other=0.0).to(
                tl.int32, bitcast=True
            )
            if step > 0:
                exists = exists & ((bits >> (shift + 8)) == (prefix >> (shift + 8)))
            histogram += tl.histogram((bits >> shift) & 255, 256, mask=exists)
        # Votes whose digit is this one or larger.
        at_least = tl.sum(histogram, axis=0) - tl.cumsum(histogram, axis=0) + histogram
        digit = tl.max(tl.where(at_least >= remaining, digits, 0), axis=0)
        larger = tl.sum(tl.where(digits > digit, histogram, 0), axis=0)
        prefix = prefix | (digit << shift)
        remaining = remaining - larger
    return prefix, remaining


@triton.jit(do_not_specialize=["tokens", "pages_per_row", "width", "entry_width"])
def swap(
    votes,
    table,
    lengths,
    token,
    slot_indices,
    counts,
    marks,
    listed,
    rows,
    fetched,
    tokens,
    pages_per_row,
    width,
    entry_width,
    HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: all hot slots of a pair. Bit 0 of a mark: hot; bit 1: chosen."""
    pair = tl.program_id(0).to(tl.int64)
    request, head = pair // HEADS, pair % HEADS
    votes += pair * tokens
    marks += pair * tokens
    listed += pair * tl.maximum(width, 1)
    table += pair * pages_per_row
    token += (tl.load(slot_indices + request) * HEADS + head) * entry_width
    length = tl.load(lengths + request).to(tl.int32)
    slots = tl.load(counts + request).to(tl.int32)
    count = tl.minimum(slots, length)

    for first in range(0, slots, CHUNK):
        at = first + tl.arange(0, CHUNK)
        held = tl.load(token + at, mask=at < slots, other=0)
        tl.store(marks + held, tl.full([CHUNK], 1, tl.int8), mask=at < slots)
    tl.debug_barrier()

    # Choose tokens, and list those that are not hot.
    threshold, equal = _threshold(votes, length, count, CHUNK)
    taken, missing = length * 0, length * 0
    for first in range(0, length, CHUNK):
        slot = first + tl.arange(0, CHUNK)
        exists = slot < length
        bits = tl.load(votes + slot, mask=exists, other=0.0).to(tl.int32, bitcast=True)
        ties = (exists & (bits == threshold)).to(tl.int32)
        before = taken + tl.cumsum(ties, axis=0) - ties
        chosen = exists & ((bits > threshold) | ((ties > 0) & (before < equal)))
        chosen = chosen & (count > 0)
        taken += tl.sum(ties, axis=0)
        mark = tl.load(marks + slot, mask=exists, other=1)
        is_missing = (chosen & (mark == 0)).to(tl.int32)
        rank = missing + tl.cumsum(is_missing, axis=0) - is_missing
        missing += tl.sum(is_missing, axis=0)
        tl.store(listed + rank, slot.to(tl.int64), mask=is_missing > 0)
        tl.store(marks + slot, mark | (chosen.to(tl.int8) << 1), mask=exists)
    tl.store(fetched + pair, missing.to(tl.int64))
    tl.debug_barrier()

    # The i-th listed token goes to the i-th slot that becomes free.
    free = length * 0
    for first in range(0, width, CHUNK):
        at = first + tl.arange(0, CHUNK)
        used = at < slots
        held = tl.load(token + at, mask=used, other=0)
        mark = tl.load(marks + held, mask=used, other=2)
        leaves = ((mark & 2) == 0).to(tl.int32)
        turn = free + tl.cumsum(leaves, axis=0) - leaves
        free += tl.sum(leaves, axis=0)
        takes = (leaves > 0) & (turn < missing)
        new = tl.load(listed + turn, mask=takes, other=0)
        page = tl.load(table + new // PAGE_TOKENS, mask=takes, other=0)
        row = page * 2 * PAGE_TOKENS + new % PAGE_TOKENS
        tl.store(token + at, new, mask=takes)
        tl.store(rows + pair * width + at, tl.where(takes, row, -1), mask=at < width)


@triton.jit(do_not_specialize=["width"])
def fetch(
    heap,
    page_stride,
    key_base,
    key_slot_stride,
    key_dim_stride,
    value_base,
    value_slot_stride,
    value_dim_stride,
    host,
    rows,
    pages,
    slots,
    width,
    head_dim,
    PAGE_TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """One program: SLOTS hot slots of a pair. ``host`` is pinned host memory."""
    at = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    entry = tl.program_id(1).to(tl.int64) * width + at
    row = tl.load(rows + entry, mask=at < width, other=-1)
    new = row >= 0
    page = tl.load(pages + entry, mask=new, other=0) * page_stride
    slot = tl.load(slots + entry, mask=new, other=0)
    dim = tl.arange(0, DIMS)
    mask = new[:, None] & (dim < head_dim)[None, :]
    source = host + row[:, None] * head_dim + dim[None, :]
    key = tl.load(source, mask=mask, other=0.0)
    value = tl.load(source + PAGE_TOKENS * head_dim, mask=mask, other=0.0)
    tl.store(
        heap
        + (page + key_base + slot * key_slot_stride)[:, None]
        + dim[None, :] * key_dim_stride,
        key,
        mask=mask,
    )
    tl.store(
        heap
        + (page + value_base + slot * value_slot_stride)[:, None]
        + dim[None, :] * value_dim_stride,
        value,
        mask=mask,
    )
