"""Rows reconstructed from low-rank factors, against torch in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spectra import make_rows, spans_of, whole

from vllm_kvplugins.ops import dispatch, svd

SEED = 20261122
DTYPES = [torch.float32, torch.bfloat16]
DIM = 64


@pytest.fixture
def random():
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor_dtype", DTYPES, ids=str)
def test_rows_are_as_exact_as_torch_s(backend, random, dtype, factor_dtype):
    """At most twice the error of torch's product in the dtype of the result."""
    rows = make_rows("decaying", 2, 130, DIM, random)
    starts, lengths = spans_of(33, 64, 16)
    factors = svd.truncated_svd(rows, starts, lengths, 32, dtype=factor_dtype)
    which = torch.tensor([5, 0, 4])
    compiled = svd.reconstruct(factors, which, dtype).double()
    assert compiled.shape == (16 + 33 + 64, DIM)
    first = 0
    for matrix in which.tolist():
        u, v = factors.left(matrix), factors.right(matrix)
        sigma = factors.singular_values(matrix)
        exact = (u.double() * sigma.double()) @ v.double().t()
        plain = (u.to(dtype) * sigma.to(dtype)) @ v.to(dtype).t()
        part = compiled[first : first + len(exact)]
        first += len(exact)
        ours_error = (part - exact).norm()
        assert ours_error <= 2 * (plain.double() - exact).norm()


def test_gates_are_multiplied_into_singular_values(backend, random):
    """Equation 8: the view receives the reconstruction."""
    rows = make_rows("decaying", 2, 40, DIM, random)
    for dtype in DTYPES:
        factors = svd.truncated_svd(rows, *whole(40), 8, dtype=dtype)
        gates = torch.rand(8, generator=random)
        factors.singular_values(1).mul_(gates)
        u, v = factors.left(1).float(), factors.right(1).float()
        expected = (u * factors.singular_values(1)) @ v.t()
        actual = svd.reconstruct(factors, torch.tensor([1]), torch.float32)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        sigma = torch.linalg.svdvals(rows[1])[:8]
        torch.testing.assert_close(
            factors.singular_values(1), sigma * gates, rtol=1e-3, atol=1e-5
        )


def test_factors_may_lie_in_an_arena(backend, random):
    factors = svd.truncated_svd(make_rows("flat", 1, 20, DIM, random), *whole(20))
    arena = torch.zeros(10 + factors.factors.numel())
    arena[10:] = factors.factors
    moved = dataclasses.replace(factors, factors=arena[10:])
    which = torch.tensor([0, 0])
    assert svd.reconstruct(moved, which).equal(svd.reconstruct(factors, which))


def test_bad_reconstructions(backend, random):
    factors = svd.truncated_svd(make_rows("flat", 2, 20, DIM, random), *whole(20), 8)
    for wrong in (-1, 2):
        with pytest.raises(
            ValueError, match=rf"which\[1\] is matrix {wrong}, .* 0 to 1"
        ):
            svd.reconstruct(factors, torch.tensor([0, wrong]))
    with pytest.raises(ValueError, match="dtype must be"):
        svd.reconstruct(factors, torch.tensor([0]), torch.float16)


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": torch.tensor([9])},
        {"ranks": torch.tensor([-1])},
        {"tokens": torch.tensor([21])},
        {"tokens": torch.tensor([1 << 60])},
        {"offsets": torch.tensor([0, 1 << 60])},
        {"offsets": torch.tensor([-8, 672])},
        {"head_dim": 63},
    ],
)
def test_compiled_reads_no_record_that_is_not_there(random, monkeypatch, change):
    if reason := dispatch.load_extension().reason:
        pytest.skip(f"no compiled ops: {reason}")
    factors = svd.truncated_svd(make_rows("flat", 1, 20, DIM, random), *whole(20), 8)
    broken = dataclasses.replace(factors, **change)
    with pytest.raises(ValueError, match="matrix 0 is not a record of rank"):
        svd.reconstruct(broken, torch.tensor([0]))
    size = 70 * (20 + DIM + 1)  # a record with more columns than possible
    broken = dataclasses.replace(
        factors,
        factors=torch.zeros(size),
        offsets=torch.tensor([0, size]),
        ranks=torch.tensor([70]),
    )
    with pytest.raises(ValueError, match="not a record of rank 70 and 20 tokens"):
        svd.reconstruct(broken, torch.tensor([0]))
