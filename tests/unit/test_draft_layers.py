"""The layers of a drafter keep the tokens that the model's layers score highest.

Every key carries its position, so that the tokens behind a page list can be read back.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.draft_layers import DraftLayers, followed_layer
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction

SEED = 20261125
LAYERS, KV_HEADS = 4, 2  # of the model
BLOCK, BLOCKS = 4, 40
PROMPT = 38


def new_heap(layers: int, heads: int, head_dim: int) -> Heap:
    layout = PageLayout.natural(BLOCK, head_dim)
    pages = torch.zeros(layers * BLOCKS * heads, layout.page_elems)
    return Heap(pages, layout, layers, BLOCKS, heads)


class Bench:
    """Draft layers next to a model, and one request.

    Attributes:
        table: int64, its blocks.
    """

    def __init__(self, layers: int = 2, heads: int = KV_HEADS, dim: int = 8) -> None:
        print("seed", SEED)
        self.rng = torch.Generator().manual_seed(SEED)
        self.model = new_heap(LAYERS, KV_HEADS, 8)
        self.heap = new_heap(layers, heads, dim)
        self.drafts = DraftLayers(self.heap, self.model)
        self.table = torch.randperm(BLOCKS - 1, generator=self.rng) + 1

    def write(self, positions: Sequence[int]) -> None:
        """Write the keys of these tokens into all rows of the draft layers."""
        for position in positions:
            pages = self.heap.page_ids(self.table[position // BLOCK][None])[:, 0]
            keys = self.heap.pages.view(-1, 2, BLOCK, self.heap.layout.head_dim)
            keys[pages, 0, position % BLOCK] = float(position)

    def compact(
        self,
        tokens: int,
        compaction: Compaction,
        scores: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """One compaction after ``tokens`` tokens, with the model's scores."""
        row = Row("r", PROMPT, tokens - 1, 1, 0)
        due = DueCompaction(row, compaction, tokens, self.table)
        self.drafts.compact(due, scores, positions)
        self.drafts.check_integrity({"r"})

    def attended(self, tokens: int) -> list[list[int]]:
        """Sorted positions that each (layer, KV head) of the drafter attends to."""
        table = self.table[None].int()
        flat = self.drafts.build(["r"], torch.tensor([tokens]), table)
        assert flat.pages.shape[0] == 1, "one table serves all draft layers"
        heads, rows = self.heap.num_kv_heads, []
        for layer in range(self.heap.num_layers):
            pages = flat.pages[0].long() + layer * BLOCKS * heads
            keys = self.heap.keys(layer, pages)[..., 0].long()
            for head, length in enumerate(flat.lengths[0].tolist()):
                rows.append(sorted(keys[head, :length].tolist()))
        return rows


