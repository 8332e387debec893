"""Selection by votes and filling of hot slots: compiled against torch."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins import ops
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.index import (
    BruteForceIndex,
    DCIIndex,
    Keys,
    compiled,
    scan_in_torch,
    select_compiled,
)
from vllm_kvplugins.ops import hot_set
from vllm_kvplugins.ops.layout import PageLayout

SEEDS = [3, 20261121]
needs_extension = pytest.mark.skipif(
    bool(compiled.extension_problem()), reason="the extension is not built"
)


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed{seed}")
def random(request):
    print("seed", request.param)
    return torch.Generator().manual_seed(request.param)


def paged(random, keys: list[torch.Tensor], page_tokens: int) -> tuple[HostTier, Keys]:
    """Keys [heads, n, dim] of requests in a host tier, pages in random order."""
    heads, _, dim = keys[0].shape
    longest = max(-(-part.shape[1] // page_tokens) for part in keys)
    total = len(keys) * heads * longest
    tier = HostTier(total * 2 * page_tokens * dim * 4, page_tokens, dim, keys[0].dtype)
    ids = tier.take(total)[torch.randperm(total, generator=random)]
    table = ids.view(len(keys), heads, longest)
    for request, part in enumerate(keys):
        tier.write(table[request], 0, part, -part)
    return tier, tier.keys(table)


# -- selection ------------------------------------------------------------------------


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 40, 300])
def test_the_scan_s_votes_equal_torch(random, dtype, count):
    """Requests of different lengths in one call; one is too short."""
    lengths, heads, group, dim = [1, 37, 900], 2, 3, 24
    keys = [torch.randn(heads, n, dim, generator=random).to(dtype) for n in lengths]
    queries = 3 * torch.randn(3, heads, group, dim, generator=random).to(dtype)
    _, view = paged(random, keys, 8)
    indexes = []
    for part in keys:
        indexes.append(BruteForceIndex(heads, dim))
        indexes[-1].insert(Keys.dense(part))
    actual = select_compiled(indexes, queries, view, 0.3, count)
    right = scan_in_torch(lengths, queries, view, 0.3, count)
    assert actual.shape == (3, heads, count)
    assert actual.lt(0).equal(right.lt(0)), "as many as there are"
    for request, part in enumerate(keys):
        logits = queries[request].float() @ part.float().transpose(1, 2) * 0.3
        worth = logits.softmax(-1).sum(1)
        have = min(count, part.shape[1])
        for head in range(heads):
            ours, torch_s = actual[request, head, :have], right[request, head, :have]
            assert len(set(ours.tolist())) == have
            torch.testing.assert_close(worth[head][ours], worth[head][torch_s])


@needs_extension
def test_ties_go_to_the_lower_slot(random):
    keys = torch.ones(1, 50, 4)
    index = BruteForceIndex(1, 4)
    index.insert(Keys.dense(keys))
    actual = select_compiled([index], torch.ones(1, 1, 2, 4), Keys.dense(keys), 1.0, 7)
    assert actual.flatten().tolist() == list(range(7))


@needs_extension
def test_a_tree_votes_on_what_it_looks_at(random):
    """Without a limit the result equals the scan's; with a limit of one key, a query
    adds no vote.
    """
    keys = torch.randn(2, 3000, 16, generator=random)
    queries = torch.randn(1, 2, 2, 16, generator=random)
    tree = DCIIndex(2, 16, 16, max_visits=0)
    scan = BruteForceIndex(2, 16)
    for index in (tree, scan):
        index.insert(Keys.dense(keys))
    whole = select_compiled([tree], queries, Keys.dense(keys), 1.0, 60)
    exact = select_compiled([scan], queries, Keys.dense(keys), 1.0, 60)
    worth = (queries[0] @ keys.transpose(1, 2)).softmax(-1).sum(1)
    torch.testing.assert_close(worth.gather(1, whole[0]), worth.gather(1, exact[0]))
    tree.default_visits = 400
    some = select_compiled([tree], queries, Keys.dense(keys), 1.0, 2000)
    looked_at = some.ge(0).sum(-1)
    assert (looked_at >= 400).all(), looked_at
    assert (looked_at < 2 * 500).all(), looked_at
    mixed = select_compiled(
        [tree, scan],
        queries.expand(2, -1, -1, -1),
        Keys.dense(torch.stack([keys, keys])),
        1.0,
        60,
    )
    assert mixed[1].equal(exact[0]), "a tree beside it changes no scan"


@needs_extension
def test_bad_selections(random):
    keys = torch.randn(2, 30, 8, generator=random)
    index = BruteForceIndex(2, 8)
    index.insert(Keys.dense(keys))
    query = torch.zeros(1, 2, 1, 8)
    for scale in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale"):
            select_compiled([index], query, Keys.dense(keys), scale, 3)
    with pytest.raises(ValueError, match="k must be positive"):
        select_compiled([index], query, Keys.dense(keys), 1.0, 0)
    with pytest.raises(ValueError, match="at least one index"):
        select_compiled([], query, Keys.dense(keys), 1.0, 1)
    with pytest.raises(ValueError, match="29 slots"):
        select_compiled([index], query, Keys.dense(keys[:, :29]), 1.0, 1)


# -- hot slots ------------------------------------------------------------------------

HEADS, DIM, BLOCK, WIDTH, TOKENS = 2, 8, 4, 12, 90


class Scene:
    """Three requests with hot slots all over a heap, and their tokens on the host."""

    def __init__(self, random, dtype: torch.dtype) -> None:
        self.layout = PageLayout.transposed_keys(BLOCK, DIM)
        pages = 3 * HEADS * WIDTH // BLOCK
        self.heap = torch.randn(pages, 2 * BLOCK * DIM, generator=random).to(dtype)
        self.keys = [
            torch.randn(HEADS, TOKENS, DIM, generator=random).to(dtype)
            for _ in range(3)
        ]
        self.tier, self.view = paged(random, self.keys, 8)
        spots = torch.randperm(pages * BLOCK, generator=random)
        spots = spots.view(3, HEADS, WIDTH)
        self.page, self.slot = spots // BLOCK, spots % BLOCK
        order = torch.rand(3, HEADS, TOKENS, generator=random).argsort(-1)
        self.token = order[..., :WIDTH].contiguous()
        self.counts = torch.tensor([WIDTH, 5, 0])
        self.write()

    def write(self) -> None:
        """Make the hot slots hold the tokens that ``token`` names."""
        for slot_index in range(3):
            for head in range(HEADS):
                token = self.token[slot_index, head]
                keys = self.keys[slot_index][head][token]
                spot = self.page[slot_index, head], self.slot[slot_index, head]
                ops.scatter_tokens(self.kv, *spot, keys, -keys)

    def fill(self, expected: torch.Tensor, slot_indices: list[int]) -> torch.Tensor:
        return hot_set.fill_hot(
            self.kv,
            ops.HostPages(self.tier.pages, self.view.table[slot_indices]),
            expected,
            torch.tensor(slot_indices),
            self.hot,
        )

    @property
    def kv(self) -> ops.PagedKV:
        return ops.PagedKV(self.heap, self.layout)

    @property
    def hot(self) -> ops.HotSet:
        return ops.HotSet(self.token, self.page, self.slot, self.counts)

    def check_contents(self) -> None:
        for slot_index in range(3):
            for head in range(HEADS):
                keys, values = ops.gather_tokens(
                    self.kv,
                    self.page[slot_index, head],
                    self.slot[slot_index, head],
                )
                right = self.keys[slot_index][head][self.token[slot_index, head]]
                assert keys.equal(right)
                assert values.equal(-right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_hot_slots_hold_what_is_wanted(random, monkeypatch, dtype, backend):
    if backend == "torch":
        monkeypatch.setenv("KVP_OPS", "torch")
    elif compiled.extension_problem():
        pytest.skip("the extension is not built")
    scene = Scene(random, dtype)
    slot_indices = [2, 0, 1]
    for limit in (WIDTH, 5, 3, 30):
        before = scene.token.clone()
        order = torch.rand(3, HEADS, TOKENS, generator=random).argsort(-1)
        expected = order[..., :limit].contiguous()
        expected[torch.rand(expected.shape, generator=random) < 0.1] = -1
        copied = scene.fill(expected, slot_indices)
        scene.check_contents()
        for row, slot_index in enumerate(slot_indices):
            count, fetched = int(scene.counts[slot_index]), 0
            assert scene.token[slot_index, :, count:].equal(
                before[slot_index, :, count:]
            )
            for head in range(HEADS):
                hot = scene.token[slot_index, head, :count].tolist()
                old = before[slot_index, head, :count].tolist()
                want = [t for t in expected[row, head, :count].tolist() if t >= 0]
                assert len(set(hot)) == count
                assert set(want) <= set(hot), "what is wanted is there"
                fetched += len(set(want) - set(old))
                # nothing moves, and no kept slot was needed elsewhere
                moved = [a for a, b in zip(old, hot, strict=True) if a != b]
                assert not set(moved) & set(want)
            assert int(copied[row]) == fetched


@needs_extension
def test_torch_fills_the_same_slots(random, monkeypatch):
    order = torch.rand(3, HEADS, TOKENS, generator=random).argsort(-1)
    filled = []
    for backend in ("auto", "torch"):
        monkeypatch.setenv("KVP_OPS", backend)
        scene = Scene(torch.Generator().manual_seed(1), torch.float32)
        scene.fill(order[..., :9].contiguous(), [0, 1, 2])
        filled.append((scene.token, scene.heap))
    assert filled[0][0].equal(filled[1][0])
    assert filled[0][1].equal(filled[1][1])


@needs_extension
def test_whole_pages_are_fetched_by_both_backends(random, monkeypatch):
    """Twelve hot slots hold a page and a half: pages of eight tokens."""
    results = []
    for backend in ("auto", "torch"):
        monkeypatch.setenv("KVP_OPS", backend)
        scene = Scene(torch.Generator().manual_seed(1), torch.float32)
        scene.token = torch.tensor([[[3], [-1]], [[9], [0]], [[1], [2]]])
        scene.counts = torch.tensor([1, 1, 0])
        scene.page, scene.slot = scene.page[..., :8], scene.slot[..., :8]
        hot = ops.HotSet(
            scene.token, scene.page.contiguous(), scene.slot.contiguous(), scene.counts
        )
        copied = hot_set.fill_hot(
            scene.kv,
            ops.HostPages(scene.tier.pages, scene.view.table),
            torch.tensor([[[3], [5]], [[2], [0]], [[4], [4]]]),
            torch.arange(3),
            hot,
            whole_pages=True,
        )
        assert copied.tolist() == [1, 1, 0]
        assert scene.token.flatten().tolist() == [3, 5, 2, 0, 1, 2]
        for entry, head, page in ((0, 1, 5), (1, 0, 2)):
            spot = scene.page[entry, head], scene.slot[entry, head]
            keys, values = ops.gather_tokens(scene.kv, *spot)
            right = scene.keys[entry][head, page * 8 : page * 8 + 8]
            assert keys.equal(right)
            assert values.equal(-right)
        results.append(scene.heap)
    assert results[0].equal(results[1])


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_swaps_are_what_a_fill_copies(random, monkeypatch, backend):
    """For heaps that the host cannot write: rows to copy, and their targets."""
    if backend == "torch":
        monkeypatch.setenv("KVP_OPS", "torch")
    elif compiled.extension_problem():
        pytest.skip("the extension is not built")
    order = torch.rand(3, HEADS, TOKENS, generator=random).argsort(-1)
    slot_indices, expected = [2, 0, 1], order[..., :9].contiguous()
    filled, scene = (
        Scene(torch.Generator().manual_seed(1), torch.float32) for _ in "ab"
    )
    copied = filled.fill(expected, slot_indices)
    moves, actual = hot_set.swap_hot(
        ops.HostPages(scene.tier.pages, scene.view.table[slot_indices]),
        expected,
        torch.tensor(slot_indices),
        scene.hot,
    )
    assert actual.equal(copied)
    assert moves.shape == (4, int(copied.sum()))
    assert scene.token.equal(filled.token)
    rows = scene.tier.pages.view(-1, DIM)
    keys, values, *places = moves
    ops.scatter_tokens(scene.kv, *places, rows[keys], rows[values])
    assert scene.heap.equal(filled.heap)


@needs_extension
def test_bad_fills_are_refused(random):
    scene = Scene(random, torch.float32)
    expected = torch.zeros(1, HEADS, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="beyond the 96 tokens"):
        scene.fill(expected + 96, [0])
    with pytest.raises(ValueError, match="table must have shape"):
        scene.fill(expected[:, :1], [0])
    scene.counts[0] = WIDTH + 1
    with pytest.raises(ValueError, match="slot index 0"):
        scene.fill(expected, [0])
    scene.counts[0] = WIDTH
    scene.page[0, 0, 2] = len(scene.heap)
    with pytest.raises(ValueError, match="hot slot 2"):
        scene.fill(expected, [0])
    scene.page[0, 0, 2] = 0
    scene.token[0, 1, 3] = -7
    with pytest.raises(ValueError, match="head 1: entry 4"):
        scene.fill(expected, [0])


# -- host pages -----------------------------------------------------------------------


def test_host_pages_have_one_owner(random):
    tier = HostTier(100 * 2 * 4 * 8 * 2, 4, 8, torch.bfloat16)
    assert tier.num_free == 100
    owned: list[torch.Tensor] = []
    for _ in range(300):
        want = int(torch.randint(0, 30, (), generator=random))
        if want <= tier.num_free and torch.rand((), generator=random) < 0.6:
            owned.append(tier.take(want))
            assert len(owned[-1]) == want
        elif owned:
            tier.release(owned.pop(len(owned) // 2))
        tier.check_integrity(owned)
        held = sum(map(len, owned))
        assert tier.num_free == 100 - held
    for pages in owned:
        tier.release(pages)
    tier.check_integrity([])
    whole = tier.take(100)
    with pytest.raises(RuntimeError, match="0 free pages"):
        tier.take(1)
    with pytest.raises(AssertionError, match="lost"):
        tier.check_integrity([whole[1:]])
    with pytest.raises(AssertionError, match="other owners"):
        tier.check_integrity([whole, whole[:1]])
