"""Votes on pages: compiled and torch versions against the oracle and ``scoring``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import page_ops
import pytest
import torch
from layouts import make_layout

from vllm_kvplugins import ops
from vllm_kvplugins.scoring import attention_votes

LAYOUTS = ["natural", "interleaved", "transposed", "permuted"]


def make_case(kind, dtype, kv_heads, group, window, slots, dims=64, size=16, holes=0.0):
    """A request's votes:

    its slots in random order, in pages that otherwise hold NaN.
    """
    seed = 1000 * slots + 10 * window + kv_heads
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    layout = make_layout(kind, size, dims, seed)
    per_head = -(-slots // size)
    heap = torch.full((kv_heads * per_head + 3, layout.page_elems), torch.nan)
    pages = torch.randperm(len(heap), generator=generator)[: kv_heads * per_head]
    table = pages.view(kv_heads, per_head)
    order = [torch.randperm(slots, generator=generator) for _ in range(kv_heads)]
    evicted = torch.rand(kv_heads, slots, generator=generator) < holes
    positions = torch.stack(order).masked_fill(evicted, -1)
    place = torch.arange(slots)
    for head in range(kv_heads):
        present = place[~evicted[head]]
        rows = torch.randn(2, len(present), dims, generator=generator)
        kv = ops.PagedKV(heap, layout)
        ops.scatter_tokens(kv, table[head, present // size], present % size, *rows)
    queries = 2 * torch.randn(kv_heads * group, window, dims, generator=generator)
    own = torch.randn(kv_heads, window, dims, generator=generator)
    at = torch.arange(slots - window, slots)
    votes = Votes(
        heap.to(dtype), layout, table, positions, queries.to(dtype), at, dims**-0.5
    )
    return votes, own.to(dtype)


@dataclass(frozen=True)
class Votes:
    """Arguments of a call."""

    heap: torch.Tensor
    layout: ops.PageLayout
    page_table: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor
    query_positions: torch.Tensor
    scale: float
    largest: bool = False
    own_keys: torch.Tensor | None = None

    def run(self, op=ops.page_votes) -> torch.Tensor:
        return op(
            ops.PagedKV(self.heap, self.layout),
            ops.VoteSlots(self.page_table, self.positions),
            ops.VoteQueries(self.queries, self.query_positions, self.own_keys),
            self.scale,
            self.largest,
        )

    def right(self) -> torch.Tensor:
        return self.run(page_ops.page_votes)

    def probe(self, own_keys: torch.Tensor) -> Votes:
        """The same request; its queries come after all slots and have keys of their
        own.
        """
        slots, window = self.positions.shape[1], self.queries.shape[1]
        at = torch.arange(slots, slots + window)
        return replace(self, query_positions=at, own_keys=own_keys)


def error(votes: torch.Tensor, expected: torch.Tensor) -> float:
    return float((votes - expected).abs().max())


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [False, True])
def test_error_is_at_most_twice_that_of_torch(
    compiled, monkeypatch, kind, dtype, largest
):
    votes, own = make_case(kind, dtype, 2, 3, 9, 150, holes=0.2)
    votes = replace(votes, largest=largest)
    for case in (votes, votes.probe(own)):
        expected = case.right()
        votes = case.run()
        monkeypatch.setenv("KVP_OPS", "torch")
        in_torch = case.run()
        monkeypatch.setenv("KVP_OPS", "compiled")
        assert votes.dtype == torch.float32
        assert error(votes, expected) <= 2 * error(in_torch, expected)


@pytest.mark.parametrize("dims", [1, 40, 128])
@pytest.mark.parametrize(("slots", "size"), [(1, 1), (33, 5), (300, 128)])
def test_equals_the_oracle(backend, dims, slots, size):
    window = min(slots, 7)
    votes, own = make_case(
        "interleaved", torch.float32, 1, 2, window, slots, dims, size, 0.1
    )
    for largest in (False, True):
        for case in (votes, votes.probe(own)):
            case = replace(case, largest=largest)
            assert error(case.run(), case.right()) < 1e-5


def test_is_what_policies_compute(backend):
    """``scoring`` on a dense copy of the keys, as in a policy's view."""
    votes, own = make_case("transposed", torch.float32, 2, 4, 16, 200)
    positions, queries, scale = votes.positions, votes.queries, votes.scale
    kv = ops.PagedKV(votes.heap, votes.layout)
    keys = ops.gather_keys(kv, votes.page_table)[:, :200]
    in_order = positions.argsort(1)
    dense = keys.gather(1, in_order[..., None].expand_as(keys))
    window = attention_votes.window_votes(queries, dense, scale)
    expected = (votes.run() / 16).gather(2, in_order[:, None].expand(-1, 4, -1))
    torch.testing.assert_close(expected[..., : 200 - 16], window, atol=1e-6, rtol=1e-5)
    probe = votes.probe(own)
    at = probe.query_positions
    keys = torch.cat([keys, own], 1)
    places = torch.cat([positions, at.expand(2, -1)], 1)
    mass = attention_votes.attention_mass(queries, keys, scale, at, places)
    expected = probe.run().mean(1)
    torch.testing.assert_close(expected, mass[:, :200], atol=1e-6, rtol=1e-5)
    peak = attention_votes.attention_peak(queries, keys, scale, at, places)
    expected = replace(probe, largest=True).run().amax(1)
    torch.testing.assert_close(expected, peak[:, :200], atol=1e-6, rtol=1e-5)


def test_threads_do_not_change_the_result(compiled):
    votes, _ = make_case("transposed", torch.bfloat16, 4, 4, 32, 2000, 128)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 3):
            torch.set_num_threads(count)
            results.append(votes.run())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_queries_that_see_nothing_have_no_weights(backend):
    votes, _ = make_case("natural", torch.float32, 1, 1, 4, 20)
    early = replace(votes, query_positions=torch.tensor([-2, -1, -1, 5]))
    votes = early.run()
    assert error(votes, early.right()) < 1e-6
    assert float(votes.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("heap", torch.zeros(5), "heap must have 2 dimension"),
        ("page_table", torch.zeros(2, 3), "page_table must be"),
        ("page_table", torch.full((2, 2), 99), r"page_table\[0\] is page 99"),
        (
            "positions",
            torch.zeros(2, 33, dtype=torch.int64),
            "at most 32 slots of 2 KV heads",
        ),
        ("positions", torch.zeros(3, 20, dtype=torch.int64), "slots of 2 KV heads"),
        ("queries", torch.zeros(4, 3, 63), "queries must have head_dim 64"),
        ("queries", torch.zeros(3, 3, 64), "multiple of 2 KV heads"),
        ("queries", torch.zeros(4, 3, 64, dtype=torch.float16), "queries must be"),
        (
            "query_positions",
            torch.zeros(2, dtype=torch.int64),
            "query_positions must have 3 entries",
        ),
    ],
)
def test_bad_arguments_are_refused(backend, name, wrong, message):
    votes, _ = make_case("natural", torch.float32, 2, 2, 3, 20)
    with pytest.raises(ValueError, match=message):
        replace(votes, **{name: wrong}).run()


def test_bad_own_keys_are_refused(backend):
    votes, own = make_case("natural", torch.float32, 2, 2, 3, 20)
    with pytest.raises(ValueError, match="own_keys must have 3 rows"):
        replace(votes, own_keys=own[:, :2]).run()
    with pytest.raises(ValueError, match="own_keys must have head_dim"):
        replace(votes, own_keys=own[:1]).run()
