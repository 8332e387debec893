"""Fused clustering: compiled, Triton (interpreted) and torch agree with float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_kvplugins.ops import clusters as op
from vllm_kvplugins.ops import extension
from vllm_kvplugins.ops.extension import Extension, load_extension

ROOT = Path(__file__).parents[2]
SEED = 20261121
NARROW = [torch.float32, torch.float16, torch.bfloat16]


def triton_op():
    """The Triton version; see the last test."""
    from vllm_kvplugins.ops.triton import clusters

    return clusters.assign_and_average


def compiled_op(keys, *rest):
    assert op.backend_for(keys.device, keys.dtype, keys.shape[2]) == "compiled"
    return op.assign_and_average(keys, *rest)


# Triton's version runs in its own process, because the interpreter is chosen at import.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(params=["triton"] if INTERPRETED else ["compiled", "torch"])
def run(request):
    """Each implementation in turn."""
    print("seed", SEED)
    if request.param == "compiled" and (reason := load_extension().reason):
        pytest.skip(f"no compiled ops: {reason}")
    if request.param == "triton":
        return triton_op()
    return compiled_op if request.param == "compiled" else op.in_torch


def problem(heads, slots, count, head_dim, dtype=torch.float32):
    generator = torch.Generator().manual_seed(SEED)
    keys = torch.randn(heads, slots, head_dim, generator=generator).to(dtype)
    rows = torch.randn(heads, count, head_dim, generator=generator)
    rows /= rows.norm(dim=-1, keepdim=True)
    values = torch.rand(heads, slots, generator=generator) ** 4
    return keys, rows, values


def cosines(keys, rows):
    """float64 [H, n, P] of the given keys and normalized rows."""
    keys = keys.double()
    return keys @ rows.double().transpose(1, 2) / keys.norm(dim=-1, keepdim=True)


def check_means(means, clusters, values):
    for head in range(len(means)):
        for cluster in clusters[head].unique():
            members = clusters[head] == cluster
            members_mean = means[head, members].unique()
            assert members_mean.numel() == 1
            expected = values[head, members].double().mean()
            torch.testing.assert_close(
                members_mean[0].double(), expected, rtol=1e-6, atol=1e-9
            )


def in_pairs(run, dtype):
    """Whether prototypes are rounded to bfloat16 and multiplied in pairs."""
    simd = load_extension().facts.get("simd")
    return (run, dtype, simd) == (compiled_op, torch.bfloat16, "avx512_bf16")


SHAPES = [
    (1, 1, 1, 1),
    (2, 7, 3, 5),
    (3, 97, 17, 54),
    (2, 130, 33, 64),
    (1, 65, 5, 128),
    (2, 1000, 143, 64),
]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nearest_and_mean(run, shape, dtype):
    """Errors are at most twice those of torch's product in the same dtype.

    That is float32, or bfloat16 where the CPU multiplies it.
    """
    keys, rows, values = problem(*shape, dtype)
    means, clusters = run(keys, rows, values)
    exact = cosines(keys, rows)
    product = (
        keys @ rows.to(dtype).mT if in_pairs(run, dtype) else keys.float() @ rows.mT
    )
    in_torch = product.double() / keys.double().norm(dim=-1, keepdim=True)
    bar = 2 * (in_torch - exact).abs().max()
    lost = exact.amax(-1) - exact.gather(2, clusters[..., None])[..., 0]
    assert lost.max() <= bar
    check_means(means, clusters, values)


@pytest.mark.parametrize("dtype", NARROW)
def test_ties_go_to_the_lower(run, dtype):
    keys, rows, values = problem(2, 50, 40, 16, dtype)
    # Whole numbers and quarters: sums are exact in any order.
    keys, rows = (keys * 4).round(), torch.where(rows > 0, 0.25, -0.25)
    rows[:, 3] = rows[:, 1]
    rows[:, 20:] = rows[:, :20]
    keys[:, ::7] = 0  # all of them tie
    clusters = run(keys, rows, values)[1]
    assert (clusters < 20).all()
    assert (clusters != 3).all()
    assert (clusters[:, ::7] == 0).all()


def test_prototypes_that_do_not_exist(run):
    keys = -torch.ones(1, 4, 3)
    rows = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [0, 0, 0], [0.6, 0.8, 0]]])
    values = torch.ones(1, 4)
    assert run(keys, rows, values)[1].tolist() == [[1] * 4]
    assert run(keys * 0, rows, values)[1].tolist() == [[1] * 4]
    assert run(keys, rows * 0, values)[1].tolist() == [[0] * 4]


def test_prototypes_that_round_to_the_same(run):
    """Just above and below half a bfloat16 step:

    products of pairs cannot tell them apart.
    """
    rows = torch.tensor([[[1.0, 0], [1.001, 0], [0, 1.0], [0, 1.01]]])
    keys = torch.tensor([[[2.0, 1], [1, 2]]], dtype=torch.bfloat16)
    lower = 0 if in_pairs(run, keys.dtype) else 1
    assert run(keys, rows, torch.ones(1, 2))[1].tolist() == [[lower, 3]]


def test_slots_without_a_token(run):
    keys, rows, values = problem(2, 90, 9, 24)
    expected = run(keys[:, 30:].contiguous(), rows, values[:, 30:])
    valid = (torch.arange(90) >= 30).expand(2, -1)
    keys[:, :30], values[:, :30] = torch.nan, torch.nan
    means, clusters = run(keys, rows, values, valid)
    assert torch.equal(clusters[:, 30:], expected[1])
    # The unit of the sums depends on the number of values.
    torch.testing.assert_close(means[:, 30:], expected[0], rtol=1e-6, atol=0)
    assert (clusters[:, :30] == 9).all()
    assert (means[:, :30] == 0).all()
    none_valid = torch.zeros_like(valid)
    assert (run(keys, rows, values, none_valid)[0] == 0).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_strides(run, dtype):
    keys, rows, values = problem(3, 70, 9, 24, dtype)
    plain = run(keys, rows, values)
    padded = torch.zeros(3, 80, 48, dtype=dtype)
    padded[:, 5:75, :24] = keys
    columns = keys.transpose(1, 2).contiguous().transpose(1, 2)
    for strided in (padded[:, 5:75, :24], columns):
        assert not strided.is_contiguous()
        assert all(map(torch.equal, run(strided, rows, values), plain))


@pytest.mark.parametrize("peak", [1e-38, 3e38, 0.0])
def test_extreme_values(run, peak):
    keys, rows, values = problem(1, 100, 5, 16)
    values = values * peak
    means, clusters = run(keys, rows, values)
    torch.testing.assert_close(
        means, op.in_torch(keys, rows, values)[0], rtol=0, atol=0
    )
    check_means(means.double() / (peak or 1), clusters, values.double() / (peak or 1))


def test_no_slots(run):
    keys, rows, values = problem(2, 0, 3, 8)
    means, clusters = run(keys, rows, values)
    assert means.shape == clusters.shape == (2, 0)
    assert clusters.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(run, dtype):
    """Results do not change between repetitions, although atomics add in any order."""
    keys, rows, values = problem(2, 2030, 70, 64, dtype)
    before = torch.get_num_threads()
    first = run(keys, rows, values)
    try:
        torch.set_num_threads(1)
        again = run(keys, rows, values)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, first, again))


@pytest.mark.skipif(bool(load_extension().reason), reason="no compiled ops")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("count", [0, 1, 12, 99])
@pytest.mark.parametrize(("slots", "chunks"), [(1, 1), (57, 5), (130, 4), (64, 64)])
def test_compiled_chunks(slots, chunks, count, dtype):
    keys = problem(3, slots, 1, 54, dtype)[0]
    keys[:, ::9] = 0
    strided = torch.cat([keys, keys], dim=2)[..., :54]
    # float64, so that rounding decides nothing
    exact, expected = op.chunk_prototypes(keys.double(), chunks, count)
    for layout in (keys, strided, keys.mT.contiguous().mT):
        assert op.backend_for(layout.device, dtype, 54) == "compiled"
        rows, slots = op.chunk_prototypes(layout, chunks, count)
        assert torch.equal(slots, expected)
        assert rows.dtype == torch.float32
        torch.testing.assert_close(rows.double(), exact, rtol=0, atol=5e-6)


@pytest.mark.skipif(bool(load_extension().reason), reason="no compiled ops")
def test_compiled_chunks_check_their_arguments():
    keys = torch.zeros(2, 8, 16)
    for wrong in (
        (keys, 0, 1),
        (keys, 9, 1),
        (keys, 2, -1),
        (keys, 3, 7),
        (keys.double(), 2, 1),
        (keys.mT, 2, 1),
        (keys[0], 2, 1),
    ):
        with pytest.raises(RuntimeError, match=r"kvp\.chunk_prototypes: "):
            torch.ops.kvp.chunk_prototypes(*wrong)


def test_keys_that_are_nan_are_survived():
    """The engine refuses scores that result from them."""
    keys = torch.full((1, 8, 4), torch.nan)
    slots = op.chunk_prototypes(keys, 2, 3)[1]
    assert torch.equal(slots, op.chunks_in_torch(keys, 2, 3)[1])


WRONG = {
    "keys must have 3 dimension": {"keys": torch.zeros(4, 3)},
    "prototypes must have 3 dimension": {"prototypes": torch.zeros(4, 3)},
    r"prototypes must have shape \[2, 5, 3\], got \[2, 5, 4\]": {
        "prototypes": torch.zeros(2, 5, 4)
    },
    r"values must have shape \[2, 4\], got \[2, 3\]": {"values": torch.zeros(2, 3)},
    "at least one prototype": {"prototypes": torch.zeros(2, 0, 3)},
    "prototypes must be float32": {"prototypes": torch.zeros(2, 5, 3).half()},
    "values must be float32": {"values": torch.zeros(2, 4).double()},
    "valid must be bool": {"valid": torch.ones(2, 4)},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit(message):
    right = {
        "keys": torch.zeros(2, 4, 3),
        "prototypes": torch.zeros(2, 5, 3),
        "values": torch.zeros(2, 4),
    }
    with pytest.raises(ValueError, match=rf"kvp\.assign_and_average: .*{message}"):
        op.assign_and_average(**right | WRONG[message])


@pytest.mark.skipif(bool(load_extension().reason), reason="no compiled ops")
def test_the_compiled_op_checks_for_itself():
    keys, rows, values = problem(2, 4, 5, 3)
    compiled = torch.ops.kvp.assign_and_average
    for wrong in (
        (keys.double(), rows, values, None),
        (keys, rows[:, :, :2], values, None),
        (keys, rows, values[:, :2], None),
        (keys, rows, values, torch.ones(2, 4)),
        (keys.mT.contiguous().mT, rows, values, None),
        (torch.zeros(2, 4, 513), torch.zeros(2, 5, 513), values, None),
    ):
        with pytest.raises(RuntimeError, match=r"kvp\.assign_and_average: "):
            compiled(*wrong)


def test_which_implementation_runs(monkeypatch):
    cpu, cuda, narrow = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
    monkeypatch.delenv("KVP_OPS", raising=False)
    compiled = "torch" if load_extension().reason else "compiled"
    assert op.backend_for(cpu, narrow, 64) == compiled
    assert op.backend_for(cpu, torch.float64, 64) == "torch"
    assert op.backend_for(cpu, narrow, 513) == "torch"
    monkeypatch.setattr(extension, "_has_triton", lambda: True)
    monkeypatch.setattr(op, "load_extension", lambda: Extension(facts={"cuda": "1"}))
    assert op.backend_for(cuda, narrow, 64) == "compiled"
    assert op.backend_for(cuda, torch.float64, 64) == "torch"
    monkeypatch.setattr(op, "load_extension", lambda: Extension(facts={"cuda": "0"}))
    assert op.backend_for(cuda, narrow, 64) == "triton"
    monkeypatch.setattr(extension, "_has_triton", lambda: False)
    assert op.backend_for(cuda, narrow, 64) == "torch"
    monkeypatch.setattr(extension, "_has_triton", lambda: True)
    monkeypatch.setattr(op, "load_extension", lambda: Extension(facts={"cuda": "1"}))
    monkeypatch.setenv("KVP_OPS", "torch")
    assert op.backend_for(cpu, narrow, 64) == "torch"
    assert op.backend_for(cuda, narrow, 64) == "torch"


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_triton_in_the_interpreter():
    """All of the above for the Triton version, in its own process."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "triton", __file__],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    assert "33 passed" in done.stdout, done.stdout
