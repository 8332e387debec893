"""LagKV against its definition in loops, and what it promises."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from views import make_layer_view

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.lagkv import LagKV
from vllm_kvplugins.scoring.selection import keep_top

SEED, HEADS, DIM, LAG, SINKS = 20261126, 2, 6, 5, 3


def make_policy(**options: object) -> LagKV:
    return parse_policy({"name": "lagkv", "lag": LAG, "sinks": SINKS, **options})


def make_view(slots: int, dtype: torch.dtype = torch.float32) -> LayerView:
    generator = torch.Generator().manual_seed(SEED + slots)
    keys, values = torch.randn(2, HEADS, slots, DIM, generator=generator).to(dtype)
    return make_layer_view(
        layer=0,
        keys=keys,
        positions=torch.arange(slots).expand(HEADS, -1),
        queries=keys[:, :0],
        query_positions=torch.arange(0),
        load_values=lambda: values,
    )


def spread(states: list[list[float]], following: list[list[float]]) -> list[float]:
    """Softmax over a partition of the deviation of its scaled states."""
    low = [min(column) for column in zip(*following, strict=True)]
    high = [max(column) for column in zip(*following, strict=True)]
    raw = []
    for state in states:
        scaled = [(x - a) / (b - a) for x, a, b in zip(state, low, high, strict=True)]
        raw.append(math.exp(statistics.stdev(scaled)))
    return [x / sum(raw) for x in raw]


def ranks_by_the_paper(view: LayerView) -> list[list[int | None]]:
    """Rank of each slot in its partition, best first; None if it must stay."""
    ranks = []
    for head in range(HEADS):
        keys, values = view.keys[head].tolist(), view.values[head].tolist()
        row: list[int | None] = [None] * len(keys)
        for start in range(SINKS, len(keys) - 2 * LAG + 1, LAG):
            own, following = (
                slice(start, start + LAG),
                slice(start + LAG, start + 2 * LAG),
            )
            by_key = spread(keys[own], keys[following])
            by_value = spread(values[own], values[following])
            worth = [a + b for a, b in zip(by_key, by_value, strict=True)]
            order = sorted(range(LAG), key=lambda i: -worth[i])
            for rank, index in enumerate(order):
                row[start + index] = rank
        ranks.append(row)
    return ranks


@pytest.mark.parametrize("slots", [13, 14, 23, 40])
def test_ranks_are_the_papers(slots):
    view = make_view(slots)
    scores = make_policy().score(view)
    assert scores[:, :SINKS].isposinf().all()
    for head, row in enumerate(ranks_by_the_paper(view)):
        for slot, rank in enumerate(row):
            if rank is not None:
                assert scores[head, slot] == pytest.approx((LAG - 1 - rank) / LAG)
            else:
                assert scores[head, slot] >= 1


def test_each_partition_keeps_the_same_share():
    """The newest partition and the rest behind it stay whole."""
    slots = SINKS + 6 * LAG + 2
    scores = make_policy().score(make_view(slots))
    count = SINKS + 5 * 2 + LAG + 2  # two of each partition that is scored
    keep = keep_top(scores, torch.tensor([count] * HEADS))
    assert keep[:, :SINKS].all()
    assert keep[:, SINKS + 5 * LAG :].all()
    scored = keep[:, SINKS : SINKS + 5 * LAG].view(HEADS, 5, LAG)
    assert scored.sum(-1).eq(2).all()


@pytest.mark.parametrize("slots", [1, SINKS, SINKS + 1, SINKS + 2 * LAG - 1])
def test_short_caches_keep_the_newest(slots):
    scores = make_policy().score(make_view(slots))
    assert scores[:, :SINKS].isposinf().all()
    assert scores[:, SINKS:].isfinite().all()
    assert (scores[:, SINKS:].diff() > 0).all()


def test_a_token_unlike_those_that_follow_stays():
    """Paper's claim, without queries: an outlier is kept."""
    view = make_view(SINKS + 4 * LAG)
    view.keys[:, SINKS + 2, 0] += 30
    scores = make_policy().score(view)
    assert (scores[:, SINKS : SINKS + LAG].argmax(1) == 2).all()


def test_equal_elements_do_not_break_the_scores():
    view = make_view(SINKS + 4 * LAG)
    view.keys[:] = 1
    view.values[..., 0] = 0
    assert make_policy().score(view).isnan().sum() == 0


def test_slots_without_a_token_are_not_read():
    whole = make_view(40)
    view = make_view(40)
    valid = torch.ones(HEADS, 40, dtype=torch.bool)
    valid[1, :7] = False
    keys, values = view.keys.clone(), view.values.clone()
    keys[~valid] = values[~valid] = torch.nan
    positions = view.positions.clone()
    positions[1, 7:] -= 7
    padded = make_layer_view(
        layer=0,
        keys=keys,
        valid=valid,
        positions=positions.masked_fill(~valid, -1),
        load_values=lambda: values,
    )
    alone = make_layer_view(
        layer=0,
        keys=whole.keys[1:, 7:],
        positions=torch.arange(33)[None],
        load_values=lambda: whole.values[1:, 7:],
    )
    scores = make_policy().score(padded)
    torch.testing.assert_close(scores[0], make_policy().score(whole)[0])
    assert scores[1, :7].isneginf().all()
    torch.testing.assert_close(scores[1, 7:], make_policy().score(alone)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_computed_in_float32(dtype):
    view = make_view(40, dtype)
    wide = make_layer_view(
        layer=0,
        keys=view.keys.float(),
        positions=view.positions,
        load_values=lambda: view.values.float(),
    )
    assert torch.equal(make_policy().score(view), make_policy().score(wide))
