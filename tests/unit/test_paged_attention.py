"""vLLM's CPU kernel over the flat page view, without an engine.

Requests with and without a retained region, different page counts in every (layer, KV
head), partial last pages, and decode and prefill rows in one step. Every slot that no
page table refers to holds NaN, so that a read of one shows.

One exception: the kernel multiplies values beyond a sequence's end, but inside its last
page, by a weight of zero. NaN would spread there (in stock vLLM too), so these values
are huge instead; their keys are NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.engine.page_table import FlatTable, PageTables
from vllm_kvplugins.ops import PagedKV, gather_keys, gather_values

pytest.importorskip("vllm", reason="needs vLLM's CPU kernels")
custom_ops = pytest.importorskip("vllm._custom_ops")
backend = pytest.importorskip("vllm_kvplugins.vllm_adapter.attention.cpu")
flat = pytest.importorskip("vllm_kvplugins.vllm_adapter.attention.flat")

SEED = 20261121
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 3, 2, 3, 64
BLOCKS, BLOCK = 40, 32
PAGES = LAYERS * BLOCKS * KV_HEADS
SCALE = HEAD_DIM**-0.5
# Requests of a step: (mean zone pages, tail tokens, query tokens). 0 zone pages =
# never compacted; tail None = the zone ends in a full page.
ROWS = ((3, 17, 1), (0, 70, 40), (2, 5, 5), (1, 33, 1), (0, 1, 1), (4, 64, 7))
DECODE_ONLY = ((3, 17, 1), (0, 70, 1), (1, 32, 1))


def isa_of(dtype: torch.dtype) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, BLOCK, HEAD_DIM)


@dataclass
class Case:
    """A heap, its tables, and what they were made from.

    Attributes:
        slots: per layer, per sequence (row, KV head): heap slots to attend to,
            in order. Not read from the page table, which is under test.
    """

    heap: torch.Tensor  # [PAGES, page elements], packed by the stock write op
    keys: torch.Tensor  # [PAGES, BLOCK, HEAD_DIM]
    values: torch.Tensor
    table: FlatTable
    slots: list[list[torch.Tensor]]
    query_lens: list[int]


def write(heap: torch.Tensor, slots: torch.Tensor, k: Any, v: Any, isa: str) -> None:
    """Stock write of tokens to slots (page * BLOCK + slot) of the flat heap."""
    kv = heap.view(PAGES, 1, 2 * BLOCK, HEAD_DIM)
    halves = kv.chunk(2, dim=2)
    custom_ops.cpu_attn_reshape_and_cache(
        k.view(-1, 1, HEAD_DIM), v.view(-1, 1, HEAD_DIM), *halves, slots, isa
    )


def make_case(seed: int, dtype: torch.dtype, rows: Any, uniform: bool) -> Case:
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randn(PAGES, BLOCK, HEAD_DIM, generator=rng).to(dtype)
    values = torch.randn(PAGES, BLOCK, HEAD_DIM, generator=rng).to(dtype)
    heap = torch.zeros(PAGES, 2 * BLOCK * HEAD_DIM, dtype=dtype)
    isa = isa_of(dtype)
    everything = torch.arange(PAGES * BLOCK)
    write(heap, everything, keys, values, isa)

    blocks = (torch.randperm(BLOCKS - 1, generator=rng) + 1).tolist()
    tables = PageTables(LAYERS, KV_HEADS, BLOCKS, BLOCK, uniform, torch.device("cpu"))
    slots: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    slot_indices, seq_lens, block_rows = [], [], []
    for retained, tail, _ in rows:
        # Block indices below the tail are stale in vLLM's table: point at block 0.
        tail_block = retained + 2 if retained else 0
        tail_ids = [blocks.pop() for _ in range(-(-tail // BLOCK))]
        block_rows.append([0] * tail_block + tail_ids)
        seq_lens.append(tail_block * BLOCK + tail)
        own = torch.tensor([blocks.pop() for _ in range(retained)], dtype=torch.int64)
        pages, counts = page_ids(own), torch.full((LAYERS * KV_HEADS,), retained)
        if retained and not uniform:
            pages, counts = deal(pages.reshape(-1), LAYERS * KV_HEADS, rng)
        slot_indices.append(tables.assign(pages, counts, tail_block) if retained else 0)
        tail_pages = page_ids(torch.tensor(tail_ids))
        for index, (own_pages, count) in enumerate(zip(pages, counts, strict=True)):
            ids = torch.cat([own_pages[:count], tail_pages[index]])
            all_slots = ids[:, None] * BLOCK + torch.arange(BLOCK)
            length = int(count) * BLOCK + tail
            slots[index // KV_HEADS].append(all_slots.view(-1)[:length])
    width = max(map(len, block_rows))
    block_table = torch.tensor(
        [ids + [0] * (width - len(ids)) for ids in block_rows], dtype=torch.int32
    )
    table = tables.build(slot_indices, torch.tensor(seq_lens), block_table, seq_lens)
    query_lens = [query for _, _, query in rows]
    case = Case(heap, keys, values, table, slots, query_lens)
    poison_the_rest(case, isa)
    return case


def page_ids(blocks: torch.Tensor) -> torch.Tensor:
    """[LAYERS * KV_HEADS, blocks]: page of each block, for each layer and head."""
    layer = torch.arange(LAYERS)[:, None, None] * BLOCKS
    head = torch.arange(KV_HEADS)[None, :, None]
    return ((layer + blocks) * KV_HEADS + head).view(LAYERS * KV_HEADS, -1)


def poison_the_rest(case: Case, isa: str) -> None:
    """Fill all slots that no sequence attends to; see above."""
    attended = torch.zeros(PAGES, BLOCK, dtype=torch.bool)
    for layer in range(LAYERS):
        for slots in case.slots[layer]:
            attended.view(-1)[slots] = True
    unread = ~attended
    in_a_used_page = (unread & attended.any(1, keepdim=True))[unread]
    bad_slots = unread.view(-1).nonzero()[:, 0]
    assert in_a_used_page.any()
    assert not in_a_used_page.all()
    shape = (len(bad_slots), HEAD_DIM)
    keys = torch.full(shape, torch.nan, dtype=case.heap.dtype)
    values = keys.masked_fill(in_a_used_page[:, None], 1e30)
    write(case.heap, bad_slots, keys, values, isa)


def deal(
    pool: torch.Tensor, rows: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distribute all pages of ``pool`` at random, at least one for each row."""
    shuffled = pool[torch.randperm(len(pool), generator=rng)]
    extra = torch.randint(rows, (len(pool) - rows,), generator=rng)
    counts = 1 + torch.bincount(extra, minlength=rows)
    pages = torch.zeros(rows, int(counts.max()), dtype=torch.int64)
    for row, part in enumerate(shuffled.split(counts.tolist())):
        pages[row, : len(part)] = part
    return pages, counts


