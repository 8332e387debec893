"""One suite for every attention kernel over page lists, against float64.

``tests/unit/test_suites.py`` runs it in its own process: on a GPU if there is one,
otherwise in Triton's interpreter, which is chosen at import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from layouts import make_layout

from vllm_kvplugins import ops
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

SEED = 20261122
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = [torch.bfloat16, torch.float16]
FLOATS = [*HALF, torch.float32]


@pytest.fixture(params=["triton"] if INTERPRETED else ["triton", "flash", "flashinfer"])
def kernel(request):
    """A kernel as a function of a case:

    ours, and on a GPU also vLLM's where it supports the case.
    """
    if request.param == "triton":
        return of_triton
    pytest.importorskip("vllm")
    if request.param == "flashinfer":
        pytest.importorskip("flashinfer")
        from vllm_kvplugins.vllm_adapter.config import kernel_choice

        if not kernel_choice._has_flashinfer_attention():
            pytest.skip("FlashInfer's attention kernels cannot be built")
    return partial(of_backend, request.param)


def of_triton(case, *, out=None, splits=None, fp8=None):
    from vllm_kvplugins.ops.triton.paged_attention import NewTokens, attend_paged

    one_each = max(case.asking) == min(case.asking) == 1
    starts = None if one_each else case.query_start
    return attend_paged(
        NewTokens(case.queries, starts, max(case.asking)),
        PagedKV(case.heap, case.layout),
        case.page_table,
        case.lengths,
        case.scale,
        case.coarse,
        rules=case.rules,
        fp8=fp8,
        out=out,
        splits=splits,
    )


def of_backend(name, case, *, out=None, splits=None):
    """A kernel of vLLM, which returns no log-sum-exp."""
    from backend_kernels import KERNELS

    if name == "flash":
        # With pages that are copied as tiles (TMA), FlashAttention 3 may multiply slots
        # after a sequence's end by weights of 0, which makes NaN of NaN. Large numbers
        # still show if a query attends to them.
        case = replace(case, heap=case.heap.nan_to_num(nan=1e3))
    plain = PageLayout.interleaved(case.layout.block_size, case.layout.head_dim)
    can = case.coarse is None and splits is None and case.queries.dtype in HALF
    can &= case.rules.plain
    can &= torch.equal(case.layout.k_offsets.cpu(), plain.k_offsets)
    if not can or (name == "flashinfer" and case.layout.head_dim not in (64, 128, 256)):
        pytest.skip("not for this kernel")
    actual = KERNELS[name](case)
    if out is not None:
        out.copy_(actual)
    return actual, None


@dataclass(frozen=True)
class Case:
    """The arguments of one call."""

    queries: torch.Tensor
    query_start: torch.Tensor
    heap: torch.Tensor
    layout: PageLayout
    page_table: torch.Tensor
    lengths: torch.Tensor
    scale: float
    coarse: CoarseEntries | None = None
    rules: LogitRules = PLAIN

    @property
    def asking(self) -> list[int]:
        return self.query_start.diff().tolist()

    def run(self, kernel, **options):
        return kernel(self, **options)

    def right(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Plain attention with all numbers of ``dtype``, and its log-sum-exp."""
        heads = len(self.lengths) // len(self.asking)
        group = self.queries.shape[1] // heads
        kv = PagedKV(self.heap.cpu(), self._layout)
        keys = ops.gather_keys(kv, self._pages)
        values = ops.gather_values(kv, self._pages)
        out = torch.zeros(self.queries.shape, dtype=dtype)
        lse = torch.full(self.queries.shape[:2], -torch.inf, dtype=dtype)
        starts = self.query_start.tolist()
        for i, length in enumerate(self.lengths.tolist()):
            row, head = divmod(i, heads)
            count = starts[row + 1] - starts[row]
            tokens = slice(starts[row], starts[row + 1])
            group_heads = slice(head * group, (head + 1) * group)
            query_rows = (
                self.queries[tokens, group_heads].cpu().to(dtype).transpose(0, 1)
            )
            later = torch.arange(length) > (
                length - count + torch.arange(count)[:, None]
            )
            own = self._own(i, dtype)
            scores = query_rows @ torch.cat([keys[i, :length].to(dtype), own[0]]).T
            added = torch.zeros(count, length).masked_fill(later, -torch.inf)
            added = torch.cat([added, own[2].expand(count, -1)], 1).to(dtype)
            scores = scores * self.scale
            if self.rules.softcap:
                scores = self.rules.softcap * (scores / self.rules.softcap).tanh()
            scores = scores + added
            width = scores.shape[-1]
            if self.rules.sinks is not None:
                sinks = self.rules.sinks[group_heads].cpu().to(dtype)
                sinks = sinks.view(-1, 1, 1).expand(-1, count, 1)
                scores = torch.cat([scores, sinks], -1)
            weights = scores.softmax(-1).nan_to_num(0)[..., :width]
            actual = weights @ torch.cat([values[i, :length].to(dtype), own[1]])
            out[tokens, group_heads] = actual.transpose(0, 1)
            lse[tokens, group_heads] = scores.logsumexp(-1).T
        return out.double(), lse.double()

    @property
    def _pages(self) -> torch.Tensor:
        return self.page_table.long().clamp(min=0).cpu()

    @property
    def _layout(self) -> PageLayout:
        return self.layout.to("cpu")

    def _own(self, sequence: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Keys, values and bias of a sequence's enabled entries."""
        if self.coarse is None:
            none = torch.zeros(0, self.layout.head_dim, dtype=dtype)
            return [none, none, torch.zeros(0)]
        keys, values, bias, starts, counts = (t.cpu() for t in self.coarse.tensors)
        run = starts[sequence] + torch.arange(int(counts[sequence]))
        run = run[bias[run] > -torch.inf]
        return [keys[run].to(dtype), values[run].to(dtype), bias[run]]


def make_case(
    dtype: torch.dtype,
    asking: list[int],
    lengths: list[int],
    head_dim: int = 64,
    group: int = 3,
    block: int = 32,
    kind: str = "interleaved",
    entries: list[int] | None = None,
    sharpness: float = 1.0,
) -> Case:
    """A case with shuffled pages; slots and entries that must not be read are NaN."""
    print("seed", SEED)
    random = torch.Generator().manual_seed(SEED)
    layout = make_layout(kind, block, head_dim, SEED)
    max_blocks = max(-(-length // block) for length in lengths)
    used = [-(-length // block) for length in lengths]
    pages = torch.randperm(sum(used) + 3, generator=random)
    heap = torch.full((len(pages), layout.page_elems), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max_blocks), len(pages) - 1, dtype=torch.int32)
    used_slots = 0
    for i, length in enumerate(lengths):
        table[i, : used[i]] = pages[used_slots : used_slots + used[i]].int()
        slot = torch.arange(length)
        draw = torch.randn(2, length, head_dim, generator=random).to(dtype)
        at = table[i, slot // block].long()
        ops.scatter_tokens(PagedKV(heap, layout), at, slot % block, *draw)
        used_slots += used[i]
    start = torch.tensor([0, *asking]).cumsum(0).int()
    heads = len(lengths) // len(asking)
    shape = (sum(asking), heads * group, head_dim)
    queries = sharpness * torch.randn(shape, generator=random)
    coarse = None if entries is None else some_entries(entries, head_dim, dtype, random)
    case = Case(
        queries.to(dtype), start, heap, layout, table,
        torch.tensor(lengths, dtype=torch.int32), head_dim**-0.5, coarse,
    )  # fmt: skip
    return on_device(case)


def some_entries(counts, head_dim, dtype, random) -> CoarseEntries:
    counts = torch.tensor(counts)
    starts = (counts + 2).flip(0).cumsum(0).flip(0) - counts
    total = int(counts.sum()) + 2 * len(counts) + 1
    keys, values = torch.randn(2, total, head_dim, generator=random).to(dtype)
    bias = torch.randint(1, 60, (total,), generator=random).float().log()
    hidden = torch.arange(total) % 7 == 3
    keys[hidden], values[hidden], bias[hidden] = torch.nan, torch.nan, -torch.inf
    return CoarseEntries(keys, values, bias, starts, counts)


def on_device(case: Case) -> Case:
    if DEVICE.type == "cpu":
        return case
    moved = {k: v.to(DEVICE) for k, v in vars(case).items() if hasattr(v, "to")}
    coarse = case.coarse
    if coarse is not None:
        moved["coarse"] = CoarseEntries(*(t.to(DEVICE) for t in coarse.tensors))
    return replace(case, **moved)


def assert_right(case: Case, kernel, **more) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors are at most twice those of torch in the type of the call."""
    out, lse = case.run(kernel, **more)
    exact, exact_lse = case.right(torch.float64)
    plain, _ = case.right(case.heap.dtype)
    assert out.dtype == case.queries.dtype
    assert out.isfinite().all()
    allowed = 2 * (plain - exact).abs().max() + 1e-6
    assert (out.cpu() - exact).abs().max() <= allowed
    if lse is not None:
        torch.testing.assert_close(lse.double().cpu(), exact_lse, rtol=1e-5, atol=1e-5)
    again, _ = case.run(kernel, **more)
    assert torch.equal(out, again)
    return out, lse


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_head_dims(kernel, dtype, head_dim):
    case = make_case(dtype, [1, 9], [100, 1, 70, 9], head_dim)
    assert_right(case, kernel)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_groups_and_page_sizes(kernel, group, block):
    lengths = [3 * block, 1, block + 1, 40, 200, 2 * block - 1]
    case = make_case(torch.bfloat16, [1, 1, 30], lengths, group=group, block=block)
    assert_right(case, kernel)


@pytest.mark.parametrize("kind", ["natural", "transposed"])
def test_other_layouts(kernel, kind):
    case = make_case(torch.float32, [1, 4], [40, 33, 100, 4], kind=kind)
    assert_right(case, kernel)


def test_pages_without_order_are_refused(kernel):
    case = make_case(torch.float32, [1], [4], kind="permuted")
    with pytest.raises(ValueError, match="rows or columns"):
        case.run(kernel)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_splits(kernel, splits):
    """Also with more splits than tiles."""
    case = make_case(torch.bfloat16, [1, 1], [300, 64, 1, 0], entries=[3, 0, 2, 9])
    assert_right(case, kernel, splits=splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_long_and_uneven_sequences(kernel, splits):
    case = make_case(torch.bfloat16, [1, 1], [9000, 1, 17, 2049], block=128)
    assert_right(case, kernel, splits=splits)


def test_many_requests(kernel):
    random = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(1, 90, (64,), generator=random).tolist()
    assert_right(make_case(torch.bfloat16, [1] * 64, lengths, block=16), kernel)


@pytest.mark.parametrize(
    ("group", "dtype"), [(1, torch.float32), (3, torch.bfloat16)], ids=str
)
def test_prefill_is_causal(kernel, group, dtype):
    """Several query blocks per row, and rows of all sizes between them."""
    asking = [150, 1, 64, 2]
    lengths = [150, 400, 7, 300, 64, 65, 2, 90]
    assert_right(make_case(dtype, asking, lengths, group=group), kernel)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_entries_share_the_softmax(kernel, dtype):
    lengths = [0, 1, 32, 97, 200, 3]
    case = make_case(dtype, [1, 1], lengths, entries=[4, 0, 6, 300, 0, 1])
    assert_right(case, kernel)


def test_only_entries_and_nothing_at_all(kernel):
    case = make_case(torch.float32, [1, 1], [1, 1], entries=[70, 0])
    nothing = replace(case, lengths=torch.zeros_like(case.lengths))
    out, lse = assert_right(nothing, kernel)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()
    assert (out[0] != 0).any()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_capped_logits_and_learned_sinks(kernel, softcap, has_sinks, splits, dtype):
    case = make_case(dtype, [1, 9], [300, 1, 70, 9], entries=[3, 0, 2, 9])
    random = torch.Generator().manual_seed(SEED)
    sinks = 3 * torch.randn(case.queries.shape[1], generator=random)
    rules = LogitRules(sinks.to(DEVICE) if has_sinks else None, softcap)
    plain, _ = case.run(kernel, splits=splits)
    ruled, _ = assert_right(replace(case, rules=rules), kernel, splits=splits)
    assert rules.plain or not torch.allclose(plain, ruled, atol=1e-2)


FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fp8_elements(dtype, splits, fp8):
    """Errors are at most twice those of torch with dequantized keys and values. Coarse
    entries next to them are plain.
    """
    from vllm_kvplugins.ops.triton.paged_attention import Fp8Elements

    scales = torch.tensor([0.5, 0.03125])
    case = make_case(dtype, [1, 9], [300, 1, 70, 9], entries=[3, 0, 2, 9])
    elements = case.heap.cpu().to(fp8)
    planes = (elements.to(dtype).view(-1, 2, case.layout.head_dim).mT * scales).mT
    heap = planes.reshape(elements.shape).to(dtype)
    of_fp8 = partial(of_triton, fp8=Fp8Elements(fp8, *scales.tolist()), splits=splits)
    exact, exact_lse = replace(case, heap=heap).right(torch.float64)
    plain, _ = replace(case, heap=heap).right(dtype)
    out, lse = replace(case, heap=elements.view(torch.uint8).to(DEVICE)).run(of_fp8)
    assert out.dtype == dtype
    assert (out.cpu() - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
    torch.testing.assert_close(lse.double().cpu(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_mixed_attention_over_fp8_pages(fp8):
    """As drafts are verified under retrieval: the caller applies the scales."""
    from vllm_kvplugins.ops.mixed_attention import _attend_on_gpu

    case = make_case(torch.float32, [1, 1], [300, 1, 70, 9])
    elements = case.heap.cpu().to(fp8)
    plain = replace(case, heap=elements.float())
    kv = PagedKV(elements.to(DEVICE), case.layout)
    out, lse = _attend_on_gpu(
        case.queries, kv, case.page_table, case.lengths, case.scale, None
    )
    expected, expected_lse = plain.right(torch.float64)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_every_fp8_element(fp8):
    """One token gets all the attention, so its values come out as they are."""
    from vllm_kvplugins.ops.triton.paged_attention import Fp8Elements

    case = make_case(torch.float32, [1], [1], head_dim=256, group=1)
    page, codes = int(case.page_table[0, 0]), torch.arange(256, dtype=torch.uint8)
    heap = torch.zeros(case.heap.shape, dtype=torch.uint8)
    values = codes[None]
    at, slot = torch.tensor([page]), torch.tensor([0])
    kv = PagedKV(heap, case.layout.to("cpu"))
    ops.scatter_tokens(kv, at, slot, torch.zeros_like(values), values)
    expected = codes.view(fp8).float()
    out, _ = replace(case, heap=heap.to(DEVICE)).run(
        partial(of_triton, fp8=Fp8Elements(fp8, 1.0, 2.0))
    )
    finite = expected.isfinite()
    assert finite.sum() >= 248
    assert torch.equal(out[0, 0].cpu()[finite], 2 * expected[finite])


def test_large_scores(kernel):
    """One token gets all the attention; nothing overflows."""
    case = make_case(torch.float32, [1, 3], [100, 7, 90, 30], sharpness=3e2)
    assert_right(case, kernel)


def test_queries_of_another_type(kernel):
    case = make_case(torch.bfloat16, [1, 1], [40, 50], entries=[3, 2])
    out, _ = replace(case, queries=case.queries.float()).run(kernel)
    exact, _ = case.right(torch.float64)
    torch.testing.assert_close(out.double().cpu(), exact, rtol=1e-5, atol=1e-5)


def test_output_goes_where_it_is_wanted(kernel):
    """Writes the first rows of a larger tensor, and nothing else."""
    case = make_case(torch.float32, [1, 1], [40, 50])
    large = torch.full((5, *case.queries.shape[1:]), 7.0, device=DEVICE)
    case.run(kernel, out=large[:2])
    exact, _ = case.right(torch.float64)
    torch.testing.assert_close(large[:2].double().cpu(), exact, rtol=1e-5, atol=1e-5)
    assert (large[2:] == 7).all()


def test_sums_are_float32_whatever_is_the_default(kernel):
    """vLLM builds models under a default dtype that differs from torch's."""
    case = make_case(torch.bfloat16, [1, 1], [300, 64, 1, 80])
    expected = case.run(kernel, splits=2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        actual = case.run(kernel, splits=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert actual[1].dtype == torch.float32
    for got, plain in zip(actual, expected, strict=True):
        assert torch.equal(got, plain)


def test_rows_without_tokens(kernel):
    """Padding at the end of a batch."""
    case = make_case(torch.bfloat16, [3, 1], [40, 50])
    start = torch.cat([case.query_start, case.query_start[-1:]])
    pad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    padded = replace(
        case,
        query_start=start,
        lengths=torch.cat([case.lengths, pad]),
        page_table=torch.cat([case.page_table, case.page_table[:1]]),
    )
    for got, expected in zip(padded.run(kernel), case.run(kernel), strict=True):
        assert got is expected is None or torch.equal(got, expected)
