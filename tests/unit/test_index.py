"""The key index: the tree against the exact scan, the exact scan against torch."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.index import (
    BruteForceIndex,
    CodedIndex,
    DCIIndex,
    Keys,
    compiled,
    query_pages,
    query_topk,
    scan,
)

SEEDS = [20261121, 7]
HEADS, DIM = 2, 32

needs_extension = pytest.mark.skipif(
    bool(compiled.extension_problem()), reason="the extension is not built"
)
pytestmark = needs_extension


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def random(request):
    print("seed", request.param)
    return torch.Generator().manual_seed(request.param)


def clustered(random, n, heads=HEADS, dim=DIM, clusters=40):
    centres = torch.randn(heads, clusters, dim, generator=random)
    which = torch.randint(0, clusters, (heads, n, 1), generator=random)
    noise = torch.randn(heads, n, dim, generator=random)
    return centres.gather(1, which.expand(-1, -1, dim)) + 0.4 * noise


def recall(result, exact):
    hits = result.slots.unsqueeze(-1) == exact.slots.unsqueeze(-2)
    return hits.any(-1).float().mean().item()


def tree_over(keys, **settings):
    index = DCIIndex(keys.shape[0], keys.shape[2], 16, **settings)
    index.build(Keys.dense(keys))
    return index


# -- exactness ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 15, 700])
def test_the_scan_equals_torch(random, n, dtype):
    keys = clustered(random, n).to(dtype)
    queries = torch.randn(HEADS, 3, DIM, generator=random).to(dtype)
    index = BruteForceIndex(HEADS, DIM)
    index.build(Keys.dense(keys))
    result = index.query_topk(queries, Keys.dense(keys), 20)
    exact = scan.topk(queries[None], keys[None], 20)
    torch.testing.assert_close(result.scores, exact.scores[0], rtol=0, atol=1e-4)
    valid = result.slots >= 0
    assert valid.sum() == HEADS * 3 * min(n, 20)
    # Rounding may swap neighbors in rank, and nothing else.
    scores = queries.float() @ keys.float().transpose(1, 2)
    at = scores.gather(2, result.slots.clamp(min=0)) if n else result.scores
    torch.testing.assert_close(at[valid], exact.scores[0][valid], rtol=0, atol=1e-4)


@pytest.mark.parametrize("n", [0, 1, 2, 33, 1500])
def test_without_a_limit_the_tree_equals_the_scan(random, n):
    keys = clustered(random, n)
    if n > 3:
        keys[:, n // 2 :: 5] = keys[:, :1]  # ties
    queries = torch.randn(HEADS, 4, DIM, generator=random)
    queries[0, 0] = 0  # ties everywhere: the lowest slots win
    view = Keys.dense(keys)
    scan = BruteForceIndex(HEADS, DIM)
    scan.build(view)
    for settings in ({}, {"visit_ratio": 0.5}, {"route": "parent"}):
        tree = tree_over(keys, **settings)
        tree.check_integrity(view)
        result = tree.query_topk(queries, view, 50, max_visits=0)
        exact = scan.query_topk(queries, view, 50)
        assert torch.equal(result.slots, exact.slots)
        assert torch.equal(result.scores, exact.scores)
        expected = list(range(min(n, 50)))
        assert result.slots[0, 0].tolist()[: len(expected)] == expected


def test_few_visits_find_a_key_among_equal_ones(random):
    """Equal keys are below one promoted point; the other points have no keys."""
    for seed in range(40):
        tree = DCIIndex(HEADS, 8, 4, promotion=0.25, seed=seed)
        keys = torch.zeros(HEADS, 0, 8)
        for scale in (0, 1, 0, 1e-6, 1e6, 0, 1e-6):
            new = scale * torch.randint(-2, 3, (HEADS, 9, 8), generator=random).float()
            tree.insert(Keys.dense(new))
            keys = torch.cat([keys, new], 1)
        queries = torch.randint(-2, 3, (HEADS, 1, 8), generator=random).float()
        for visits in range(1, 5):
            result = tree.query_topk(queries, Keys.dense(keys), 1, max_visits=visits)
            assert (result.slots >= 0).all(), (seed, visits)


def test_keys_are_read_where_they_lie(random):
    """Transposed pages of several requests in one pool, addressed by a table."""
    block, n = 16, 100
    pages = -(-n // block)
    wide = [clustered(random, n).to(torch.bfloat16) for _ in range(2)]
    pool = torch.full((2 * HEADS * pages + 5, 2, DIM, block), torch.nan)
    pool = pool.to(torch.bfloat16)
    order = torch.randperm(len(pool), generator=random)[: 2 * HEADS * pages]
    table = order.view(2, HEADS, pages)
    for r, keys in enumerate(wide):
        padded = torch.nn.functional.pad(keys, (0, 0, 0, pages * block - n))
        cut = padded.unflatten(1, (pages, block)).transpose(2, 3)
        pool[table[r], 0] = cut
    view = pool[:, 0].transpose(1, 2)  # [num_pages, block_size, head_dim]
    indexes = []
    for r in range(2):
        index = DCIIndex(HEADS, DIM, block, seed=r)
        index.build(Keys.paged(view, table[r]), n)
        index.check_integrity(Keys.paged(view, table[r]))
        indexes.append(index)
    queries = torch.randn(2, HEADS, 3, DIM, generator=random)
    result = query_topk(indexes, queries, Keys.paged(view, table), 10, 0)
    exact = scan.topk(queries, torch.stack(wide), 10)
    assert torch.equal(result.slots, exact.slots)
    # And each request alone gives the same result.
    alone = indexes[1].query_topk(queries[1], Keys.paged(view, table[1]), 10, 0)
    assert torch.equal(alone.slots, result.slots[1])


def test_keys_stored_where_the_tree_wants_them(random):
    keys = clustered(random, 500)
    tree = tree_over(keys)
    places = tree.places()
    stored = torch.full((HEADS, max(tree.num_pages) * 16, DIM), torch.nan)
    stored.scatter_(1, places.unsqueeze(-1).expand(-1, -1, DIM), keys)
    view = Keys.dense(stored, by_page=True)
    tree.check_integrity(view)
    queries = torch.randn(HEADS, 2, DIM, generator=random)
    for visits in (0, 200):
        one = tree.query_topk(queries, view, 10, visits)
        two = tree.query_topk(queries, Keys.dense(keys), 10, visits)
        assert torch.equal(one.slots, two.slots)


# -- recall -------------------------------------------------------------------


def test_recall_on_clusters(random):
    keys = clustered(random, 8000, clusters=200)
    view = Keys.dense(keys)
    queries = keys[:, ::400] + 0.2 * torch.randn(HEADS, 20, DIM, generator=random)
    tree = tree_over(keys)
    exact = tree.query_topk(queries, view, 32, 0)
    before = 0.0
    for visits in (300, 1000, 3000):
        result = tree.query_topk(queries, view, 32, visits)
        assert (result.visits < visits + 400).all()
        assert recall(result, exact) >= before
        before = recall(result, exact)
    assert before > 0.98
    assert recall(tree.query_topk(queries, view, 32, 1000), exact) > 0.9


def test_inserting_is_as_good_as_building(random):
    keys = clustered(random, 6000, clusters=150)
    view = Keys.dense(keys)
    built = tree_over(keys)
    # Growth to twice the size. Early keys keep parents that are no longer the nearest:
    # a loss of a few percent. Much more growth needs a new index.
    growing = DCIIndex(HEADS, DIM, 16)
    growing.build(Keys.dense(keys[:, :3000]))
    for first in range(3000, 6000, 16):
        growing.insert(Keys.dense(keys[:, first : first + 16]))
    assert growing.num_keys == 6000
    queries = keys[:, ::300] + 0.2 * torch.randn(HEADS, 20, DIM, generator=random)
    exact = built.query_topk(queries, view, 32, 0)
    one = recall(built.query_topk(queries, view, 32, 1000), exact)
    two = recall(growing.query_topk(queries, view, 32, 1000), exact)
    assert one > 0.9
    assert abs(one - two) < 0.08


@pytest.mark.slow
def test_mass_covered_on_real_keys(model_path):
    from real_keys import capture, mass_covered
    from texts import english

    layers = capture(model_path, english(3, 300), 1500, 4)
    shares, found_share = [], []
    for queries, keys in layers[2::9]:
        keys = keys[:, 4:-64].contiguous()
        flat = queries.flatten(1, 2)
        tree = DCIIndex(len(keys), keys.shape[2], 32)
        tree.build(Keys.dense(keys))
        result = tree.query_topk(flat, Keys.dense(keys), 64, 600)
        exact = tree.query_topk(flat, Keys.dense(keys), 64, 0)
        found_share.append(recall(result, exact))
        mass = mass_covered(flat, keys, result.slots)
        shares.append((mass / mass_covered(flat, keys, exact.slots)).mean().item())
    print("mass of exact top-64 covered:", shares, "recall:", found_share)
    assert min(shares) > 0.9
    assert sum(shares) / len(shares) > 0.95


# -- codes --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 255, 300, 2000])
def test_codes_find_nearly_all_that_the_scan_finds(random, n, dtype):
    keys = clustered(random, n).to(dtype)
    queries = torch.randn(HEADS, 3, DIM, generator=random)
    view = Keys.dense(keys)
    scan = BruteForceIndex(HEADS, DIM)
    scan.build(view)
    exact = scan.query_topk(queries, view, 50)
    for flat_keys, enough in ((1 << 20, 0.97), (600, 0.9)):
        index = CodedIndex(HEADS, DIM, segment=256, flat_keys=flat_keys)
        index.build(view)
        index.check_integrity(view)
        found = index.query_topk(queries, view, 50, 800)
        valid = found.slots >= 0
        assert valid.sum() == HEADS * 3 * min(n, 50)
        assert n == 0 or recall(found, exact) * 50 / min(n, 50) > enough
        whole = index.query_topk(queries, view, 50, 0)  # no limit: exact
        assert torch.equal(whole.slots, exact.slots)
        assert torch.equal(whole.scores, exact.scores)
        if n:
            scores = queries @ keys.float().transpose(1, 2)
            scores = scores.gather(2, found.slots.clamp(min=0))
            torch.testing.assert_close(
                found.scores[valid], scores[valid], rtol=0.02, atol=0.3
            )


@pytest.mark.parametrize("flat_keys", [1 << 20, 512])
def test_codes_select_the_attention_of_the_group(random, flat_keys):
    keys = clustered(random, 1500)
    queries = 2 * torch.randn(HEADS, 3, DIM, generator=random)
    view, scale = Keys.dense(keys), DIM**-0.5
    index = CodedIndex(HEADS, DIM, segment=256, flat_keys=flat_keys)
    index.insert(Keys.dense(keys[:, :1000]))
    for first in range(1000, 1500, 100):
        index.insert(Keys.dense(keys[:, first : first + 100]))
    index.check_integrity(view)
    attention = (queries @ keys.transpose(1, 2) * scale).softmax(-1).sum(1)
    chosen = index.select(queries, view, scale, 64)
    assert chosen.shape == (HEADS, 64)
    assert all(len(row.unique()) == 64 for row in chosen)
    covered = attention.gather(1, chosen).sum(1) / attention.topk(64).values.sum(1)
    assert covered.min() > (0.995 if flat_keys > 1500 else 0.9)


@pytest.mark.parametrize("n", [4200, 6000])
def test_codes_take_the_memory_that_icecache_counts(random, n):
    share = parse_policy({"name": "icecache", "index": "codes"}).retrieval.index_share
    keys = clustered(random, n, dim=64)
    index = CodedIndex(HEADS, 64)
    index.build(Keys.dense(keys))
    # A float32 key is as large as a bfloat16 key and its value.
    assert keys.nbytes / 4 < index.memory_bytes < share * keys.nbytes


# -- growth -------------------------------------------------------------------


def test_thousands_of_random_inserts(random):
    """Pages never overflow, keys never move, and the tree keeps its invariants."""
    keys = clustered(random, 3000)
    # Norms keep growing: every few inserts set a new maximum.
    keys = keys * torch.linspace(0.5, 2, 3000)[:, None]
    index = DCIIndex(HEADS, DIM, 8, promotion=0.1)
    places = index.places()
    done = inserts = 0
    while done < 3000:
        count = min(int(torch.randint(0, 4, (), generator=random)), 3000 - done)
        index.insert(Keys.dense(keys[:, done : done + count]))
        done += count
        inserts += 1
        if inserts % 400 == 0 or done == 3000:
            index.check_integrity(Keys.dense(keys[:, :done]))
            now = index.places()
            assert torch.equal(now[:, : places.shape[1]], places)
            assert (torch.bincount(now[0] // 8) <= 8).all()
            assert len(now[0].unique()) == done
            places = now
    assert inserts > 1000
    assert torch.equal(index.places(2990), places[:, 2990:])
    queries = torch.randn(HEADS, 2, DIM, generator=random)
    result = index.query_topk(queries, Keys.dense(keys), 10, 0)
    exact = scan.topk(queries[None], keys[None], 10)
    assert torch.equal(result.slots, exact.slots[0])


def test_the_seed_decides(random):
    keys = clustered(random, 1000)
    places = [tree_over(keys, seed=seed).places() for seed in (1, 1, 2)]
    assert torch.equal(places[0], places[1])
    assert not torch.equal(places[0], places[2])


def test_results_do_not_depend_on_threads(random):
    keys = clustered(random, 2000)
    queries = torch.randn(HEADS, 4, DIM, generator=random)
    threads = torch.get_num_threads()
    result = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)  # OpenMP's threads as well
            tree = tree_over(keys)
            result.append(tree.query_topk(queries, Keys.dense(keys), 20, 300))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(result[0].slots, result[1].slots)
    assert torch.equal(result[0].scores, result[1].scores)


# -- pages --------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DCIIndex, BruteForceIndex, CodedIndex])
def test_pages_are_those_of_the_best_keys(random, kind):
    keys = clustered(random, 400)
    view = Keys.dense(keys)
    index = kind(HEADS, DIM, 8)
    index.build(view)
    queries = torch.randn(HEADS, 3, DIM, generator=random)
    slots = index.query_topk(queries, view, 12).slots
    for limit in (1, 5, 100):
        expected = scan.pages(slots, index.places(), 8, limit)
        result = index.query_pages(queries, view, 12, limit)
        assert torch.equal(result.counts, expected.counts)
        assert torch.equal(result.pages, expected.pages)
    both = query_pages(
        [index, index],
        torch.stack([queries] * 2),
        Keys.dense(torch.stack([keys, keys])),
        12,
        100,
    )
    assert torch.equal(both.pages[1], result.pages)


# -- what is refused ----------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e19])
@pytest.mark.parametrize("kind", [DCIIndex, BruteForceIndex, CodedIndex])
def test_bad_keys_change_nothing(random, kind, bad):
    keys = clustered(random, 100)
    index = kind(HEADS, DIM)
    index.build(Keys.dense(keys[:, :60].contiguous()))
    spoiled = keys[:, 60:].clone()
    spoiled[1, 9, 3] = bad
    with pytest.raises(ValueError, match="key 9 of head 1 is not finite"):
        index.insert(Keys.dense(spoiled))
    assert index.num_keys == 60
    index.insert(Keys.dense(keys[:, 60:]))
    index.check_integrity(Keys.dense(keys))


def test_errors_say_what_is_wrong(random):
    keys = Keys.dense(clustered(random, 50))
    queries = torch.randn(HEADS, 1, DIM, generator=random)
    index = DCIIndex(HEADS, DIM)
    index.build(keys)
    with pytest.raises(ValueError, match="needs an empty index"):
        index.build(keys)
    with pytest.raises(ValueError, match="count is 51"):
        index.insert(keys, 51)
    with pytest.raises(ValueError, match="k must be positive"):
        index.query_topk(queries, keys, 0)
    with pytest.raises(ValueError, match="queries must be"):
        index.query_topk(queries[:1], keys, 1)
    with pytest.raises(ValueError, match="queries is not finite"):
        index.query_topk(queries * torch.nan, keys, 1)
    with pytest.raises(ValueError, match="the index reads 50"):
        index.query_topk(queries, Keys.dense(keys.data[:, :, :49]), 1)
    with pytest.raises(ValueError, match="keys must be float32, bfloat16"):
        index.query_topk(queries, Keys.dense(keys.data.half()), 1)
    table = torch.zeros(HEADS, 4, dtype=torch.int64)
    table[1, 2] = 9
    pages = torch.zeros(9, 16, DIM)
    with pytest.raises(ValueError, match="entry 6 is page 9"):
        index.query_topk(queries, Keys.paged(pages, table), 1)
    with pytest.raises(AssertionError, match="damaged"):
        index.check_integrity(Keys.dense(keys.data + 0.1))
    for wrong in ({"promotion": 0.9}, {"route": "x"}, {"composite": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DCIIndex(HEADS, DIM, **wrong)
    with pytest.raises(ValueError, match="composite and simple"):
        DCIIndex(HEADS, DIM, composite=0, visit_ratio=0.5)
    index.close()
    index.close()
    with pytest.raises(ValueError, match="closed"):
        index.query_topk(queries, keys, 1)


def test_memory_is_counted_and_freed(random):
    index = DCIIndex(HEADS, DIM)
    empty = index.memory_bytes
    # Long enough that partly used slabs of one more thread do not matter.
    index.build(Keys.dense(clustered(random, 16000)))
    growing = index.memory_bytes
    keys_bytes = HEADS * 16000 * DIM * 4
    assert empty < growing < keys_bytes
    handle = index.handle
    del index
    with pytest.raises(RuntimeError, match="there is no index"):
        torch.ops.kvp.index_stats(handle)


# -- without the extension ----------------------------------------------------


def test_the_scan_in_torch_is_the_same(random, monkeypatch):
    keys = clustered(random, 120)
    view = Keys.dense(keys)
    queries = torch.randn(HEADS, 3, DIM, generator=random)
    fast = BruteForceIndex(HEADS, DIM, 8)
    fast.build(view)
    monkeypatch.setenv("KVP_OPS", "torch")
    slow = BruteForceIndex(HEADS, DIM, 8)
    slow.build(Keys.dense(keys[:, :50]))
    slow.insert(Keys.dense(keys[:, 50:]))
    for k in (5, 200):
        one, two = (index.query_topk(queries, view, k) for index in (fast, slow))
        assert torch.equal(one.slots, two.slots)
        assert torch.equal(one.visits, two.visits)
    one, two = (index.query_pages(queries, view, 9, 4) for index in (fast, slow))
    assert torch.equal(one.pages, two.pages)
    assert slow.num_pages == fast.num_pages
    spoiled = torch.full((HEADS, 2, DIM), torch.nan)
    with pytest.raises(ValueError, match="key 0 of head 0"):
        slow.insert(Keys.dense(spoiled))
    with pytest.raises(RuntimeError, match="KVP_OPS") as caught:
        DCIIndex(HEADS, DIM)
    assert codes_in(str(caught.value)) == ("KVP403",)
