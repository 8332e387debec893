"""Bulk copies of pages: compiled and torch against loops over pages, bit for bit."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins import ops
from vllm_kvplugins.ops import dispatch

# 1, 2, 4 and 8 bytes; torch has hardly any operations for floats of one byte.
DTYPES = [
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.int64,
]
# Below, at and above a block, a cache line and 4 KiB; odd sizes; one element.
SIZES = [1, 3, 63, 64, 257, 1000, 2048, 4096, 4099, 8192, 13001]


def available_backends() -> list[str]:
    return ["torch"] if dispatch.load_extension().reason else ["compiled", "torch"]


def make_pages(num_pages, page_elems, dtype, generator, gap=0, offset=0):
    """Pages of random bits, NaN patterns among them, `gap` elements apart, from
    element `offset` of an allocation."""
    size = dtype.itemsize
    count = offset + num_pages * (page_elems + gap)
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    pages = raw.view(dtype)[offset:].view(num_pages, page_elems + gap)
    return pages[:, :page_elems]


def bits(pages: torch.Tensor) -> torch.Tensor:
    """The bytes of the whole allocation, with gaps and both margins."""
    return torch.empty(0, dtype=torch.uint8).set_(pages.untyped_storage()).clone()


def copy_one_by_one(target, target_ids, source, source_ids, n) -> None:
    for i in range(n):
        to = i if target_ids is None else int(target_ids[i])
        of = i if source_ids is None else int(source_ids[i])
        target[to].view(torch.uint8).copy_(source[of].view(torch.uint8))


def check_copy(dtype, page_elems, n, seed, orders, gap=0, offset=0):
    """One bulk copy against single copies, on the same random arguments."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    num_target, num_source = n + 5, n + 3
    target = make_pages(num_target, page_elems, dtype, generator, gap, offset)
    source = make_pages(num_source, page_elems, dtype, generator, 2 * gap, offset // 2)
    target_ids = source_ids = None
    if "t" in orders:
        target_ids = torch.randperm(num_target, generator=generator)[:n]
    if "s" in orders:
        source_ids = torch.randint(num_source, (n,), generator=generator)
    count = n if orders else num_source
    before, original = bits(source), bits(target)
    copy_one_by_one(target, target_ids, source, source_ids, count)
    expected = bits(target)
    torch.empty(0, dtype=torch.uint8).set_(target.untyped_storage()).copy_(original)
    ops.copy_pages(target, target_ids, source, source_ids)
    assert torch.equal(bits(target), expected)
    assert torch.equal(bits(source), before)


@pytest.mark.each_pair
@pytest.mark.parametrize("orders", ["", "t", "s", "ts"])
@pytest.mark.parametrize("page_elems", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_single_copies(backend, dtype, page_elems, orders):
    for n in (0, 1, 9):
        check_copy(dtype, page_elems, n, 100 * page_elems + n, orders)


@pytest.mark.parametrize("orders", ["t", "s", "ts"])
def test_pages_with_gaps_at_odd_addresses(backend, orders):
    check_copy(torch.uint8, 4099, 9, seed=1, orders=orders, gap=13, offset=7)
    check_copy(torch.bfloat16, 4096, 9, seed=2, orders=orders, gap=1, offset=3)


@pytest.mark.parametrize("page_elems", [1 << 20, 8192, 7777])
def test_large_copies_stream(backend, page_elems):
    """Above the threshold of streaming stores, aligned and not."""
    n = (9 << 20) // page_elems
    for offset in (0, 5):
        check_copy(torch.uint8, page_elems, n, page_elems, "ts", offset, offset)


@settings(max_examples=60, deadline=None)
@given(
    page_elems=st.integers(1, 6000),
    n=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    orders=st.sampled_from(["", "t", "s", "ts"]),
    gap=st.integers(0, 70),
    offset=st.integers(0, 70),
    seed=st.integers(0, 2**31),
)
def test_fuzz(page_elems, n, dtype, orders, gap, offset, seed):
    for name in available_backends():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVP_OPS", name)
            check_copy(dtype, page_elems, n, seed, orders, gap, offset)


def test_threads_do_not_change_the_result(backend):
    """Large enough for the parallel, streaming loop; repeated to expose races."""
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4, 4):
            torch.set_num_threads(count)
            check_copy(torch.uint8, 8191, 1200, seed=5, orders="ts")
    finally:
        torch.set_num_threads(threads)


def test_gather_then_scatter_is_the_identity(backend):
    heap = torch.randn(16, 2, 8, 32)
    before = heap.clone()
    ids = torch.tensor([3, 15, 0, 7])
    staging = torch.empty(6, 2 * 8 * 32)
    ops.copy_pages(staging, None, heap, ids)
    assert torch.equal(staging[:4].view(4, 2, 8, 32), heap[ids])
    heap[ids] = 0
    ops.copy_pages(heap, ids, staging, None)
    assert torch.equal(heap, before)


def test_pages_without_elements(backend):
    """There is nothing to copy, but ids are still checked."""
    target, source = torch.empty(3, 0), torch.empty(2, 0)
    ops.copy_pages(target, None, source, None)
    ops.copy_pages(target, ids(1, 2), source, ids(1, 0))
    assert target.shape == (3, 0)
    with pytest.raises(ValueError, match="target_ids"):
        ops.copy_pages(target, ids(3), source, ids(0))
    with pytest.raises(ValueError, match="source_ids"):
        ops.copy_pages(target, ids(0), source, ids(2))


def test_one_dimension_means_pages_of_one_element(backend):
    target = torch.zeros(4)
    ops.copy_pages(target, torch.tensor([2, 0]), torch.tensor([5.0, 6.0]), None)
    assert target.tolist() == [6, 0, 5, 0]


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


PAGES = torch.arange(24.0).view(6, 4)
COMPLEX = torch.zeros(2, 4, dtype=torch.complex128)
# name -> (target, target_ids, source, source_ids), part of the error message
FAULTS = {
    "target page too large": (
        (torch.zeros(3, 4), ids(0, 3), PAGES, None),
        "target_ids[1] is page 3, but target has pages 0 to 2",
    ),
    "target page negative": (
        (torch.zeros(3, 4), ids(-1), PAGES, None),
        "target_ids[0] is page -1, but target has pages 0 to 2",
    ),
    "source page too large": (
        (torch.zeros(3, 4), None, PAGES, ids(1, 2, 6)),
        "source_ids[2] is page 6, but source has pages 0 to 5",
    ),
    "target page repeats": (
        (torch.zeros(3, 4), ids(2, 1, 2), PAGES, None),
        "target_ids[2] (page 2) repeats an earlier one; target pages must differ",
    ),
    "numbers of ids differ": (
        (torch.zeros(3, 4), ids(2, 1), PAGES, ids(3)),
        "source_ids must have 2 entries, got 1",
    ),
    "ids are int32": (
        (torch.zeros(3, 4), ids(2, 1).int(), PAGES, None),
        "target_ids must be ",
    ),
    "ids are a matrix": (
        (torch.zeros(3, 4), None, PAGES, ids(2, 1).view(1, 2)),
        "source_ids must have 1 dimension(s), got shape [1, 2]",
    ),
    "target too small": (
        (torch.zeros(3, 4), None, PAGES, None),
        "target has 3 pages, but 6 are copied in order",
    ),
    "source too small": (
        (torch.zeros(8, 4), ids(7, 6, 5, 4, 3, 2, 1), PAGES, None),
        "source has 6 pages, but 7 are copied in order",
    ),
    "pages differ in size": (
        (torch.zeros(6, 5), None, PAGES, None),
        "pages of source must have the size of target's, got 16 and 20 bytes",
    ),
    "dtypes differ": (
        (torch.zeros(6, 4, dtype=torch.int32), None, PAGES, None),
        "source must be ",
    ),
    "elements of 16 bytes": (
        (COMPLEX, None, COMPLEX.clone(), None),
        "target must have elements of 1, 2, 4 or 8 bytes, got ",
    ),
    "pages not contiguous": (
        (torch.zeros(4, 6).t(), None, PAGES, None),
        "target must have contiguous pages that do not overlap, got shape [6, 4] "
        "with strides [1, 6]",
    ),
    "pages overlap": (
        (torch.zeros(6, 4), None, torch.zeros(10).as_strided((6, 4), (1, 1)), None),
        "source must have contiguous pages that do not overlap, got shape [6, 4] "
        "with strides [1, 1]",
    ),
    "a scalar": (
        (torch.tensor(1.0), None, PAGES, None),
        "target must be [num_pages, ...], got a scalar",
    ),
    "shared memory": (
        (PAGES, ids(5), PAGES[:1], None),
        "target and source must not share memory",
    ),
    "one byte of shared memory": (
        (PAGES.view(-1)[3:7].view(1, 4), None, PAGES[:1], None),
        "target and source must not share memory",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(backend, fault):
    (target, target_ids, source, source_ids), message = FAULTS[fault]
    before = bits(target)
    with pytest.raises(ValueError, match=re.escape(f"kvp.copy_pages: {message}")):
        ops.copy_pages(target, target_ids, source, source_ids)
    assert torch.equal(bits(target), before)


def test_neighbours_in_one_allocation_are_apart(backend):
    heap = torch.arange(24.0).view(6, 4)
    ops.copy_pages(heap[:3], None, heap[3:], None)
    assert torch.equal(heap[:3], heap[3:])


def test_ids_may_have_strides(backend):
    target = torch.zeros(6, 4)
    ops.copy_pages(target, ids(5, 9, 0, 9)[::2], PAGES, ids(1, 9, 4, 9)[::2])
    assert torch.equal(target[[5, 0]], PAGES[[1, 4]])
    assert target[1:5].sum() == 0
