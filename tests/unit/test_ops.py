"""Page operations: compiled and torch versions against the oracles, bit for bit."""

from __future__ import annotations

import page_ops
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import make_layout

from vllm_kvplugins import ops
from vllm_kvplugins.ops import dispatch
from vllm_kvplugins.ops.layout import PageLayout

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]
SIZES = [(16, 64), (32, 80), (64, 128), (128, 64), (5, 3), (1, 1)]
LAYOUTS = ["natural", "interleaved", "transposed", "permuted"]
NUM_PAGES = 9
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def make_heap(layout: PageLayout, dtype: torch.dtype, seed: int, gap: int = 0):
    """Pages of random bits, NaN patterns among them, `gap` elements apart."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    bits = torch.randint(
        -(2 ** (8 * size - 1)),
        2 ** (8 * size - 1),
        (NUM_PAGES, layout.page_elems + gap),
        generator=generator,
    )
    return bits.to(BITS[size]).view(dtype)[:, : layout.page_elems]


def make_places(layout: PageLayout, n: int, seed: int):
    """n distinct (page, slot) pairs in random order."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(NUM_PAGES * layout.block_size, generator=generator)[:n]
    assert len(places) == n
    return places // layout.block_size, places % layout.block_size


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = BITS[expected.dtype.itemsize]
    assert torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits))


