"""The tree of a KV head under random operations, against the exact scan.

``KVP_TEST_OPERATIONS``: their number (100,000 by default; try 1,000,000).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from stateful import run_machine

from vllm_kvplugins.index import BruteForceIndex, DCIIndex, Keys, compiled

pytestmark = pytest.mark.skipif(
    bool(compiled.extension_problem()), reason="the extension is not built"
)

HEADS, DIM, PAGE, MOST_KEYS = 2, 8, 4, 160
seeds = st.integers(0, 2**31)
counts = st.integers(1, 9)


class Tree(RuleBasedStateMachine):
    """A tree and a scan of the same keys; both restart when full."""

    operations = 0

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        self.open()

    def open(self) -> None:
        self.keys = torch.zeros(HEADS, MOST_KEYS, DIM)
        self.count = 0
        self.seed += 1
        settings = {"promotion": 0.25, "route": ("mean", "parent")[self.seed % 2]}
        self.tree = DCIIndex(HEADS, DIM, PAGE, seed=self.seed, **settings)
        self.scan = BruteForceIndex(HEADS, DIM, PAGE)

    @property
    def view(self) -> Keys:
        return Keys.dense(self.keys[:, : self.count])

    @precondition(lambda self: self.count < MOST_KEYS)
    @rule(seed=seeds, count=counts, scale=st.sampled_from((0.0, 1e-6, 1.0, 1e6)))
    def insert(self, seed: int, count: int, scale: float) -> None:
        """Keys of any norm, also all equal; integer norms cause ties."""
        random = torch.Generator().manual_seed(seed)
        count = min(count, MOST_KEYS - self.count)
        new = scale * torch.randint(-2, 3, (HEADS, count, DIM), generator=random)
        self.keys[:, self.count : self.count + count] = new
        for index in (self.tree, self.scan):
            index.insert(Keys.dense(new))
        self.count += count

    @rule(
        seed=seeds,
        head=st.integers(0, HEADS - 1),
        bad=st.sampled_from((float("nan"), float("inf"), 1e19)),
    )
    def insert_nonsense(self, seed: int, head: int, bad: float) -> None:
        """Is refused and changes nothing."""
        new = torch.ones(HEADS, 3, DIM)
        new[head, seed % 3, seed % DIM] = bad
        with pytest.raises(ValueError, match=r"not finite|exceeds"):
            self.tree.insert(Keys.dense(new))

    @precondition(lambda self: self.count > 0)
    @rule(seed=seeds, k=counts, group=st.integers(1, 3))
    def query(self, seed: int, k: int, group: int) -> None:
        """Without a limit, both return the same slots in the same order."""
        queries = self.queries(seed, group)
        result = self.tree.query_topk(queries, self.view, k, max_visits=0)
        exact = self.scan.query_topk(queries, self.view, k)
        assert torch.equal(result.slots, exact.slots)
        assert torch.equal(result.scores, exact.scores)

    @precondition(lambda self: self.count > 0)
    @rule(seed=seeds, k=counts, visits=st.integers(1, 64))
    def query_some(self, seed: int, k: int, visits: int) -> None:
        """With a limit, each returned slot occurs once and has its own score."""
        queries = self.queries(seed, 1)
        result = self.tree.query_topk(queries, self.view, k, max_visits=visits)
        exact = queries @ self.keys[:, : self.count].transpose(1, 2)
        for head in range(HEADS):
            slots = result.slots[head, 0]
            slots = slots[slots >= 0]
            assert 0 < len(slots) <= min(k, self.count)
            assert slots.max() < self.count
            assert slots.unique().numel() == slots.numel()
            scores = exact[head, 0, slots]
            torch.testing.assert_close(result.scores[head, 0, : len(slots)], scores)

    @precondition(lambda self: self.count > 0)
    @rule(seed=seeds, k=counts, max_pages=counts)
    def query_pages(self, seed: int, k: int, max_pages: int) -> None:
        """The pages of the best keys, in their order."""
        queries = self.queries(seed, 1)
        best = self.tree.query_topk(queries, self.view, k, max_visits=0).slots[:, 0]
        result = self.tree.query_pages(queries, self.view, k, max_pages, max_visits=0)
        pages = self.tree.places() // PAGE
        for head in range(HEADS):
            of_best = pages[head, best[head][best[head] >= 0]].tolist()
            expected = list(dict.fromkeys(of_best))[:max_pages]
            assert result.pages[head, : len(expected)].tolist() == expected
            assert result.counts[head] == len(expected)

    @rule()
    def check(self) -> None:
        """The tree is consistent, and every key keeps its place."""
        self.tree.check_integrity(self.view)

    @precondition(lambda self: self.count > MOST_KEYS // 2)
    @rule()
    def end(self) -> None:
        self.tree.close()
        self.scan.close()
        self.open()

    @invariant()
    def counted(self) -> None:
        type(self).operations += 1
        assert self.tree.num_keys == self.scan.num_keys == self.count
        places = self.tree.places()
        for head in range(HEADS):
            assert len(set(places[head].tolist())) == self.count

    def queries(self, seed: int, group: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed)
        noise = torch.randint(-2, 3, (HEADS, group, DIM), generator=random)
        return noise.float()


def test_any_operations_leave_the_tree_as_the_scan():
    run_machine(Tree)
