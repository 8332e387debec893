"""NaN scores, and zeroing of blocks before reuse."""

from __future__ import annotations

import re

import pytest
import torch
from layouts import make_layout
from policy_settings import write_weights

from vllm_kvplugins.budgets import ALLOCATORS, parse_allocator
from vllm_kvplugins.engine.compactor import InvalidScores
from vllm_kvplugins.engine.heap import Heap

LAYERS, BLOCKS, KV_HEADS = 3, 5, 2
BLOCK = 4


def settle(unscored, scores, policy="knorm", request="a", room=BLOCK):
    return unscored.replace(policy, request, scores, room)


def test_what_has_no_score_is_worth_the_least(caplog):
    unscored = InvalidScores()
    scores = torch.arange(24.0).view(LAYERS, KV_HEADS, 4)
    scores[1, 0, 2] = scores[2, 1] = torch.nan
    expected = scores.nan_to_num(-torch.inf)
    settled = settle(unscored, scores, "snapkv", "chat-3")
    assert settled.equal(expected)
    (message,) = caplog.messages
    assert "request chat-3: snapkv" in message
    assert "in 2 layers, first in layer 1" in message
    assert unscored.compactions == 1


def test_not_everything_can_demand_to_stay():
    unscored = InvalidScores()
    scores = torch.zeros(1, 3, 8)
    scores[0, 0, :5] = scores[0, 1, :4] = torch.inf
    before, maximum = scores.clone(), torch.finfo(torch.float32).max
    settled = settle(unscored, scores)
    assert settled[0, 0].tolist() == [maximum] * 5 + [0.0] * 3
    assert settled[0, 1:].equal(before[0, 1:])
    assert unscored.compactions == 1


@pytest.mark.parametrize("name", sorted(ALLOCATORS))
@pytest.mark.parametrize("score", [torch.nan, torch.inf, -torch.inf])
def test_every_allocator_takes_what_comes_of_it(tmp_path, name, score):
    weights = write_weights(tmp_path / "weights.json", LAYERS, KV_HEADS)
    allocator = parse_allocator(weights if name == "file" else name)
    scores = torch.rand(
        LAYERS, KV_HEADS, 7 * BLOCK, generator=torch.Generator().manual_seed(1)
    )
    for broken in (scores.clone(), torch.full_like(scores, score)):
        broken[1, 0] = score
        settled = settle(InvalidScores(), broken, room=3 * BLOCK)
        available = torch.full((LAYERS, KV_HEADS), 7)
        pages = allocator.allocate(settled, 3, BLOCK, available)
        assert int(pages.sum()) == 3 * LAYERS * KV_HEADS
        assert bool((pages <= available).all())


def test_the_warning_is_logged_for_the_first_and_the_tenth_request(caplog):
    unscored = InvalidScores()
    for number in range(10):
        nothing = torch.full((1, 1, 1), torch.nan)
        settle(unscored, nothing, request=f"chat-{number}")
    assert unscored.compactions == 10
    named = [re.findall(r"request (chat-\d)", text) for text in caplog.messages]
    assert named == [["chat-0"], ["chat-9"]]


def test_all_other_scores_stay(caplog):
    unscored = InvalidScores()
    scores = torch.tensor([[[1.0, -torch.inf, torch.inf]]])
    assert settle(unscored, scores).equal(scores.clone())
    assert not unscored.compactions
    assert not caplog.messages


def test_only_these_blocks_are_cleared():
    layout = make_layout("natural", 4, 2, seed=0)
    # pages with gaps between them, as in vLLM's cache
    memory = torch.ones(LAYERS * BLOCKS * KV_HEADS, layout.page_elems + 3)
    heap = Heap(memory[:, :-3], layout, LAYERS, BLOCKS, KV_HEADS)
    heap.clear(torch.tensor([3, 1]))
    cleared = memory.view(LAYERS, BLOCKS, KV_HEADS, -1)[..., :-3].sum((0, 2, 3)) == 0
    assert cleared.tolist() == [False, True, False, True, False]
    assert memory[:, -3:].bool().all()
