"""TriAttention against the trigonometric series of its paper, term by term."""

from __future__ import annotations

import cmath

import pytest
import torch
from views import make_layer_view

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.scoring.rotary import Rotary

SEED, DIM, TABLE, WINDOW = 20261126, 8, 400, 6


def angular_frequencies(pairs: int) -> torch.Tensor:
    return 100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)


def make_rotary(pairs: int, is_neox: bool, factor: float = 1.0) -> Rotary:
    angles = torch.arange(TABLE, dtype=torch.float64)[:, None]
    angles = angles * angular_frequencies(pairs)
    cos, sin = (angles.cos() * factor).float(), (angles.sin() * factor).float()
    return Rotary(cos, sin, is_neox)


def complex_pairs(states: torch.Tensor, pairs: int, is_neox: bool) -> torch.Tensor:
    """complex128 [..., pairs] of states before RoPE."""
    states = states.double()[..., : 2 * pairs]
    if is_neox:
        return torch.complex(states[..., :pairs], states[..., pairs:])
    return torch.complex(states[..., 0::2], states[..., 1::2])


def rotated(states: torch.Tensor, positions: torch.Tensor, rotary: Rotary):
    return rotary._rotate(states, rotary.cos[positions], rotary.sin[positions])


def make_states(heads: int, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED + seed)
    center = torch.randn(heads, 1, DIM, generator=generator)
    return center + 0.5 * torch.randn(heads, count, DIM, generator=generator)


def make_view(
    rotary: Rotary, slots: int = 30, heads: int = 2, group: int = 2, first: int = 0
) -> tuple[LayerView, torch.Tensor, torch.Tensor]:
    """A view, and its keys and queries before RoPE."""
    keys, queries = make_states(heads, slots, 1), make_states(heads * group, WINDOW, 2)
    positions = torch.arange(first, first + slots)
    view = make_layer_view(
        layer=0,
        keys=rotated(keys, positions, rotary),
        positions=positions.expand(heads, -1),
        queries=rotated(queries, positions[-WINDOW:], rotary),
        query_positions=positions[-WINDOW:],
        scale=0.3,
        rotary=rotary,
        load_values=lambda: pytest.fail("triattention does not read values"),
    )
    return view, keys, queries


