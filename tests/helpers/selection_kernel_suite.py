"""The Triton kernels that select on a device, against their torch version.

``tests/unit/test_suites.py`` runs it in its own process: on a GPU if there is one,
otherwise in Triton's interpreter, which is chosen at import.
"""

from __future__ import annotations

import os

import pytest
import torch
from layouts import make_layout
from selecting import CASES, PAGE, SEED, Case, copied, fetched_heap, voted

from vllm_kvplugins.ops import code_select as ops
from vllm_kvplugins.ops.triton import code_select as kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@each_case
def test_votes_of_exact_queries(case: Case):
    case = case.on(DEVICE)
    rows = case.queries, case.width, case.keys, case.host, 0.2
    assert_same_votes(kernels.code_votes(*rows), ops.votes_in_torch(*rows), 2e-5)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_votes_of_other_queries(case: Case, dtype: torch.dtype):
    """A GPU may round an element of a query to the code next to torch's."""
    rng = torch.Generator().manual_seed(SEED)
    width = torch.rand(case.width.shape, generator=rng) + 0.5
    queries = torch.randn(case.queries.shape, generator=rng)
    queries[0, 0, 0, 1] = torch.nan
    case = Case(queries.to(dtype), width, case.keys, case.host, case.hot).on(DEVICE)
    rows = case.queries, case.width, case.keys, case.host, 0.2
    tolerance = 2e-5 if INTERPRETED else 1e-2
    assert_same_votes(kernels.code_votes(*rows), ops.votes_in_torch(*rows), tolerance)


def assert_same_votes(mine: torch.Tensor, own: torch.Tensor, rtol: float) -> None:
    assert mine.lt(0).equal(own.lt(0))
    torch.testing.assert_close(mine, own, atol=1e-6, rtol=rtol)


@each_case
@pytest.mark.parametrize("chunk", [32, 2048])
def test_swaps(monkeypatch, case: Case, chunk: int):
    """Equal to the last bit, and again with another order of work."""
    monkeypatch.setattr(kernels, "_CHUNK", chunk)
    case = case.on(DEVICE)
    votes, mine, own = voted(case), copied(case.hot), copied(case.hot)
    by_kernel = kernels.swap_tokens(votes, PAGE, case.host, mine)
    by_torch = ops.swap_in_torch(votes, PAGE, case.host, own)
    for left, right in zip(by_kernel, by_torch, strict=True):
        assert left.equal(right)
    assert mine.token.equal(own.token)
    assert bool(by_torch[1].any()) != mine.token.equal(case.hot.token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["natural", "interleaved", "transposed"])
def test_fetches(kind: str, dtype: torch.dtype):
    layout = make_layout(kind, 16, 24, SEED)
    results = fetched_heap(kernels.fetch_rows, layout, dtype, DEVICE)
    before, heap, expected = results
    assert heap.equal(expected)
    assert not heap.equal(before)