def attend(case: Case, layer: int, query: torch.Tensor) -> torch.Tensor:
    """The plugin's own call of the kernel, for one layer of the case."""
    dtype = case.heap.dtype
    lens = torch.tensor(case.query_lens)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    flat_start = torch.cat(
        [torch.zeros(1), lens.repeat_interleave(KV_HEADS).cumsum(0)]
    ).int()
    builder: Any = SimpleNamespace(
        num_heads=KV_HEADS * GROUP,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        isa=isa_of(dtype),
        kv_cache_dtype="auto",
    )
    schedule = backend.PagedPolicyMetadataBuilder._schedule
    metadata: Any = SimpleNamespace(
        num_actual_tokens=len(query),
        flat_query_start=flat_start,
        order=flat.flat_order(start, KV_HEADS) if int(lens.max()) > 1 else None,
        scopes=[
            backend.Scope(pages, lengths, schedule(builder, lengths, flat_start))
            for pages, lengths in zip(case.table.pages, case.table.lengths, strict=True)
        ],
    )
    impl: Any = SimpleNamespace(
        num_kv_heads=KV_HEADS,
        num_queries_per_kv=GROUP,
        head_size=HEAD_DIM,
        scale=SCALE,
        kv_cache_dtype="auto",
        kv_scales=(1.0, 1.0),
        sinks=None,
        logits_soft_cap=0,
        layer_index=layer,
        runtime=SimpleNamespace(heap=SimpleNamespace(pages=case.heap)),
    )
    of_layer = case.heap.view(LAYERS, BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_DIM)[layer]
    output = torch.full_like(query, 7.0)
    impl.heap = impl.runtime.heap
    impl.scope = functools.partial(backend.PagedPolicyImpl.scope, impl)
    impl._kernel = functools.partial(backend.PagedPolicyImpl._kernel, impl)
    backend.PagedPolicyImpl.attend(impl, query, of_layer, metadata, output)
    return output