def check_all_ops(layout: PageLayout, dtype: torch.dtype, n: int, seed: int, gap=0):
    """Every op against its oracle on the same random arguments."""
    print(f"seed {seed}")
    heap = make_heap(layout, dtype, seed, gap)
    kv = ops.PagedKV(heap, layout)
    pages, slots = make_places(layout, 2 * n, seed)
    source, target = (pages[:n], slots[:n]), (pages[n:], slots[n:])

    before = heap.clone()
    keys, values = ops.gather_tokens(kv, *source)
    expected = page_ops.gather_tokens(kv, *source)
    assert_same_bits(keys, expected[0])
    assert_same_bits(values, expected[1])

    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(NUM_PAGES, (3, n % 5), generator=generator)
    assert_same_bits(ops.gather_keys(kv, table), page_ops.gather_keys(kv, table))
    assert_same_bits(ops.gather_values(kv, table), page_ops.gather_values(kv, table))
    assert_same_bits(heap, before)

    right = ops.PagedKV(before.clone(), layout)
    ops.move_tokens(kv, *source, *target)
    page_ops.move_tokens(right, *source, *target)
    assert_same_bits(heap, right.pages)

    ops.scatter_tokens(kv, *target, values, keys)
    page_ops.scatter_tokens(right, *target, values, keys)
    assert_same_bits(heap, right.pages)


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("block_size", "head_dim"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_oracle(backend, dtype, block_size, head_dim, kind):
    layout = make_layout(kind, block_size, head_dim, seed=block_size)
    for n in (0, 1, min(37, NUM_PAGES * block_size // 2)):
        check_all_ops(layout, dtype, n, seed=1000 * block_size + head_dim + n)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_pages_with_gaps_between_them(backend, kind):
    layout = make_layout(kind, 16, 64, seed=3)
    check_all_ops(layout, torch.bfloat16, n=20, seed=3, gap=24)


@pytest.mark.parametrize("sizes", [(1, 2), (4, 3)])
def test_a_plane_that_goes_backwards(backend, sizes):
    """The strides are regular, but torch has no view for them."""
    block_size, head_dim = sizes
    elements = torch.arange(2 * block_size * head_dim, dtype=torch.int32)
    keys, values = elements.chunk(2)
    for order in (keys.clone(), values.flip(0)), (keys.flip(0), values.clone()):
        layout = PageLayout(block_size, head_dim, *order)
        check_all_ops(layout, torch.float32, n=3, seed=block_size)


@settings(max_examples=30, deadline=None)
@given(
    block_size=st.integers(1, 40),
    head_dim=st.integers(1, 70),
    kind=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_fuzz_against_oracle(block_size, head_dim, kind, dtype, seed, data):
    n = data.draw(st.integers(0, NUM_PAGES * block_size // 2))
    layout = make_layout(kind, block_size, head_dim, seed)
    for name in available_backends():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVP_OPS", name)
            check_all_ops(layout, dtype, n, seed)


def available_backends() -> list[str]:
    return ["torch"] if dispatch.load_extension().reason else ["compiled", "torch"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_threads_do_not_change_the_result(backend, kind):
    """Large enough for the parallel loops; repeated to expose races."""
    layout = make_layout(kind, 128, 128, seed=7)
    pages, slots = make_places(layout, NUM_PAGES * 128, seed=7)
    n = len(pages) // 2
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 4, 4, 4):
            torch.set_num_threads(count)
            heap = make_heap(layout, torch.float32, seed=7)
            kv = ops.PagedKV(heap, layout)
            ops.move_tokens(kv, pages[:n], slots[:n], pages[n:], slots[n:])
            keys = ops.gather_keys(kv, pages[:8].view(2, 4))
            results.append((heap, keys))
    finally:
        torch.set_num_threads(threads)
    for heap, keys in results[1:]:
        assert_same_bits(heap, results[0][0])
        assert_same_bits(keys, results[0][1])


def test_non_contiguous_indices_and_rows(backend):
    layout = PageLayout.natural(16, 64)
    kv = ops.PagedKV(make_heap(layout, torch.float32, seed=5), layout)
    pages, slots = make_places(layout, 40, seed=5)
    keys, values = ops.gather_tokens(kv, pages[::2], slots[::2])
    expected = page_ops.gather_tokens(kv, pages[::2], slots[::2])
    assert_same_bits(keys, expected[0])
    table = pages.view(8, 5)[:, 1:3]
    assert_same_bits(ops.gather_keys(kv, table), page_ops.gather_keys(kv, table))
    wide = torch.stack([keys, values], dim=2)
    ops.scatter_tokens(kv, pages[1::2], slots[1::2], wide[..., 0], wide[..., 1])
    stored = ops.gather_tokens(kv, pages[1::2], slots[1::2])
    assert_same_bits(stored[0], keys)
    assert_same_bits(stored[1], values)


LAYOUT = PageLayout.natural(16, 8)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def a_heap() -> torch.Tensor:
    return make_heap(LAYOUT, torch.float32, seed=1)


def a_kv() -> ops.PagedKV:
    return ops.PagedKV(a_heap(), LAYOUT)


ROWS = torch.zeros(2, 8)


def with_pages(pages: torch.Tensor) -> ops.PagedKV:
    return ops.PagedKV(pages, LAYOUT)


BAD_CALLS = {
    "page too large": (
        lambda kv: ops.gather_tokens(kv, ids(0, 9), ids(0, 0)),
        r"gather_tokens: pages\[1\] is page 9, but the heap has pages 0 to 8",
    ),
    "page negative": (
        lambda kv: ops.scatter_tokens(kv, ids(-1, 0), ids(0, 0), ROWS, ROWS),
        r"scatter_tokens: pages\[0\] is page -1",
    ),
    "slot too large": (
        lambda kv: ops.gather_tokens(kv, ids(0, 1), ids(0, 16)),
        r"slots\[1\] is slot 16, but pages have slots 0 to 15",
    ),
    "slot negative": (
        lambda kv: ops.move_tokens(kv, ids(0), ids(0), ids(1), ids(-2)),
        r"move_tokens: dst_slots\[0\] is slot -2",
    ),
    "page in table": (
        lambda kv: ops.gather_keys(kv, ids(0, 77).view(1, 2)),
        r"page_table\[1\] is page 77",
    ),
    "duplicate destination of scatter": (
        lambda kv: ops.scatter_tokens(kv, ids(3, 3), ids(5, 5), ROWS, ROWS),
        r"destination 1 \(page 3, slot 5\) repeats an earlier one",
    ),
    "duplicate destination of move": (
        lambda kv: ops.move_tokens(
            kv, ids(0, 1, 2), ids(0, 0, 0), ids(4, 5, 4), ids(1, 1, 1)
        ),
        r"destination 2 \(page 4, slot 1\) repeats an earlier one",
    ),
    "source is destination": (
        lambda kv: ops.move_tokens(kv, ids(0, 4), ids(0, 1), ids(5, 4), ids(1, 1)),
        r"source 1 \(page 4, slot 1\) is also a destination",
    ),
    "sizes differ": (
        lambda kv: ops.gather_tokens(kv, ids(0, 1), ids(0)),
        r"slots must have 2 entries, got 1",
    ),
    "fewer destinations": (
        lambda kv: ops.move_tokens(kv, ids(0, 1), ids(0, 0), ids(2), ids(0)),
        r"dst_pages must have 2 entries, got 1",
    ),
    "index dtype": (
        lambda kv: ops.gather_tokens(kv, ids(0).int(), ids(0)),
        r"pages must be int64, got int32",
    ),
    "index dimensions": (
        lambda kv: ops.gather_values(kv, ids(0)),
        r"page_table must have 2 dimension\(s\), got shape \[1\]",
    ),
    "rows shape": (
        lambda kv: ops.scatter_tokens(kv, ids(0), ids(0), ROWS, ROWS),
        r"keys must have shape \[1, 8\], got \[2, 8\]",
    ),
    "rows dtype": (
        lambda kv: ops.scatter_tokens(kv, ids(0, 1), ids(0, 0), ROWS, ROWS.half()),
        r"values must be float32, got float16",
    ),
    "heap dtype": (
        lambda kv: ops.gather_tokens(with_pages(kv.pages.double()), ids(0), ids(0)),
        r"heap must be float32, float16, bfloat16 or uint8, got",
    ),
    "heap dimensions": (
        lambda kv: ops.gather_tokens(with_pages(kv.pages[0]), ids(0), ids(0)),
        r"heap must have 2 dimension\(s\), got shape \[256\]",
    ),
    "heap strides": (
        lambda kv: ops.gather_tokens(
            with_pages(kv.pages.t().contiguous().t()), ids(0), ids(0)
        ),
        r"heap must have contiguous pages that do not overlap, got strides \[1, 9\]",
    ),
    "heap of another layout": (
        lambda kv: ops.gather_tokens(with_pages(kv.pages[:, :251]), ids(0), ids(0)),
        r"heap pages must hold 2 \* block_size \* head_dim elements, got 251",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_refused(backend, case):
    call, message = BAD_CALLS[case]
    kv = a_kv()
    with pytest.raises(ValueError, match=message):
        call(kv)
    assert_same_bits(kv.pages, a_heap())  # a refused call does not change the heap


def test_offsets_outside_the_page_are_refused():
    """The op itself, which does not get a PageLayout, must stay inside the page."""
    if reason := dispatch.load_extension().reason:
        pytest.skip(f"no compiled ops: {reason}")
    table = LAYOUT.k_offsets.clone()
    table[3] = LAYOUT.page_elems
    with pytest.raises(RuntimeError, match=r"k_offsets\[3\] is offset 256"):
        torch.ops.kvp.gather_tokens(
            a_heap(), ids(0), ids(0), table, LAYOUT.v_offsets, 16
        )


class TestPageLayout:
    def test_interleaved_matches_its_definition(self):
        layout = PageLayout.interleaved(16, 64)
        for slot, dim in ((0, 0), (3, 5), (15, 63)):
            assert layout.k_offsets[slot * 64 + dim] == slot * 128 + dim
            assert layout.v_offsets[slot * 64 + dim] == slot * 128 + 64 + dim

    def test_strides(self):
        assert PageLayout.natural(16, 64).values.strides == (64, 1)
        assert PageLayout.interleaved(16, 64).values.strides == (128, 1)
        transposed = PageLayout.transposed_keys(16, 64)
        assert (transposed.keys.strides, transposed.values.strides) == (
            (1, 16),
            (64, 1),
        )
        assert transposed.values.base == 16 * 64
        assert PageLayout.interleaved(1, 1).keys.base == 0
        assert make_layout("permuted", 16, 64, seed=0).keys.strides is None

    def test_rows_are_named_to_kernels(self):
        """Ops cannot check tables on a device; see csrc/page_copy.cu."""

        def named(layout: PageLayout) -> tuple[int, ...]:
            return dispatch.layout_args(ops.PagedKV(a_heap(), layout))[3:]

        natural = PageLayout.natural(4, 2)
        assert named(natural) == (0, 8, 2)
        swapped = PageLayout(4, 2, natural.v_offsets, natural.k_offsets)
        assert named(swapped) == (8, 0, 2)
        assert named(PageLayout.interleaved(4, 2)) == (0, 2, 4)
        assert named(PageLayout.transposed_keys(4, 2)) == ()
        assert named(make_layout("permuted", 4, 2, seed=0)) == ()
        backwards = natural.k_offsets.view(4, 2).flip(0).reshape(-1)
        assert named(PageLayout(4, 2, backwards, natural.v_offsets)) == ()

    def test_transposed_matches_its_definition(self):
        layout = PageLayout.transposed_keys(16, 64)
        for slot, dim in ((0, 0), (3, 5), (15, 63)):
            assert layout.k_offsets[slot * 64 + dim] == dim * 16 + slot

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda k, v: (k.long(), v), "k_offsets must be int32, got torch.int64"),
            (
                lambda k, v: (k, v[:-1]),
                r"v_offsets must have shape .* = \[8\], got \[7\]",
            ),
            (lambda k, v: (k, k), "offset 0 is repeated or negative"),
            (lambda k, v: (k - 1, v), "offset -1 is repeated or negative"),
            (
                lambda k, v: (k, v + 1),
                "every element of a page once; element 8 is miss",
            ),
            (lambda k, v: (k, v.repeat_interleave(2)[::2]), "v_offsets must be contig"),
        ],
    )
    def test_bad_tables_are_refused(self, change, message):
        layout = PageLayout.natural(4, 2)
        with pytest.raises(ValueError, match=message):
            PageLayout(4, 2, *change(layout.k_offsets, layout.v_offsets))

    def test_bad_sizes_are_refused(self):
        with pytest.raises(ValueError, match="block_size must be positive, got 0"):
            PageLayout.natural(0, 2)

    def test_to_the_same_device_is_free(self):
        assert LAYOUT.to("cpu") is LAYOUT
