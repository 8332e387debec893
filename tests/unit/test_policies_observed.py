"""Policies that observe every step, against a dense oracle."""

from __future__ import annotations

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.base import LayerView

SEED = 11


def view_of(keys, queries, first_query, observed, order=None, budget=0):
    positions = torch.arange(keys.shape[1]).expand(keys.shape[0], -1)
    if order is not None:
        keys, positions = keys[:, order], positions[:, order]
    return LayerView(
        layer=0,
        keys=keys,
        positions=positions,
        valid=None,
        queries=queries,
        query_positions=torch.arange(first_query, first_query + queries.shape[1]),
        scale=keys.shape[-1] ** -0.5,
        observed=observed,
        budget_tokens=budget,
        load_values=lambda: keys,
    )


@pytest.mark.parametrize("group", [1, 3])
def test_h2o_accumulates_the_whole_causal_attention(group):
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    heads, tokens, dim = 2, 90, 16
    keys = torch.randn(heads, tokens, dim, generator=generator)
    queries = torch.randn(heads * group, tokens, dim, generator=generator)
    policy = parse_policy({"name": "h2o", "budget": 32})

    logits = queries.view(heads, group, tokens, dim) @ keys.transpose(1, 2)[:, None]
    causal = torch.ones(tokens, tokens).triu(1).bool()
    weights = (logits * dim**-0.5).masked_fill(causal, -torch.inf).softmax(-1)
    expected = weights.sum(2).mean(1)

    observed = None
    shuffled = torch.randperm(tokens, generator=generator)
    for first, stop in [(0, 40), (40, 77), (77, 90)]:
        order = shuffled[shuffled < stop]  # slots in no order
        view = view_of(keys, queries[:, first:stop], first, observed, order)
        observed = policy.observe(view)
    torch.testing.assert_close(observed[:, :tokens], expected, atol=1e-5, rtol=1e-5)

    view = view_of(keys, queries[:, :0], tokens, observed, budget=32)
    scores = policy.score(view)
    assert torch.isinf(scores[:, -16:]).all(), "half of the budget is recent"
    torch.testing.assert_close(scores[:, :-16], expected[:, :-16], atol=1e-5, rtol=1e-5)