def expected(
    case: Case, layer: int, query: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Plain causal attention of every (row, KV head), computed in ``dtype``.

    Query j of q sees all but the last q - 1 - j tokens of its sequence.
    """
    flat_keys = case.keys.view(-1, HEAD_DIM).to(dtype)
    flat_values = case.values.view(-1, HEAD_DIM).to(dtype)
    out = torch.empty(query.shape, dtype=dtype)
    first = 0
    for row, count in enumerate(case.query_lens):
        for head in range(KV_HEADS):
            slots = case.slots[layer][row * KV_HEADS + head]
            heads = slice(head * GROUP, (head + 1) * GROUP)
            q = query[first : first + count, heads].to(dtype)
            logits = torch.einsum("tgd,sd->gts", q, flat_keys[slots]) * SCALE
            visible = len(slots) - count + torch.arange(count)[:, None]
            logits.masked_fill_(torch.arange(len(slots)) > visible, -torch.inf)
            weights = logits.softmax(-1)
            part = torch.einsum("gts,sd->tgd", weights, flat_values[slots])
            out[first : first + count, heads] = part
        first += count
    return out


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "per-head"])
@pytest.mark.parametrize("rows", [ROWS, DECODE_ONLY], ids=["mixed", "decode"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_are_attended_as_written_and_nothing_else(dtype, rows, uniform):
    for seed in (SEED, SEED + 1):
        print("seed", seed)
        case = make_case(seed, dtype, rows, uniform)
        rng = torch.Generator().manual_seed(seed + 1)
        tokens = sum(case.query_lens)
        shape = (tokens, KV_HEADS * GROUP, HEAD_DIM)
        query = torch.randn(shape, generator=rng).to(dtype)
        for layer in range(LAYERS):
            actual = attend(case, layer, query).double()
            exact = expected(case, layer, query, torch.float64)
            plain = expected(case, layer, query, dtype).double()
            assert actual.isfinite().all(), "a slot that is not resident was read"
            allowed = 2 * (plain - exact).abs().max() + 1e-6
            assert (actual - exact).abs().max() <= allowed


def test_page_counts_differ_between_heads_in_that_test():
    case = make_case(SEED, torch.float32, ROWS, uniform=False)
    assert len(set(case.table.lengths[:, 0].tolist())) > 1
    assert len(case.table.pages) == LAYERS


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
@settings(deadline=None)
def test_flat_order_lists_row_head_token(lens, heads):
    start = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()])
    reference = [
        (int(start[row]) + token) * heads + head
        for row, count in enumerate(lens)
        for head in range(heads)
        for token in range(count)
    ]
    assert flat.flat_order(start, heads).tolist() == reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block", "dim"), [(32, 64), (64, 32), (32, 80), (128, 128)])
def test_learned_layout_reads_what_the_stock_op_wrote(dtype, block, dim):
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    print("seed", SEED)
    isa = _get_attn_isa(dtype, block, dim)
    layout = backend.detect_layout(block, dim, dtype, isa)
    rng = torch.Generator().manual_seed(SEED)
    pages, kept = 5, 3 * block + 7
    heap = torch.zeros(pages, 2 * block * dim, dtype=dtype)
    halves = heap.view(pages, 1, 2 * block, dim).chunk(2, dim=2)
    slots = torch.randperm(pages * block, generator=rng)[:kept]
    keys = torch.randn(kept, 1, dim, generator=rng).to(dtype)
    values = torch.randn(kept, 1, dim, generator=rng).to(dtype)
    custom_ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, isa)
    kv, table = PagedKV(heap, layout), torch.arange(pages)[None]
    assert torch.equal(gather_keys(kv, table)[0, slots], keys[:, 0])
    assert torch.equal(gather_values(kv, table)[0, slots], values[:, 0])
    untouched = torch.ones(pages * block, dtype=torch.bool)
    untouched[slots] = False
    assert not gather_keys(kv, table)[0, untouched].any()
