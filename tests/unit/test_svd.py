"""Truncated decompositions and reconstruction, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spectra import make_rows, spans_of, whole

from vllm_kvplugins.ops import dispatch, svd

SEED = 20261122
DTYPES = [torch.float32, torch.bfloat16]
DIM = 64


@pytest.fixture
def random():
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


def best_error(rows: torch.Tensor, rank: int) -> float:
    """The error bound for any matrix of that rank (Eckart and Young)."""
    return float(torch.linalg.svdvals(rows.double())[rank:].norm())


def error(rows: torch.Tensor, low_rank: svd.LowRank, matrix: int = 0) -> float:
    """The product of the factors in float64."""
    scaled = low_rank.left(matrix).double() * low_rank.singular_values(matrix)
    return float((rows.double() - scaled @ low_rank.right(matrix).double().t()).norm())


# -- decomposition --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["flat", "low-rank", "decaying"])
@pytest.mark.parametrize("shape", [(1, 64), (16, 64), (50, 80), (64, 64), (300, 128)])
def test_error_is_the_best_that_a_rank_allows(backend, random, kind, shape):
    rows = make_rows(kind, 1, *shape, random)
    norm, size = float(rows.norm()), min(shape)
    for rank in (1, 8, 32):
        decomposed = svd.truncated_svd(rows, *whole(shape[0]), rank)
        best = best_error(rows[0], rank)
        assert error(rows[0], decomposed) <= 1.05 * best + 2e-6 * norm
        if kind != "low-rank":
            assert decomposed.ranks.tolist() == [min(rank, size)]
        else:
            assert decomposed.ranks.tolist() == [min(rank, size, 5)]
        bf16_factors = svd.truncated_svd(
            rows, *whole(shape[0]), rank, dtype=torch.bfloat16
        )
        assert bf16_factors.ranks.equal(decomposed.ranks)
        assert error(rows[0], bf16_factors) <= 1.05 * best + 0.006 * norm


@pytest.mark.parametrize("dim", [64, 65, 128])
@pytest.mark.parametrize("factor_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_where_factors_are_no_smaller(backend, random, dtype, factor_dtype, dim):
    """Equation 18 counts rank * (tokens + dim + 1) numbers, against tokens * dim."""
    sizes = (16, 0, 33, 1, 40, 50, 64, 66, 67, 90, 200)
    lengths = torch.tensor(sizes)
    starts = lengths.cumsum(0) - lengths
    rows = make_rows("flat", 2, sum(sizes), dim, random).to(dtype)
    given = starts, lengths, 32, 1.0, factor_dtype
    small = svd.truncated_svd(rows, *given, rows_if_smaller=True)
    factors = svd.truncated_svd(rows, *given)
    again = svd.reconstruct(small, torch.arange(len(small)), torch.float32)
    restored = again.split(lengths.repeat(2).tolist())
    as_factors = svd.reconstruct(factors, torch.arange(len(small)), torch.float32)
    approximate = as_factors.split(lengths.repeat(2).tolist())
    for matrix, size in enumerate([*sizes, *sizes]):
        elements = small.offsets.diff()[matrix]
        padding = 0 if factor_dtype == torch.float32 else size * dim % 2
        assert elements <= size * dim + padding
        assert elements <= factors.offsets.diff()[matrix]
        if int(small.ranks[matrix]) == svd.ROWS:
            plane, span = divmod(matrix, len(sizes))
            exact = rows[plane, starts[span] : starts[span] + size].to(factor_dtype)
            assert small.rows(matrix).equal(exact)
            assert restored[matrix].equal(exact.float())
        else:
            assert elements < size * dim
            assert restored[matrix].equal(approximate[matrix])
    stored_as_rows = {s for s, r in zip(sizes, small.ranks, strict=False) if r < 0}
    longest = {64: 65, 65: 64, 128: 43}[dim]  # from equation 18, without padding
    assert {s for s in sizes if 0 < s <= longest} <= stored_as_rows
    assert stored_as_rows.isdisjoint({90, 200})


def test_rows_must_be_finite_too(backend, random):
    rows = make_rows("flat", 1, 20, DIM, random)
    rows[0, 7, 3] = torch.inf
    with pytest.raises(ValueError, match="span 0 of plane 0 holds NaN or infinities"):
        svd.truncated_svd(rows, *whole(20), 32, rows_if_smaller=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_span_of_every_plane(backend, random, dtype):
    starts, lengths = spans_of(16, 0, 33, 1, 64, 33, 90)
    tokens = int(starts[-1] + lengths[-1])
    wide = make_rows("decaying", 3, tokens, DIM + 8, random).to(dtype)
    rows = wide[..., 3 : 3 + DIM]  # rows with gaps between them
    decomposed = svd.truncated_svd(rows, starts, lengths, 12)
    assert decomposed.factors.dtype == dtype
    assert len(decomposed) == 3 * 7
    assert decomposed.tokens.tolist() == 3 * lengths.tolist()
    for plane in range(3):
        for span, (start, length) in enumerate(
            zip(starts.tolist(), lengths.tolist(), strict=True)
        ):
            matrix = plane * 7 + span
            part = rows[plane, start : start + length].double()
            rank = min(length, 12)
            assert decomposed.ranks[matrix] == rank
            right = torch.linalg.svdvals(part)[:rank]
            sigma = decomposed.singular_values(matrix).double()
            torch.testing.assert_close(sigma, right, rtol=2e-3, atol=1e-5)
            loose = 1e-4 if dtype == torch.float32 else 0.03
            for factor in (decomposed.left(matrix), decomposed.right(matrix)):
                gram = factor.double().t() @ factor.double()
                assert (gram - torch.eye(rank)).abs().max() < loose if rank else True


def test_size_is_that_of_equation_18(backend, random):
    """``r (|S| + d + 1) b`` for each of keys and values, heads and layers."""
    starts, lengths = spans_of(16, 40, 7)
    rows = make_rows("flat", 4, 80, DIM, random)
    decomposed = svd.truncated_svd(rows, starts, lengths, 8)
    shapes = list(
        zip(decomposed.ranks.tolist(), decomposed.tokens.tolist(), strict=True)
    )
    values = sum(rank * (tokens + DIM + 1) for rank, tokens in shapes)
    assert decomposed.nbytes == values * 4
    assert decomposed.offsets[-1] == decomposed.factors.numel() == values
    bf16_factors = svd.truncated_svd(rows, starts, lengths, 8, dtype=torch.bfloat16)
    # float32 singular values take two elements each; records have even sizes
    pairs = [-(-rank * (tokens + DIM + 2) // 2) for rank, tokens in shapes]
    assert bf16_factors.nbytes == 4 * sum(pairs)
    assert bf16_factors.offsets.diff().tolist() == [2 * pair for pair in pairs]
    assert 7 * (7 + DIM + 2) % 2 == 1, "a span whose record is filled up"


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999])
def test_energy_sets_the_smallest_rank_that_keeps_it(backend, random, energy):
    starts, lengths = spans_of(16, 40, 64)
    rows = make_rows("decaying", 2, 130, DIM, random)
    decomposed = svd.truncated_svd(rows, starts, lengths, 64, energy)
    for matrix in range(6):
        start, length = int(starts[matrix % 3]), int(lengths[matrix % 3])
        part = rows[matrix // 3, start : start + length].double()
        squares = torch.linalg.svdvals(part).square()
        rank = int(decomposed.ranks[matrix])
        assert squares[:rank].sum() >= energy * squares.sum()
        assert squares[: rank - 1].sum() < energy * squares.sum()
    capped = svd.truncated_svd(rows, starts, lengths, 2, energy)
    assert capped.ranks.equal(decomposed.ranks.clamp(max=2))


def test_what_has_no_full_rank(backend, random):
    rows = torch.zeros(4, 20, DIM)
    rows[1] = torch.randn(DIM, generator=random)  # all rows the same
    rows[2, ::2] = torch.randn(10, DIM, generator=random)
    rows[2, 1::2] = rows[2, ::2]  # each twice
    rows[3, 7, 5] = -3.0
    decomposed = svd.truncated_svd(rows, *whole(20))
    assert decomposed.ranks.tolist() == [0, 1, 10, 1]
    for plane in range(4):
        assert error(rows[plane], decomposed, plane) <= 1e-5 * float(rows[plane].norm())
    assert decomposed.factors.isfinite().all()
    assert svd.reconstruct(decomposed, torch.tensor([0])).equal(torch.zeros(20, DIM))


def test_a_singular_value_that_float32_cannot_hold_is_none(backend):
    """The singular values of this matrix are 6.5 and 0.46 times the smallest float."""
    rows = torch.tensor([[[3, 3], [3, 4]]], dtype=torch.int32).view(torch.float32)
    decomposed = svd.truncated_svd(rows, *whole(2))
    assert decomposed.ranks.tolist() == [1]
    assert decomposed.singular_values(0).view(torch.int32).tolist() in ([6], [7])


def test_numbers_without_a_decomposition_are_refused(backend, random):
    starts, lengths = spans_of(10, 70, 10)
    rows = make_rows("flat", 3, 96, DIM, random)
    for wrong in (float("nan"), float("inf"), -float("inf")):
        broken = rows.clone()
        broken[1, 10, 0] = wrong  # between the spans
        svd.truncated_svd(broken, starts, lengths)
        broken[1, 81, 3] = wrong
        with pytest.raises(ValueError, match=r"span 1 of plane 1 holds NaN"):
            svd.truncated_svd(broken, starts, lengths)
    with pytest.raises(ValueError, match=r"span 0 of plane 0 .* beyond float32"):
        svd.truncated_svd(torch.full((1, 9, DIM), 3e38), *whole(9))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 90),
    dim=st.integers(1, 70),
    rank=st.integers(1, 40),
    kind=st.sampled_from(["flat", "low-rank", "decaying"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_compiled_and_torch_agree(tokens, dim, rank, kind, dtype, seed):
    """Equal ranks, sizes and products; vectors may differ in sign."""
    if reason := dispatch.load_extension().reason:
        pytest.skip(f"no compiled ops: {reason}")
    random = torch.Generator().manual_seed(seed)
    rows = make_rows(kind, 2, tokens, dim, random)
    decomposed = {}
    for name in ("compiled", "torch"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVP_OPS", name)
            decomposed[name] = svd.truncated_svd(
                rows, *whole(tokens), rank, dtype=dtype
            )
    compiled, reference = decomposed["compiled"], decomposed["torch"]
    assert compiled.ranks.equal(reference.ranks)
    assert compiled.offsets.equal(reference.offsets)
    for matrix in range(2):
        norm = float(rows[matrix].norm())
        loose = 0.006 if dtype == torch.bfloat16 else 2e-6
        theirs_error = error(rows[matrix], reference, matrix)
        assert (
            error(rows[matrix], compiled, matrix) <= 1.05 * theirs_error + loose * norm
        )


def test_threads_do_not_change_the_result(random):
    if reason := dispatch.load_extension().reason:
        pytest.skip(f"no compiled ops: {reason}")
    rows = make_rows("flat", 6, 400, DIM, random)
    starts = torch.arange(0, 400, 50)
    lengths = torch.tensor([50, 40, 1, 50, 33, 16, 50, 50])
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            decomposed = svd.truncated_svd(rows, starts, lengths, 24)
            results.append(
                (decomposed.factors, svd.reconstruct(decomposed, torch.arange(48)))
            )
    finally:
        torch.set_num_threads(threads)
    for factors, rebuilt in results[1:]:
        assert factors.equal(results[0][0])
        assert rebuilt.equal(results[0][1])


# -- refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(20, DIM)}, "rows must have 3"),
        ({"rows": torch.zeros(2, DIM, 20).mT}, "must be contiguous"),
        ({"rows": torch.zeros(2, 20, DIM).half()}, "float32 or bfloat16, got"),
        ({"rows": torch.zeros(2, 20, 513)}, "head_dim must be 1 to 512, got 513"),
        ({"starts": torch.tensor([0])}, "lengths must have 1"),
        ({"starts": torch.tensor([0, 1]).int()}, "starts must be"),
        ({"starts": torch.tensor([0, 16])}, "span 1 is 5 tokens from 16, .* 0 to 19"),
        ({"starts": torch.tensor([-1, 0])}, "span 0 is 5 tokens from -1"),
        ({"lengths": torch.tensor([5, -1])}, "span 1 is -1 tokens"),
        ({"max_rank": 0}, "max_rank must be positive, got 0"),
        ({"energy": 0.0}, "energy must be above 0"),
        ({"energy": 1.5}, "energy must be above 0"),
        ({"energy": float("nan")}, "energy must be above 0"),
        ({"dtype": torch.float16}, "float32 or bfloat16, got float16"),
    ],
)
def test_bad_decompositions(backend, change, message):
    arguments = {
        "rows": torch.zeros(2, 20, DIM),
        "starts": torch.tensor([0, 10]),
        "lengths": torch.tensor([5, 5]),
    }
    with pytest.raises(ValueError, match=message):
        svd.truncated_svd(**{**arguments, **change})
