"""Probes: their tokens, attention over any slots, and the policies' scores from it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine import probing
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import Probe, ProbeOccasion

SEED = 23
HEADS, GROUP, DIM = 2, 3, 16


def encode(text: str) -> list[int]:
    return [1000 + len(word) for word in text.split()]


def occasion(tokens: int, room: int) -> ProbeOccasion:
    return ProbeOccasion(range(tokens), 0, tokens, room, encode)


def probe_view(cached: int, own: int, evicted: bool) -> LayerView:
    """A probe of ``own`` tokens after ``cached`` ones; ``evicted``:

    some slots are empty.
    """
    rng = torch.Generator().manual_seed(SEED)
    keys = torch.randn(HEADS, cached + own, DIM, generator=rng)
    values = torch.randn(HEADS, cached + own, DIM, generator=rng)
    order = torch.stack([torch.randperm(cached, generator=rng) for _ in range(HEADS)])
    new = torch.arange(cached, cached + own).expand(HEADS, -1)
    positions = torch.cat([order, new], 1)
    if evicted:
        positions[0, 5:9] = -1
        keys[0, 5:9] = values[0, 5:9] = torch.nan
    return LayerView(
        layer=0,
        keys=keys,
        positions=positions,
        valid=positions >= 0 if evicted else None,
        queries=torch.randn(HEADS * GROUP, own, DIM, generator=rng),
        query_positions=torch.arange(cached, cached + own),
        scale=DIM**-0.5,
        rotary=None,
        observed=None,
        budget_tokens=0,
        load_values=lambda: values,
        probe=Probe([0] * own, range(cached)),
    )


def weights_of(view: LayerView, queried: torch.Tensor) -> torch.Tensor:
    """[heads, group, queries, slots], a softmax over the selected slots."""
    queries = view.queries.view(HEADS, GROUP, -1, DIM)
    keys = view.keys.nan_to_num()
    logits = torch.einsum("hgqd,hkd->hgqk", queries, keys) * view.scale
    visible = queried[:, None] & (
        view.positions[:, None] <= view.query_positions[:, None]
    )
    return logits.masked_fill(~visible[:, None], -torch.inf).softmax(-1)


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("chunk", [1 << 26, 400])
def test_dense_attention(evicted, chunk, monkeypatch):
    print("seed", SEED)
    monkeypatch.setattr(probing, "_MAX_MASK", chunk)
    view = probe_view(40, 7, evicted)
    weights = weights_of(view, view.positions >= 0)
    expected = torch.einsum("hgqk,hkd->hgqd", weights, view.values.nan_to_num())
    torch.testing.assert_close(
        probing.dense_attention(view), expected.flatten(0, 1), atol=1e-5, rtol=1e-5
    )


def test_kvzip_repeats_the_whole_prompt_once():
    policy = parse_policy({"name": "kvzip", "chunk": 100})
    probes = policy.probing.probes(occasion(250, 4000))
    assert [p.about for p in probes] == [
        range(100),
        range(100, 200),
        range(200, 250),
    ]
    for probe in probes:
        repeated = list(probe.about)
        assert list(probe.token_ids)[-len(repeated) :] == repeated
    announced = list(probes[1].token_ids)[-108:-100]
    assert announced == list(range(92, 100)), "the part is announced by what precedes"
    room = policy.probing.room(encode)
    assert (
        max(len(p.token_ids) for p in policy.probing.probes(occasion(990, room)))
        <= room
    )


@pytest.mark.parametrize("evicted", [False, True])
def test_kvzip_scores_by_the_most_attention(evicted):
    policy = parse_policy({"name": "kvzip", "sinks": 2, "recent": 3, "budget": 9})
    view = probe_view(40, 7, evicted)
    expected = torch.zeros(HEADS, 40)
    observed = None
    for about in (range(25), range(25, 40)):
        probe = Probe([0] * 7, about)
        queried = (view.positions >= about.start) & (view.positions < about.stop)
        queried |= (view.positions >= 40) | (
            (view.positions >= 0) & (view.positions < 2)
        )
        peak = weights_of(view, queried).amax((1, 2))
        for head in range(HEADS):
            for slot, position in enumerate(view.positions[head].tolist()):
                if 0 <= position < 40:
                    best = max(float(expected[head, position]), float(peak[head, slot]))
                    expected[head, position] = best
        observed = policy.probing.observe(
            dataclasses.replace(view, probe=probe, observed=observed)
        )
    torch.testing.assert_close(observed, expected, atol=1e-6, rtol=1e-5)

    positions = torch.arange(40).expand(HEADS, -1)
    scores = policy.score(
        dataclasses.replace(view, positions=positions, observed=observed, valid=None)
    )
    assert torch.isinf(scores).sum() == HEADS * (2 + 3)
    torch.testing.assert_close(scores[:, 2:37], expected[:, 2:37], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aggregate", ["max", "avg"])
def test_infinipot_scores_by_the_instructions_attention(aggregate):
    policy = parse_policy({"name": "infinipot", "aggregate": aggregate})
    (probe,) = policy.probing.probes(occasion(40, 4000))
    assert list(probe.token_ids) == encode(policy.instruction)
    view = probe_view(40, 7, evicted=False)
    weights = weights_of(view, view.positions >= 0)
    paid = weights.amax((1, 2)) if aggregate == "max" else weights.sum(2).mean(1)
    expected = torch.zeros(HEADS, 40).scatter(1, view.positions[:, :40], paid[:, :40])
    torch.testing.assert_close(
        policy.probing.observe(view), expected, atol=1e-6, rtol=1e-5
    )


def test_kvzip_refuses_to_fold():
    with pytest.raises(KVPolicyError, match="remove decode_budget"):
        parse_policy({"name": "kvzip", "decode_budget": 256})
