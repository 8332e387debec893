"""Selection by codes: what a device chooses, against exact scans and the host's swaps.

``tests/helpers/selection_kernel_suite.py`` compares the Triton kernels with the torch
version.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts import make_layout
from selecting import CASES, PAGE, SEED, chosen, copied, fetched_heap, make, voted
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_kvplugins.index import BruteForceIndex, CodeScan, Keys
from vllm_kvplugins.index.device_codes import FIT_KEYS, CodeSpace, CodeStore
from vllm_kvplugins.index.scan import scan_in_torch
from vllm_kvplugins.ops import code_select as ops
from vllm_kvplugins.ops.code_select import HostRequests, KeyCodes
from vllm_kvplugins.ops.hot_set import HostPages, HotSet, swap_hot

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


# -- the torch version ---------------------------------------------------------------


@each_case
def test_votes_are_sums_of_softmaxes(case):
    votes = voted(case)
    for request, length in enumerate(case.host.lengths.tolist()):
        exact = (case.logits(request) * 0.2).softmax(-1).sum(1)
        own = votes[request, :, :length]
        torch.testing.assert_close(own.double(), exact, atol=1e-6, rtol=1e-5)
        assert votes[request, :, length:].eq(-1).all()


@each_case
def test_the_best_tokens_become_hot(case):
    """Those of an exact scan in float64; ties to the lower token."""
    hot, votes = copied(case.hot), voted(case)
    ops.swap_in_torch(votes, PAGE, case.host, hot)
    for request, length in enumerate(case.host.lengths.tolist()):
        exact = (case.logits(request) * 0.2).softmax(-1).sum(1)
        count = min(int(case.hot.counts[request]), length)
        order = votes[request, :, :length].sort(descending=True, stable=True).indices
        for head in range(case.queries.shape[1]):
            tokens = chosen(case, hot, request, head)
            assert tokens == sorted(order[head, :count].tolist())
            if count:
                least = exact[head].topk(count).values[-1]
                assert exact[head, tokens].min() >= least * (1 - 1e-5)


@each_case
def test_swaps_are_those_of_the_host(case):
    """The same tokens are copied; a token that stays keeps its slot."""
    votes, hot = voted(case), copied(case.hot)
    rows, fetched = ops.swap_in_torch(votes, PAGE, case.host, hot)
    order = votes.sort(descending=True, stable=True).indices
    token = case.hot.token.clone().where(case.hot.token < 10**9, 0)
    zeros = torch.zeros_like(token)
    counts = torch.zeros(len(token), dtype=torch.int64)
    counts[case.hot.slot_indices] = case.hot.counts
    num_pages = len(case.keys.codes)
    moves, host_copied = swap_hot(
        HostPages(torch.zeros(num_pages, 2, PAGE, 4), case.host.table),
        order[..., : case.hot.width].contiguous(),
        case.hot.slot_indices,
        HotSet(token, zeros, zeros, counts),
    )
    assert fetched.sum(1).equal(host_copied)
    assert rows[rows >= 0].sort().values.equal(moves[0].sort().values)
    before = case.hot.token[case.hot.slot_indices][..., : case.hot.width]
    after = hot.token[case.hot.slot_indices][..., : case.hot.width]
    assert after[rows < 0].equal(before[rows < 0])
    for request, head, slot in (rows >= 0).nonzero().tolist():
        new = int(after[request, head, slot])
        page = int(case.host.table[request, head, new // PAGE])
        assert rows[request, head, slot] == page * 2 * PAGE + new % PAGE
    untouched = torch.ones(len(hot.token), dtype=torch.bool)
    untouched[case.hot.slot_indices] = False
    assert hot.token[untouched].equal(case.hot.token[untouched])


def test_equal_keys_go_by_number():
    case = make([50], [6])
    case.keys.codes.fill_(3)
    case.keys.scales.fill_(0.5)
    hot = copied(case.hot)
    ops.swap_in_torch(voted(case), PAGE, case.host, hot)
    assert all(chosen(case, hot, 0, head) == list(range(6)) for head in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_as_near_as_eight_bits(dtype):
    rng = torch.Generator().manual_seed(SEED)
    keys = (torch.randn(3, 400, 24, generator=rng) * 5 + 90).to(dtype)
    space = CodeSpace.fit(keys[:, :FIT_KEYS])
    codes, scales = ops.encode_keys(keys, space.center, space.width)
    step = scales[..., None] * space.width[:, None]
    restored = codes.float() * step + space.center[:, None]
    assert ((restored - keys.float()).abs() <= step * 0.5001).all()
    assert codes.abs().amax(-1).eq(127).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_keys_that_are_not_finite_harm_no_other(bad):
    """They count as the center of their keys, and others keep their codes."""
    rng = torch.Generator().manual_seed(SEED)
    keys = torch.randn(2, 200, 8, generator=rng)
    plain = CodeSpace.plain(2, 8, keys.device)
    clean = ops.encode_keys(keys, plain.center, plain.width)
    keys[1, 7, 3] = bad
    sick = ops.encode_keys(keys, plain.center, plain.width)
    is_finite = abs(bad) < torch.inf
    assert bool(sick[1][1, 7] > 0) == bool(sick[0][1, 7].any()) == is_finite
    assert sick[1].isfinite().all()
    for mine, theirs in zip(sick, clean, strict=True):
        mine[1, 7] = theirs[1, 7] = 0
        assert mine.equal(theirs)
    queries = torch.full((1, 2, 1, 8), bad)
    codes, steps = ops.encode_queries(queries, plain.width[None])
    assert codes.isfinite().all()
    assert steps.isfinite().all()
    assert CodeSpace.fit(keys[:, :FIT_KEYS]).center.isfinite().all()


def test_constant_dimensions_have_a_width():
    keys = torch.ones(1, 130, 8)
    keys[..., 0] = torch.arange(130)
    space = CodeSpace.fit(keys)
    assert (space.width > 0).all()
    assert CodeSpace.fit(torch.ones(1, 5, 8)).width.eq(1).all()
    _, scales = ops.encode_keys(keys, space.center, space.width)
    assert scales.isfinite().all()


# -- the index that selects as a device does -------------------------------------------


def scattered(seed: int, heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Keys that are exact in codes: whole numbers, the largest of each is 127."""
    rng = torch.Generator().manual_seed(seed)
    keys = torch.randint(-127, 128, (heads, tokens, dim), generator=rng).float()
    keys[..., 0] = 127
    return keys


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 100, FIT_KEYS - 1])
@pytest.mark.parametrize(("group", "dim"), [(1, 8), (3, 64), (8, 128), (4, 256)])
def test_few_exact_keys_are_found_as_by_the_exact_scan(tokens, group, dim):
    """Codes of keys and queries are exact, so the compiled scan finds the same."""
    rng = torch.Generator().manual_seed(tokens)
    keys, scale = scattered(SEED, 2, tokens, dim), 5e-4 / dim**0.5
    queries = torch.randint(-127, 128, (2, group, dim), generator=rng).float()
    queries[..., 1] = 127
    index, exact = CodeScan(2, dim), BruteForceIndex(2, dim)
    for first in range(0, tokens, 7):
        for each in (index, exact):
            each.append(keys[:, first : first + 7].contiguous(), first)
    count = min(tokens + 2, 12)
    mine = index.select(queries, Keys.dense(keys), scale, count)
    found = exact.select(queries, Keys.dense(keys), scale, count)
    worth = (queries.double() @ keys.double().mT * scale).softmax(-1).sum(1)
    for head in range(2):
        left, right = ({*row.tolist()} - {-1} for row in (mine[head], found[head]))
        assert len(left) == len(right) == min(tokens, count)
        # Where rounding decides, the worth is the same.
        torch.testing.assert_close(
            worth[head, sorted(left)].sort().values,
            worth[head, sorted(right)].sort().values,
            rtol=1e-5,
            atol=0,
        )
    assert mine[:, min(tokens, count) :].eq(-1).all()


