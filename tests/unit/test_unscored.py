"""Scores that are NaN, and blocks that are zeroed before somebody gets them."""

from __future__ import annotations

import logging

import torch
from layouts import make_layout

from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.scores import UnscoredTokens

LAYERS, BLOCKS, KV_HEADS = 3, 5, 2


def test_what_has_no_score_is_worth_the_least(caplog):
    unscored = UnscoredTokens()
    scores = torch.arange(24.0).view(LAYERS, KV_HEADS, 4)
    scores[1, 0, 2] = scores[2, 1] = torch.nan
    expected = scores.nan_to_num(-torch.inf)
    with caplog.at_level(logging.WARNING, "vllm.kv_policy"):
        found = unscored.last("snapkv", "chat-3", scores)
    assert found.equal(expected)
    (said,) = caplog.messages
    assert "request chat-3: snapkv" in said
    assert "NaN in 2 layers, first in layer 1" in said
    assert unscored.compactions == 1


def test_it_is_said_ever_more_seldom(caplog):
    unscored = UnscoredTokens()
    for number in range(10):
        unscored.last("knorm", f"chat-{number}", torch.full((1, 1, 1), torch.nan))
    assert unscored.compactions == 10
    assert [text.split(":")[0] for text in caplog.messages] == [
        "request chat-0",
        "request chat-9",
    ]


def test_all_other_scores_stay(caplog):
    unscored = UnscoredTokens()
    scores = torch.tensor([[[1.0, -torch.inf, torch.inf]]])
    assert unscored.last("knorm", "a", scores).equal(scores.clone())
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
