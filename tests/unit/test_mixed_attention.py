"""Attention to pages and coarse entries, compiled and in torch, against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import page_ops
import pytest
import torch
from layouts import make_layout

from vllm_kvplugins import ops
from vllm_kvplugins.ops.layout import PageLayout

SEED = 20261122
DTYPES = [torch.float32, torch.bfloat16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
NUM_PAGES = 31


@dataclass(frozen=True)
class Case:
    """Arguments of a call."""

    queries: torch.Tensor
    heap: torch.Tensor
    layout: PageLayout
    page_table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    coarse: ops.CoarseEntries | None

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attend(ops.attend_mixed)

    def right(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's result, computed in ``dtype``, as float64."""
        out, lse = self.attend(partial(page_ops.attend_mixed, dtype=dtype))
        return out.double(), lse.double()

    def attend(self, op: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return op(
            self.queries,
            ops.PagedKV(self.heap, self.layout),
            self.page_table,
            self.lengths,
            self.scale,
            self.coarse,
        )


def make_case(
    layout: PageLayout,
    dtype: torch.dtype,
    group: int,
    lengths: list[int],
    entries: list[int],
    rows: int = 2,
    sharpness: float = 1.0,
    seed: int = SEED,
) -> Case:
    """A case with these lengths and numbers of entries per sequence; every seventh
    entry is disabled and NaN.

    Slots that no sequence attends to are NaN.
    """
    print("seed", seed)
    rng = torch.Generator().manual_seed(seed)
    block, dims = layout.block_size, layout.head_dim
    max_blocks = -(-max(lengths) // block)
    heap = torch.full((NUM_PAGES, layout.page_elems), torch.nan, dtype=dtype)
    # Ids after a sequence's last page are arbitrary.
    table = torch.full((len(lengths), max_blocks), -5, dtype=torch.int32)
    for sequence, length in enumerate(lengths):
        used = -(-length // block)
        pages = torch.randperm(NUM_PAGES, generator=rng)[:used]
        table[sequence, :used] = pages.int()
        slot = torch.arange(length)
        draw = [torch.randn(length, dims, generator=rng).to(dtype) for _ in range(2)]
        kv = ops.PagedKV(heap, layout)
        ops.scatter_tokens(kv, pages[slot // block], slot % block, *draw)
    # in reverse order, with unowned entries between them
    counts = torch.tensor(entries)
    starts = (counts + 2).flip(0).cumsum(0).flip(0) - counts
    total = int(counts.sum()) + 2 * len(entries) + 1
    keys, values = torch.randn(2, total, dims, generator=rng).to(dtype)
    bias = torch.randint(1, 60, (total,), generator=rng).log()
    off = torch.arange(total) % 7 == 3
    keys[off], values[off], bias[off] = math.nan, math.nan, -math.inf
    unowned = torch.ones(total, dtype=torch.bool)
    for start, count in zip(starts.tolist(), entries, strict=True):
        unowned[start : start + count] = False
    keys[unowned], values[unowned], bias[unowned] = math.nan, math.nan, math.nan
    heads = len(lengths) // rows * group
    queries = sharpness * torch.randn(rows, heads, dims, generator=rng)
    return Case(
        queries.to(dtype),
        heap,
        layout,
        table,
        torch.tensor(lengths, dtype=torch.int32),
        dims**-0.5,
        ops.CoarseEntries(keys, values, bias, starts, counts),
    )


def assert_right(case: Case) -> None:
    """Errors are at most twice those of a softmax in the dtype of the call."""
    out, lse = case.run()
    exact, exact_lse = case.right(torch.float64)
    plain, _ = case.right(case.heap.dtype)
    assert out.dtype == case.queries.dtype
    assert out.isfinite().all()
    allowed = 2 * (plain - exact).abs().max() + 1e-6
    assert (out - exact).abs().max() <= allowed
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", ["transposed", "natural", "interleaved", "permuted"])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(
    ("block", "dims"), [(16, 64), (32, 64), (16, 80), (32, 80), (32, 128), (5, 7)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_a_softmax_in_float64(backend, dtype, block, dims, group, kind):
    lengths = [0, 1, block, 3 * block + 1, 20 * block, 19 * block - 3]
    case = make_case(
        make_layout(kind, block, dims, SEED),
        dtype,
        group,
        lengths,
        [4, 0, 6, 300, 0, 1],
    )
    assert_right(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uniform_lengths_without_entries(backend, dtype):
    layout = PageLayout.transposed_keys(32, 64)
    case = make_case(layout, dtype, 3, [250] * 6, [0] * 6)
    assert_right(case)
    plain = replace(case, coarse=None)
    for result, same in zip(plain.run(), case.run(), strict=True):
        assert torch.equal(result, same)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_coarse_entries(backend, dtype):
    layout = PageLayout.natural(16, 64)
    case = make_case(layout, dtype, 2, [0] * 4, [9, 1, 700, 2])
    assert case.page_table.shape == (4, 0)
    assert_right(case)
    assert_right(replace(case, heap=case.heap[:0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores(backend, dtype):
    """Logits up to ±10,000: one token gets all the attention, and nothing overflows."""
    layout = PageLayout.transposed_keys(32, 64)
    case = make_case(
        layout, dtype, 3, [600, 31, 90, 1], [600, 3, 0, 9], sharpness=3000.0
    )
    _, lse = case.run()
    assert lse.abs().max() > 1e4
    exact, exact_lse = case.right(torch.float64)
    plain, _ = case.right(dtype)
    out, _ = case.run()
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=0)


def fp8_pages(case: Case, dtype: torch.dtype) -> tuple[Case, torch.Tensor]:
    """The case over pages of fp8, and the same pages as float32; unused slots NaN."""
    elements = case.heap.to(dtype)
    return replace(case, heap=elements), elements.float()


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", ["transposed", "natural", "interleaved", "permuted"])
@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("block", "dims"), [(16, 64), (32, 80), (32, 128), (5, 7)])
@pytest.mark.parametrize("queries", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_pages_of_fp8(backend, dtype, queries, block, dims, group, kind):
    """Errors are at most twice those of torch with dequantized keys and values in the
    dtype of the queries; the scales are no powers of two."""
    key_scale, value_scale = 0.3, 0.7
    lengths = [0, 1, block, 3 * block + 1, 20 * block, 19 * block - 3]
    layout = make_layout(kind, block, dims, SEED)
    plain = make_case(layout, torch.float32, group, lengths, [0] * 6)
    plain = replace(plain, queries=plain.queries.to(queries))
    case, values = fp8_pages(plain, dtype)
    scaled = replace(
        case, queries=case.queries.float(), scale=case.scale * key_scale, coarse=None
    )
    out, lse = scaled.run()
    out = (out * value_scale).to(queries)
    is_key = torch.zeros(layout.page_elems, dtype=torch.bool)
    is_key[layout.k_offsets.long()] = True
    dequantized = values * torch.where(is_key, key_scale, value_scale)
    exact, exact_lse = replace(case, heap=dequantized).right(torch.float64)
    rounded = replace(case, heap=dequantized.to(queries))
    torchs, _ = rounded.right(queries)
    assert out.isfinite().all()
    allowed = 2 * (torchs - exact).abs().max() + 1e-6
    assert (out - exact).abs().max() <= allowed
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_pages_of_fp8_give_the_bits_of_their_values(backend, dtype):
    """Also next to coarse entries."""
    layout = PageLayout.transposed_keys(32, 64)
    lengths = [600, 31, 0, 1]
    plain = make_case(layout, torch.float32, 3, lengths, [300, 3, 0, 9])
    case, values = fp8_pages(plain, dtype)
    for result, same in zip(case.run(), replace(case, heap=values).run(), strict=True):
        assert torch.equal(result, same)


def test_nothing_to_attend_to(backend):
    """No token, and no entry or only disabled ones."""
    case = make_case(PageLayout.natural(16, 64), torch.float32, 2, [0] * 4, [0] * 4)
    for count in (0, 5):
        rows = torch.full((4 * count, 64), torch.nan)
        off = torch.full((4 * count,), -torch.inf)
        counts = torch.full((4,), count)
        starts = torch.arange(4) * count
        coarse = ops.CoarseEntries(rows, rows, off, starts, counts)
        out, lse = replace(case, coarse=coarse).run()
        assert not out.any()
        assert lse.eq(-torch.inf).all()


def test_no_rows(backend):
    case = make_case(PageLayout.natural(16, 64), torch.float32, 2, [1] * 4, [0] * 4)
    coarse = ops.CoarseEntries.none(0, case.queries)
    none = replace(
        case,
        queries=case.queries[:0],
        page_table=case.page_table[:0],
        lengths=case.lengths[:0],
        coarse=coarse,
    )
    out, lse = none.run()
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_types_may_differ(backend):
    """Queries, pages and entries each have their own dtype."""
    case = make_case(
        PageLayout.transposed_keys(32, 64), torch.bfloat16, 3, [99, 700], [5, 40], 1
    )
    coarse = replace(
        case.coarse,
        keys=case.coarse.keys.float() * 1.001,
        values=case.coarse.values.float(),
    )
    mixed = replace(case, queries=case.queries.float() * 1.001, coarse=coarse)
    out, _ = mixed.run()
    exact, _ = mixed.right(torch.float64)
    plain, _ = mixed.right(torch.float32)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


def test_what_is_attended_to_is_read(backend):
    """NaN in a visible key or value reaches the output."""
    case = make_case(
        PageLayout.transposed_keys(32, 64), torch.float32, 2, [70, 70], [0, 0], 1
    )
    page = case.page_table[1, 2]
    case.heap[page, case.layout.k_offsets[5 * 64].long()] = torch.nan
    out, lse = case.run()
    assert out[0, :2].isfinite().all()
    assert out[0, 2:].isnan().all()
    assert lse[0, 2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_the_result(compiled, dtype):
    """Long enough for several splits and the parallel loops; repeated to expose
    races.
    """
    layout = PageLayout.transposed_keys(64, 128)
    case = make_case(layout, dtype, 3, [1900, 1100, 3, 640], [700, 0, 1300, 2])
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 2, 2):
            torch.set_num_threads(count)
            results.append(case.run())
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "scale": ({"scale": math.nan}, "scale must be finite, got nan"),
    "length": (
        {"lengths": torch.tensor([1, 33], dtype=torch.int32)},
        r"lengths\[1\] is 33, but page lists have room for 0 to 32 tokens",
    ),
    "negative": (
        {"lengths": torch.tensor([-1, 3], dtype=torch.int32)},
        r"lengths\[0\] is -1",
    ),
    "lengths": ({"lengths": torch.ones(3, dtype=torch.int32)}, "lengths must have sh"),
    "int64": ({"lengths": torch.ones(2, dtype=torch.int64)}, "lengths must be"),
    "page": (
        {"page_table": torch.tensor([[0, 1], [2, 31]], dtype=torch.int32)},
        r"page_table\[3\] is page 31, but the heap has pages 0 to 30",
    ),
    "tables": (
        {"page_table": torch.zeros(3, 2, dtype=torch.int32)},
        "queries must have a multiple of 3 KV heads",
    ),
    "heads": (
        {"queries": torch.zeros(1, 3, 64)},
        "queries must have a multiple of 2 KV heads",
    ),
    "rows": ({"queries": torch.zeros(3, 4, 64)}, "a row for each KV head of 3 rows"),
    "dims": ({"queries": torch.zeros(1, 4, 65)}, r"queries must have shape \[1, 4, 64"),
    "half": (
        {"queries": torch.zeros(1, 4, 64, dtype=torch.float16)},
        "queries must be float32 or bfloat16",
    ),
    "heap": (
        {"heap": torch.zeros(31, 2048, dtype=torch.float16)},
        "heap must be float32, bfloat16, float8_e4m3fn or float8_e5m2",
    ),
    "elements without a type": (
        {"heap": torch.zeros(31, 2048, dtype=torch.uint8)},
        "heap must be float32, bfloat16, float8_e4m3fn or float8_e5m2",
    ),
}
BAD_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "bias": (
        {"bias": torch.tensor([0.0] * 3 + [torch.nan] + [0.0] * 4)},
        r"bias\[3\] must be finite, or -infinity for an entry that is off",
    ),
    "infinite": ({"bias": torch.full((8,), torch.inf)}, r"bias\[6\] must be finite"),
    "behind": (
        {"starts": torch.tensor([0, 7])},
        r"starts\[1\] is 7, but a run must lie within the 8 entries",
    ),
    "before": ({"starts": torch.tensor([0, -1])}, r"starts\[1\] is -1"),
    "long": ({"counts": torch.tensor([9, 2])}, r"starts\[0\] is 6"),
    "negative": ({"counts": torch.tensor([1, -1])}, r"starts\[1\] is 2"),
    "starts": ({"starts": torch.tensor([0])}, r"starts must have shape \[2\]"),
    "counts": ({"counts": torch.tensor([1])}, r"counts must have shape \[2\]"),
    "counted": ({"counts": torch.tensor([1.0, 2.0])}, "counts must be "),
    "values": ({"values": torch.zeros(2, 64)}, r"coarse_values must have shape \[8, 6"),
    "type": (
        {"values": torch.zeros(8, 64, dtype=torch.bfloat16)},
        "coarse_values must be",
    ),
}


def good() -> Case:
    return make_case(PageLayout.natural(16, 64), torch.float32, 2, [20, 20], [1, 2], 1)


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(backend, name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=rf"kvp\.attend_mixed: .*{message}"):
        replace(good(), **change).run()


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_entries(backend, name):
    change, message = BAD_ENTRIES[name]
    case = good()
    with pytest.raises(ValueError, match=rf"kvp\.attend_mixed: .*{message}"):
        replace(case, coarse=replace(case.coarse, **change)).run()


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize(("block", "dims"), [(32, 64), (16, 80), (32, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_stock_kernel_on_a_heap(compiled, dtype, block, dims, group):
    """Both kernels read pages that the stock op wrote, without entries."""
    pytest.importorskip("vllm", reason="needs vLLM's CPU kernels")
    custom_ops = pytest.importorskip("vllm._custom_ops")
    backend = pytest.importorskip("vllm_kvplugins.vllm_adapter.attention.cpu")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block, dims)
    layout = backend.detect_layout(block, dims, dtype, isa)
    case = make_case(layout, dtype, group, [70, 1, 300, 33], [0] * 4)
    # The stock kernel multiplies slots after the last token by 0.
    case = replace(case, heap=case.heap.nan_to_num(), page_table=case.page_table.abs())
    start = torch.arange(5, dtype=torch.int32)
    metadata = custom_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=4,
        num_heads=group,
        num_kv_heads=1,
        head_dim=dims,
        seq_lens=case.lengths,
        dtype=dtype,
        query_start_loc=start,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )
    query = case.queries.view(4, group, dims)
    stock = torch.empty_like(query)
    halves = case.heap.view(NUM_PAGES, 1, 2 * block, dims).chunk(2, dim=2)
    custom_ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=halves[0],
        value_cache=halves[1],
        output=stock,
        query_start_loc=start,
        seq_lens=case.lengths,
        scale=case.scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=case.page_table,
        softcap=0,
        scheduler_metadata=metadata,
        s_aux=None,
    )
    actual = case.run()[0].view(stock.shape)
    rounding = 2**-7 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual, stock, rtol=rounding, atol=rounding)