def test_how_keys_arrive_makes_no_difference():
    keys = torch.randn(2, 700, 16, generator=torch.Generator().manual_seed(SEED))
    queries = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(SEED + 1))
    results = []
    for step in (700, 128, 127, 31):
        index = CodeScan(2, 16)
        for first in range(0, 700, step):
            index.append(keys[:, first : first + step], first)
        results.append(index.select(queries, Keys.dense(keys), 0.25, 60))
    assert all(result.equal(results[0]) for result in results)
    exact = scan_in_torch([700], queries[None], Keys.dense(keys), 0.25, 60)[0]
    weights = (queries @ keys.mT * 0.25).softmax(-1).sum(1)
    share = weights.gather(1, results[0]).sum() / weights.gather(1, exact).sum()
    assert share > 0.999


# -- no host in between ---------------------------------------------------------------

aten = torch.ops.aten
_READ_BY_HOST = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.is_nonzero.default,
}


class NoHost(TorchDispatchMode):
    """Refuses what reads contents on the host, or has a shape that depends on them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _READ_BY_HOST:
            raise AssertionError(f"{func} makes the host wait")
        if func in {aten.index.Tensor, aten.index_put_.default}:
            masks = [i for i in args[1] if i is not None and i.dtype == torch.bool]
            assert not masks, "a mask makes the host wait"
        return func(*args, **(kwargs or {}))


@each_case
def test_nothing_depends_on_contents(case):
    """Votes, swaps and new codes also run where tensors have no contents at all."""
    keys = torch.randn(2, FIT_KEYS, 8)
    store = CodeStore(2 * FIT_KEYS // PAGE, PAGE, 8, keys.device)
    pages = torch.arange(2 * FIT_KEYS // PAGE).view(2, -1)
    with NoHost():
        ops.swap_in_torch(voted(case), PAGE, case.host, copied(case.hot))
        store.put(pages, 0, keys, CodeSpace.fit(keys))
    with pytest.raises(AssertionError, match="wait"), NoHost():
        keys[keys > 0]
    with FakeTensorMode(allow_non_fake_inputs=False) as fake:
        host = HostRequests(
            *map(fake.from_tensor, (case.host.table, case.host.lengths))
        )
        codes = KeyCodes(*map(fake.from_tensor, (case.keys.codes, case.keys.scales)))
        hot = replace(
            case.hot,
            token=fake.from_tensor(case.hot.token),
            slot_indices=fake.from_tensor(case.hot.slot_indices),
            counts=fake.from_tensor(case.hot.counts),
        )
        queries, width = map(fake.from_tensor, (case.queries, case.width))
        votes = ops.votes_in_torch(queries, width, codes, host, 0.2)
        rows, fetched = ops.swap_in_torch(votes, PAGE, host, hot)
    assert rows.shape == (*case.host.table.shape[:2], case.hot.width)
    assert fetched.shape == case.host.table.shape[:2]


# -- fetches ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["natural", "interleaved", "transposed"])
def test_rows_reach_their_slots(kind, dtype):
    layout = make_layout(kind, 16, 24, SEED)
    before, heap, expected = fetched_heap(ops.fetch_rows, layout, dtype)
    assert heap.equal(expected)
    assert not heap.equal(before)
