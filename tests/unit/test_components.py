"""Small components of low-rank factors are dropped; errors against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from spectra import make_rows, spans_of

from vllm_kvplugins import ops
from vllm_kvplugins.ops.svd import LowRank

SEED = 20261122
DTYPES = [torch.float32, torch.bfloat16]
DIM = 64
# the fourth span has no token
LENGTHS = (16, 33, 5, 0, 64)


@pytest.fixture
def random():
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


def make_factors(random: torch.Generator, dtype: torch.dtype, rank: int = 9) -> LowRank:
    rows = make_rows("decaying", 3, 140, DIM, random)
    return ops.truncated_svd(rows, *spans_of(*LENGTHS), rank, dtype=dtype)


def draw_gates(factors: LowRank, random: torch.Generator) -> torch.Tensor:
    return torch.rand(int(factors.ranks.sum()), generator=random)


def everything(factors: LowRank) -> torch.Tensor:
    return torch.arange(len(factors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_sums_of_gated_components_that_stay(backend, random, dtype):
    factors = make_factors(random, dtype)
    gates = draw_gates(factors, random)
    before = factors.factors.view(torch.uint8).clone(), gates.clone()
    kept = ops.keep_components(factors, gates, 0.4)
    assert factors.factors.view(torch.uint8).equal(before[0])
    assert gates.equal(before[1])
    assert kept.nbytes < 0.8 * factors.nbytes
    assert kept.tokens.equal(factors.tokens)
    assert kept.factors.dtype == dtype
    own = gates.split(factors.ranks.tolist())
    assert any(g[0] < 0.4 < g[1:].max() for g in own if len(g)), "only prefixes stay"
    for matrix, gate in enumerate(own):
        stays = gate >= 0.4
        assert int(kept.ranks[matrix]) == int(stays.sum())
        sigma = factors.singular_values(matrix) * gate
        assert kept.singular_values(matrix).equal(sigma[stays])
        exact = factors.left(matrix).double() * (sigma * stays).double()
        exact = exact @ factors.right(matrix).double().t()
        actual = ops.reconstruct(kept, torch.tensor([matrix]), torch.float32)
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_make_the_same_records(compiled, random, monkeypatch, dtype):
    factors = make_factors(random, dtype)
    gates = draw_gates(factors, random)
    results = []
    for backend in ("torch", "compiled"):
        monkeypatch.setenv("KVP_OPS", backend)
        results.append(ops.keep_components(factors, gates, 0.4))
    for name in ("factors", "offsets", "ranks"):
        ours, theirs = (getattr(each, name) for each in results)
        assert ours.view(torch.uint8).equal(theirs.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_of_one_changes_nothing(backend, random, dtype):
    results = make_factors(random, dtype).factors
    results.fill_(torch.nan)
    del results  # reused memory shows which parts of a record are not written
    factors = make_factors(random, dtype)
    gates = torch.ones(int(factors.ranks.sum()))
    for min_gate in (0.0, 1.0):
        kept = ops.keep_components(factors, gates, min_gate)
        # as bytes: half of a float32 may be a NaN
        before, after = (f.factors.view(torch.uint8) for f in (factors, kept))
        assert after.equal(before)
        assert kept.offsets.equal(factors.offsets)
        assert kept.ranks.equal(factors.ranks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_no_components_to_drop(backend, random, dtype):
    rows = make_rows("decaying", 3, 140, DIM, random)
    small = ops.truncated_svd(
        rows, *spans_of(*LENGTHS), 9, dtype=dtype, rows_if_smaller=True
    )
    components = int(small.ranks.clamp(min=0).sum())
    kept = ops.keep_components(small, torch.zeros(components), 0.5)
    as_rows = small.ranks < 0
    assert 0 < int(as_rows.sum()) < len(small)
    assert kept.ranks.equal(small.ranks.clamp(max=0))
    which = as_rows.nonzero()[:, 0]
    before, after = ops.reconstruct(small, which), ops.reconstruct(kept, which)
    assert after.equal(before)
    assert kept.nbytes == small.offsets.diff()[as_rows].sum() * dtype.itemsize


def test_the_limit_itself_stays_and_nothing_is_dropped_at_zero(backend, random):
    factors = make_factors(random, torch.float32)
    gates = torch.full((int(factors.ranks.sum()),), 0.1)
    assert ops.keep_components(factors, gates, 0.1).ranks.equal(factors.ranks)
    none = ops.keep_components(factors, gates * 0, 0.0)
    assert none.ranks.equal(factors.ranks)
    assert not ops.reconstruct(none, everything(none)).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_components_rows_are_zeros(backend, random, dtype):
    factors = make_factors(random, dtype)
    gates = torch.full((int(factors.ranks.sum()),), 0.3)
    kept = ops.keep_components(factors, gates, 0.5)
    assert kept.nbytes == 0
    assert not kept.ranks.any()
    rows = ops.reconstruct(kept, everything(kept))
    assert rows.shape == (3 * sum(LENGTHS), DIM)
    assert not rows.any()
    assert ops.keep_components(kept, torch.empty(0), 0.5).nbytes == 0


def test_no_matrices(backend):
    none = torch.zeros(0, dtype=torch.int64)
    empty = LowRank(torch.empty(0), torch.zeros(1, dtype=torch.int64), none, none, 8)
    kept = ops.keep_components(empty, torch.empty(0), 0.5)
    assert len(kept) == 0
    assert kept.offsets.tolist() == [0]


def test_threads_do_not_change_the_result(compiled, random, monkeypatch):
    monkeypatch.setenv("KVP_OPS", "compiled")
    rows = make_rows("flat", 8, 2000, DIM, random)
    starts = torch.arange(0, 2000, 50)
    factors = ops.truncated_svd(rows, starts, torch.full_like(starts, 50), 16)
    gates = draw_gates(factors, random)
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            results.append(ops.keep_components(factors, gates, 0.5).factors)
    finally:
        torch.set_num_threads(before)
    assert results[0].nbytes > 256 * 1024, "one thread does it all"
    assert all(results[0].equal(other) for other in results[1:])


def test_bad_arguments(backend, random):
    factors = make_factors(random, torch.float32)
    gates = draw_gates(factors, random)
    for wrong, message in (
        (gates[1:], f"gates must have {len(gates)} entries, got {len(gates) - 1}"),
        (gates.double(), "gates must be float32, got "),
        (gates[None], r"gates must have 1 dimension\(s\)"),
        (gates.index_fill(0, torch.tensor([7]), 1.5), r"gates\[7\] .* 0 to 1, got 1.5"),
        (gates.index_fill(0, torch.tensor([3]), -0.5), r"gates\[3\] .* got -0.5"),
        (gates.index_fill(0, torch.tensor([2]), torch.nan), r"gates\[2\] .* got -?nan"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.keep_components(factors, wrong, 0.4)
    for min_gate in (-0.1, 1.1, torch.nan):
        with pytest.raises(
            ValueError, match=f"min_gate must be 0 to 1, got {min_gate}"
        ):
            ops.keep_components(factors, gates, min_gate)
    half = dataclasses.replace(factors, factors=factors.factors.half())
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16"):
        ops.keep_components(half, gates, 0.4)


def test_compiled_reads_no_record_that_is_not_there(compiled, random, monkeypatch):
    monkeypatch.setenv("KVP_OPS", "compiled")
    factors = make_factors(random, torch.float32)
    broken = dataclasses.replace(factors, factors=factors.factors[:-1])
    with pytest.raises(ValueError, match="matrix 14 is not a record of rank 9"):
        ops.keep_components(broken, draw_gates(factors, random), 0.4)