def plain(bench: Bench, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random scores of an uncompacted request's full blocks, and their positions."""
    slots = tokens // BLOCK * BLOCK
    scores = torch.rand(LAYERS, KV_HEADS, slots, generator=bench.rng)
    owned = PageList.of_blocks(bench.model, bench.table[: -(-tokens // BLOCK)], 0)
    return scores, owned.positions


FIRST = Compaction(PROMPT, BlockSpan(0, 9), BlockSpan(6, 9))


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "followed"),
    [
        (2, 2, 8, [(1, 0), (1, 1), (3, 0), (3, 1)]),
        (1, 4, 16, [(3, 0), (3, 0), (3, 1), (3, 1)]),
        (2, 1, 8, [(1, 0), (3, 0)]),
        (4, 2, 8, [(layer, head) for layer in range(4) for head in range(2)]),
    ],
)
def test_rows_keep_the_best_tokens_of_the_row_that_they_follow(
    layers, heads, dim, followed
):
    bench = Bench(layers, heads, dim)
    bench.write(range(PROMPT))
    scores, positions = plain(bench, PROMPT)
    bench.compact(PROMPT, FIRST, scores, positions)
    kept = 3 * BLOCK
    expected = [
        [*sorted(scores[row].topk(kept).indices.tolist()), 36, 37] for row in followed
    ]
    assert bench.attended(PROMPT) == expected


def test_later_tokens_compete_with_those_that_the_first_compaction_kept():
    bench = Bench(layers=4)
    bench.write(range(PROMPT))
    scores, positions = plain(bench, PROMPT)
    bench.compact(PROMPT, FIRST, scores, positions)
    before = bench.attended(PROMPT)
    bench.write(range(PROMPT, 48))
    # The model now holds other tokens: half of those that it had, and all new ones.
    held = torch.arange(24, 48)
    scores = torch.rand(LAYERS, KV_HEADS, 24, generator=bench.rng)
    second = Compaction(48, BlockSpan(6, 12), BlockSpan(10, 12))
    bench.compact(48, second, scores, held.int().expand(LAYERS * KV_HEADS, -1))
    for row, (kept, after) in enumerate(zip(before, bench.attended(48), strict=True)):
        own = {*kept, *range(PROMPT, 48)} & set(held.tolist())
        by_score = dict(zip(held.tolist(), scores.flatten(0, 1)[row], strict=True))
        best = sorted(own, key=lambda p, s=by_score: -float(s[p]))[: 2 * BLOCK]
        assert after == sorted(best)


def test_fixed_blocks_stay_whole():
    bench = Bench()
    bench.write(range(PROMPT))
    bench.compact(PROMPT, FIRST, *plain(bench, PROMPT))
    before = [row[:12] for row in bench.attended(PROMPT)]
    bench.write(range(PROMPT, 48))
    scores = torch.rand(LAYERS, KV_HEADS, 24, generator=bench.rng)
    scores[..., :12] = -torch.inf
    positions = torch.cat([torch.arange(12), torch.arange(36, 48)]).int()
    second = Compaction(48, BlockSpan(6, 12), BlockSpan(8, 12), fixed_blocks=3)
    bench.compact(48, second, scores, positions.expand(LAYERS * KV_HEADS, -1))
    for kept, after in zip(before, bench.attended(48), strict=True):
        assert set(kept) < set(after)
        assert len(after) == len(set(after)) == 16


def test_a_token_that_the_model_dropped_is_dropped_first():
    bench = Bench(layers=1, heads=1)
    bench.write(range(PROMPT))
    scores, positions = plain(bench, PROMPT)
    positions = positions.clone()
    positions[:, 20:36] = -1  # the policy gave these rows fewer pages
    scores[..., 20:] = -torch.inf
    bench.compact(PROMPT, FIRST, scores, positions)
    ((*kept, _, _),) = bench.attended(PROMPT)
    assert kept == sorted(scores[3, 0].topk(12).indices.tolist())


def test_requests_that_leave_return_their_slot_index():
    bench = Bench()
    bench.write(range(PROMPT))
    scores = plain(bench, PROMPT)
    bench.compact(PROMPT, FIRST, *scores)
    assert bench.drafts.device_bytes("r") > 0
    bench.drafts.forget("r")
    bench.drafts.forget("another")
    bench.drafts.check_integrity(set())
    assert bench.drafts.device_bytes("r") == 0
    with pytest.raises(AssertionError, match="draft layers"):
        bench.drafts.check_integrity({"r"})


def test_new_blocks_are_cleared_in_the_layers_of_model_and_drafter():
    bench = Bench()
    geometry = Geometry(BLOCK, LAYERS, KV_HEADS, 2 * LAYERS * KV_HEADS * 8 * 4)
    runtime = PolicyRuntime(parse_policy("full"), geometry)
    runtime.clear_blocks(torch.tensor([3]))  # the heap is not bound: nothing to clear
    runtime.bind_heap(bench.model, [1.0] * LAYERS, None, draft_heap=bench.heap)
    for heap in (bench.model, bench.heap):
        heap.pages.fill_(torch.nan)
    runtime.clear_blocks(torch.tensor([3, 5]))
    for heap in (bench.model, bench.heap):
        left = torch.arange(BLOCKS) != 3
        left &= torch.arange(BLOCKS) != 5
        assert not heap.pages[heap.page_ids(torch.tensor([3, 5]))].any()
        assert heap.pages[heap.page_ids(left.nonzero()[:, 0])].isnan().all()
    assert runtime.draft_layers is not None
    runtime.unbind_heap()
    assert runtime.draft_layers is None


@pytest.mark.parametrize("layers", [1, 2, 5, 30])
def test_followed_layers_ascend_and_end_with_the_last(layers):
    for drafts in (1, 2, 3, 30, 40):
        followed = [followed_layer(d, drafts, layers) for d in range(drafts)]
        assert followed == sorted(followed)
        assert followed[-1] == layers - 1
        assert min(followed) >= 0
    assert [followed_layer(d, layers, layers) for d in range(layers)] == [
        *range(layers)
    ]
