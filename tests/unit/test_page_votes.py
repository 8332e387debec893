"""Votes on pages: compiled and torch versions against the oracle and ``scoring``."""

from __future__ import annotations

import page_ops
import pytest
import torch
from layouts import make_layout

from vllm_kvplugins import ops
from vllm_kvplugins.scoring import attention_votes

LAYOUTS = ["natural", "interleaved", "transposed", "permuted"]


def make_case(kind, dtype, kv_heads, group, window, slots, dims=64, size=16, holes=0.0):
    """A request's arguments: pages of NaN but for its slots, which are in no order."""
    seed = 1000 * slots + 10 * window + kv_heads
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    layout = make_layout(kind, size, dims, seed)
    per_head = -(-slots // size)
    heap = torch.full((kv_heads * per_head + 3, layout.page_elems), torch.nan)
    pages = torch.randperm(len(heap), generator=generator)[: kv_heads * per_head]
    table = pages.view(kv_heads, per_head)
    order = [torch.randperm(slots, generator=generator) for _ in range(kv_heads)]
    gone = torch.rand(kv_heads, slots, generator=generator) < holes
    positions = torch.stack(order).masked_fill(gone, -1)
    place = torch.arange(slots)
    for head in range(kv_heads):
        here = place[~gone[head]]
        rows = torch.randn(2, len(here), dims, generator=generator)
        ops.scatter_tokens(heap, table[head, here // size], here % size, *rows, layout)
    queries = 2 * torch.randn(kv_heads * group, window, dims, generator=generator)
    own = torch.randn(kv_heads, window, dims, generator=generator)
    at = torch.arange(slots - window, slots)
    made = (heap.to(dtype), table, positions, queries.to(dtype), at, layout, dims**-0.5)
    return made, own.to(dtype)


def probe(made):
    """The same request, its queries behind all slots."""
    slots, window = made[2].shape[1], made[3].shape[1]
    return (*made[:4], torch.arange(slots, slots + window), *made[5:])


def error(votes: torch.Tensor, expected: torch.Tensor) -> float:
    return float((votes - expected).abs().max())


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("most", [False, True])
def test_error_is_at_most_twice_that_of_torch(compiled, monkeypatch, kind, dtype, most):
    made, own = make_case(kind, dtype, 2, 3, 9, 150, holes=0.2)
    for arguments, keys in ((made, None), (probe(made), own)):
        expected = page_ops.page_votes(*arguments, most, keys)
        votes = ops.page_votes(*arguments, most, keys)
        monkeypatch.setenv("KVP_OPS", "torch")
        in_torch = ops.page_votes(*arguments, most, keys)
        monkeypatch.setenv("KVP_OPS", "compiled")
        assert votes.dtype == torch.float32
        assert error(votes, expected) <= 2 * error(in_torch, expected)


@pytest.mark.parametrize("dims", [1, 40, 128])
@pytest.mark.parametrize(("slots", "size"), [(1, 1), (33, 5), (300, 128)])
def test_equals_the_oracle(backend, dims, slots, size):
    window = min(slots, 7)
    made, own = make_case(
        "interleaved", torch.float32, 1, 2, window, slots, dims, size, 0.1
    )
    for most in (False, True):
        expected = page_ops.page_votes(*made, most)
        assert error(ops.page_votes(*made, most), expected) < 1e-5
        expected = page_ops.page_votes(*probe(made), most, own)
        assert error(ops.page_votes(*probe(made), most, own), expected) < 1e-5


def test_is_what_policies_compute(backend):
    """``scoring`` on a dense copy of the keys, as the policies' views have it."""
    made, own = make_case("transposed", torch.float32, 2, 4, 16, 200)
    heap, table, positions, queries, _, layout, scale = made
    keys = ops.gather_keys(heap, table, layout)[:, :200]
    in_order = positions.argsort(1)
    dense = keys.gather(1, in_order[..., None].expand_as(keys))
    window = attention_votes.window_votes(queries, dense, scale)
    mine = (ops.page_votes(*made) / 16).gather(2, in_order[:, None].expand(-1, 4, -1))
    torch.testing.assert_close(mine[..., : 200 - 16], window, atol=1e-6, rtol=1e-5)
    asked = probe(made)
    keys = torch.cat([keys, own], 1)
    places = torch.cat([positions, asked[4].expand(2, -1)], 1)
    mass = attention_votes.attention_mass(queries, keys, scale, asked[4], places)
    mine = ops.page_votes(*asked, own_keys=own).mean(1)
    torch.testing.assert_close(mine, mass[:, :200], atol=1e-6, rtol=1e-5)
    peak = attention_votes.attention_peak(queries, keys, scale, asked[4], places)
    mine = ops.page_votes(*asked, most=True, own_keys=own).amax(1)
    torch.testing.assert_close(mine, peak[:, :200], atol=1e-6, rtol=1e-5)


def test_threads_do_not_change_the_result(compiled):
    made, _ = make_case("transposed", torch.bfloat16, 4, 4, 32, 2000, 128)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(ops.page_votes(*made))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_queries_that_see_nothing_have_no_weights(backend):
    made, _ = make_case("natural", torch.float32, 1, 1, 4, 20)
    before = (*made[:4], torch.tensor([-2, -1, -1, 5]), *made[5:])
    votes = ops.page_votes(*before)
    assert error(votes, page_ops.page_votes(*before)) < 1e-6
    assert float(votes.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, torch.zeros(5), "heap must have 2 dimension"),
        (1, torch.zeros(2, 3), "page_table must be"),
        (1, torch.full((2, 2), 99), r"page_table\[0\] is page 99"),
        (2, torch.zeros(2, 33, dtype=torch.int64), "at most 32 slots of 2 KV heads"),
        (2, torch.zeros(3, 20, dtype=torch.int64), "slots of 2 KV heads"),
        (3, torch.zeros(4, 3, 63), "queries must have head_dim 64"),
        (3, torch.zeros(3, 3, 64), "multiple of 2 KV heads"),
        (3, torch.zeros(4, 3, 64, dtype=torch.float16), "queries must be"),
        (4, torch.zeros(2, dtype=torch.int64), "query_positions must have 3 entries"),
    ],
)
def test_bad_arguments_are_refused(backend, index, wrong, message):
    made, _ = make_case("natural", torch.float32, 2, 2, 3, 20)
    arguments = list(made)
    arguments[index] = wrong
    with pytest.raises(ValueError, match=message):
        ops.page_votes(*arguments)


def test_bad_own_keys_are_refused(backend):
    made, own = make_case("natural", torch.float32, 2, 2, 3, 20)
    with pytest.raises(ValueError, match="own_keys must have 3 rows"):
        ops.page_votes(*made, own_keys=own[:, :2])
    with pytest.raises(ValueError, match="own_keys must have head_dim"):
        ops.page_votes(*made, own_keys=own[:1])
