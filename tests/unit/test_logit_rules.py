"""Scores with capped logits and learned sinks, against a softmax written out."""

from __future__ import annotations

import pytest
import torch
from views import make_layer_view

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.scoring.attention_votes import (
    attention_mass,
    attention_peak,
    window_votes,
)
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

HEADS, GROUP, WINDOW, SLOTS, DIM = 2, 3, 5, 40, 16
SCALE = 0.3
Q_HEADS = HEADS * GROUP


def rules_of(kind: str) -> LogitRules:
    generator = torch.Generator().manual_seed(3)
    sinks = torch.randn(Q_HEADS, generator=generator) * 4 + 8
    return {
        "plain": PLAIN,
        "sinks": LogitRules(sinks=sinks),
        "softcap": LogitRules(softcap=1.5),
        "both": LogitRules(sinks, 1.5),
    }[kind]


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(Q_HEADS, WINDOW, DIM, generator=generator)
    keys = torch.randn(HEADS, SLOTS, DIM, generator=generator)
    return queries * 2, keys * 2


def expected_weights(rules: LogitRules) -> torch.Tensor:
    """[q heads, window, slots], in float64, with the sink as one more column."""
    queries, keys = (tensor.double() for tensor in data())
    logits = queries @ keys.repeat_interleave(GROUP, 0).mT * SCALE
    if rules.softcap:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    place = torch.arange(SLOTS)
    later = place > torch.arange(SLOTS - WINDOW, SLOTS)[:, None]
    logits = logits.masked_fill(later, -torch.inf)
    if rules.sinks is not None:
        column = rules.sinks.double()[:, None, None].expand(-1, WINDOW, 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap", "both"])
def test_votes_are_the_attention_of_the_layer(kind):
    rules = rules_of(kind)
    weights = expected_weights(rules)
    queries, keys = data()
    votes = window_votes(queries, keys, SCALE, None, rules)
    mean = weights.mean(1)[:, : SLOTS - WINDOW].unflatten(0, (HEADS, GROUP))
    torch.testing.assert_close(votes.double(), mean, rtol=1e-4, atol=1e-6)
    at = torch.arange(SLOTS - WINDOW, SLOTS), torch.arange(SLOTS).expand(HEADS, -1)
    mass = attention_mass(queries, keys, SCALE, *at, rules)
    summed = weights.sum(1).unflatten(0, (HEADS, GROUP)).mean(1)
    torch.testing.assert_close(mass.double(), summed, rtol=1e-4, atol=1e-6)
    peak = attention_peak(queries, keys, SCALE, *at, rules)
    largest = weights.unflatten(0, (HEADS, GROUP)).flatten(1, 2).amax(1)
    torch.testing.assert_close(peak.double(), largest, rtol=1e-4, atol=1e-6)


def test_sinks_take_mass_and_can_change_the_order_of_slots():
    """Query heads vote with what their sinks leave them."""
    queries, keys = data()
    plain = window_votes(queries, keys, SCALE).mean(1)
    with_sinks = window_votes(queries, keys, SCALE, None, rules_of("sinks")).mean(1)
    assert (with_sinks <= plain).all()
    assert with_sinks.sum() < 0.9 * plain.sum()
    assert (plain.argsort() != with_sinks.argsort()).any()


@pytest.mark.parametrize("name", ["snapkv", "tova", "chunkkv", "pyramidkv"])
@pytest.mark.parametrize("kind", ["sinks", "softcap"])
def test_policies_score_with_the_rules_of_the_view(name, kind):
    policy = parse_policy({"name": name, "budget": 100})
    window = policy.queries_needed
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(HEADS, 200, DIM, generator=generator) * 2
    queries = torch.randn(Q_HEADS, window, DIM, generator=generator) * 2
    scores = [
        policy.score(
            make_layer_view(
                layer=0,
                keys=keys,
                positions=torch.arange(200).expand(HEADS, -1),
                queries=queries,
                query_positions=torch.arange(200 - window, 200),
                scale=SCALE,
                budget_tokens=100,
                rules=rules,
            )
        )
        for rules in (PLAIN, rules_of(kind))
    ]
    finite = scores[0].isfinite()
    assert not torch.allclose(scores[0][finite], scores[1][finite])


def test_logits_of_many_heads_are_changed_in_place():
    rules = rules_of("both")
    logits = torch.randn(HEADS, GROUP, WINDOW, SLOTS)
    assert rules.softmax(rules.cap(logits)) is logits
    assert (logits.sum(-1) < 1).all()