def by_the_paper(
    view: LayerView, keys: torch.Tensor, queries: torch.Tensor, future: int, pairs: int
) -> torch.Tensor:
    """float64 [kv heads, slots]: the series over frequencies and distances."""
    rotary = view.rotary
    factor = float(torch.hypot(rotary.cos[0, 0], rotary.sin[0, 0])) ** 2
    q = complex_pairs(queries, pairs, rotary.is_neox)
    k = complex_pairs(keys, pairs, rotary.is_neox)
    frequencies = angular_frequencies(pairs).tolist()
    newest = int(view.query_positions[-1])
    heads, slots = keys.shape[:2]
    group = queries.shape[0] // heads
    offsets = [2**n for n in range(40) if 2**n <= future and newest + 2**n < TABLE]
    scores = torch.zeros(queries.shape[0], slots, dtype=torch.float64)
    for head in range(queries.shape[0]):
        for slot in range(slots):
            for f, frequency in enumerate(frequencies):
                center = complex(q[head, :, f].mean())
                length = float(q[head, :, f].abs().mean())
                key = complex(k[head // group, slot, f])
                phase = cmath.phase(center) - cmath.phase(key)
                terms = [
                    cmath.cos(
                        frequency * (newest + d - int(view.positions[0, slot])) + phase
                    ).real
                    for d in offsets
                ]
                trig = abs(center) * abs(key) * sum(terms) / len(terms)
                norm = (length - abs(center)) * abs(key)
                scores[head, slot] += factor * (trig + norm)
    deviation = scores.std(-1, unbiased=False, keepdim=True)
    scores = (scores - scores.mean(-1, keepdim=True)) / deviation
    return scores.view(heads, group, slots).amax(1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("factor", [1.0, 1.3])
@pytest.mark.parametrize(("future", "first"), [(1, 0), (64, 17), (65536, 100)])
def test_scores_are_the_series(is_neox, factor, future, first):
    view, keys, queries = make_view(make_rotary(DIM // 2, is_neox, factor), first=first)
    policy = parse_policy(
        {"name": "triattention", "window": WINDOW, "future": future, "recent": 0}
    )
    expected = by_the_paper(view, keys, queries, future, DIM // 2)
    torch.testing.assert_close(
        policy.score(view).double(), expected, rtol=1e-3, atol=1e-4
    )


def test_elements_without_rotation_are_frequencies_of_zero():
    """Such an element adds the product of means and the spread of its lengths."""
    rotary = make_rotary(2, True)
    view, keys, queries = make_view(rotary, heads=1, group=1)
    policy = parse_policy({"name": "triattention", "window": WINDOW, "recent": 0})
    rotated_only = torch.cat([keys[..., :4], torch.zeros_like(keys[..., 4:])], -1)
    plain = policy._series(view)[0, 0].double()
    positions = view.positions[0]
    without = make_layer_view(
        layer=0,
        keys=rotated(rotated_only, positions, rotary),
        positions=view.positions,
        queries=view.queries,
        query_positions=view.query_positions,
        rotary=rotary,
    )
    rest_q, rest_k = queries[0, :, 4:].double(), keys[0, :, 4:].double()
    spread = rest_q.abs().mean(0) - rest_q.mean(0).abs()
    added = rest_k @ rest_q.mean(0) + rest_k.abs() @ spread
    torch.testing.assert_close(
        plain - policy._series(without)[0, 0].double(), added, rtol=1e-4, atol=1e-4
    )


def test_concentrated_queries_are_scored_by_their_logits_alone():
    """Paper's claim: with one and the same query, the series is its logit."""
    rotary = make_rotary(DIM // 2, True)
    view, _, queries = make_view(rotary, heads=1, group=1)
    same = queries[:, :1].expand(-1, WINDOW, -1)
    view.queries[:] = rotated(same, view.query_positions, rotary)
    policy = parse_policy(
        {"name": "triattention", "window": WINDOW, "future": 1, "recent": 0}
    )
    newest = view.query_positions[-1:] + 1
    logits = (rotated(same[:, :1], newest, rotary) @ view.keys.mT)[0, 0]
    torch.testing.assert_close(policy._series(view)[0, 0], logits, rtol=1e-3, atol=1e-4)


def test_the_newest_stay_and_slots_without_a_token_are_not_read():
    rotary = make_rotary(DIM // 2, True)
    view, _, _ = make_view(rotary)
    policy = parse_policy({"name": "triattention", "window": WINDOW, "recent": 5})
    whole = policy.score(view)
    assert whole[:, -5:].isposinf().all()
    assert whole[:, :-5].isfinite().all()
    keys, valid = view.keys.clone(), torch.ones(2, 30, dtype=torch.bool)
    valid[1, :8], keys[1, :8] = False, torch.nan
    padded = make_layer_view(
        layer=0,
        keys=keys,
        positions=view.positions.masked_fill(~valid, -1),
        valid=valid,
        queries=view.queries,
        query_positions=view.query_positions,
        rotary=rotary,
    )
    alone = make_layer_view(
        layer=0,
        keys=view.keys[1:, 8:],
        positions=view.positions[1:, 8:],
        queries=view.queries[2:],
        query_positions=view.query_positions,
        rotary=rotary,
    )
    scores = policy.score(padded)
    torch.testing.assert_close(scores[0], whole[0])
    assert scores[1, :8].isneginf().all()
    torch.testing.assert_close(scores[1, 8:], policy.score(alone)[0])


def test_equal_keys_score_equally():
    rotary = make_rotary(DIM // 2, True)
    view, _, _ = make_view(rotary)
    view.keys[:] = 0
    policy = parse_policy({"name": "triattention", "window": WINDOW, "recent": 0})
    assert policy.score(view).eq(0).all()


def test_tiles_do_not_change_the_scores(monkeypatch):
    view, _, _ = make_view(make_rotary(DIM // 2, False))
    policy = parse_policy({"name": "triattention", "window": WINDOW})
    whole = policy.score(view)
    monkeypatch.setattr("vllm_kvplugins.scoring.attention_votes._MAX_TILE", 7 * 2 * DIM)
    torch.testing.assert_close(policy.score(view), whole)
