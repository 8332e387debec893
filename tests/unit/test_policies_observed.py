"""Policies that observe every step, against a dense oracle."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.scoring.rotary import Rotary

SEED = 11


def view_of(
    keys,
    queries,
    first_query,
    observed,
    order=None,
    budget=0,
    rotary=None,
    values=None,
    scale=None,
):
    positions = torch.arange(keys.shape[1]).expand(keys.shape[0], -1)
    if order is not None:
        keys, positions = keys[:, order], positions[:, order]
    return LayerView(
        layer=0,
        positions=positions,
        valid=None,
        queries=queries,
        query_positions=torch.arange(first_query, first_query + queries.shape[1]),
        scale=keys.shape[-1] ** -0.5 if scale is None else scale,
        rotary=rotary,
        observed=observed,
        budget_tokens=budget,
        load_keys=lambda: keys,
        load_values=lambda: keys if values is None else values,
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
        order = shuffled[shuffled < stop]  # slots in random order
        view = view_of(keys, queries[:, first:stop], first, observed, order)
        observed = policy.observation.observe(view)
    torch.testing.assert_close(observed[:, :tokens], expected, atol=1e-5, rtol=1e-5)

    view = view_of(keys, queries[:, :0], tokens, observed, budget=32)
    scores = policy.score(view)
    assert torch.isinf(scores[:, -16:]).all(), "half of the budget is recent"
    torch.testing.assert_close(scores[:, :-16], expected[:, :-16], atol=1e-5, rtol=1e-5)


def rotary_table(
    dim: int, positions: int, is_neox: bool, factor: float = 1.0
) -> Rotary:
    frequency = 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    angle = torch.arange(positions)[:, None] * frequency
    return Rotary(factor * angle.cos(), factor * angle.sin(), is_neox)


def rotation(rotary: Rotary, position: int, dim: int) -> torch.Tensor:
    """One position's rotation as a matrix, written out pair by pair."""
    matrix = torch.zeros(dim, dim)
    for i in range(dim // 2):
        a, b = (i, i + dim // 2) if rotary.is_neox else (2 * i, 2 * i + 1)
        c, s = rotary.cos[position, i], rotary.sin[position, i]
        matrix[a, a], matrix[a, b], matrix[b, a], matrix[b, b] = c, -s, s, c
    return matrix


@pytest.mark.parametrize("factor", [1.0, 1.25], ids=["plain", "yarn"])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotary_is_undone_and_averaged(is_neox, factor):
    """YaRN multiplies queries and keys by a factor as well."""
    print("seed", SEED)
    dim, heads = 8, 3
    rotary = rotary_table(dim, 60, is_neox, factor)
    before = torch.randn(heads, 5, dim, generator=torch.Generator().manual_seed(SEED))
    positions = torch.tensor([0, 3, 17, 40, 59])
    after = torch.stack(
        [before[:, i] @ rotation(rotary, p, dim).T for i, p in enumerate(positions)], 1
    )
    torch.testing.assert_close(rotary.undo(after, positions), before)
    mean = torch.stack([rotation(rotary, p, dim) for p in range(50, 60)]).mean(0)
    torch.testing.assert_close(rotary.mean_rotation(50, 512, dim), mean)
    partial = rotary.undo(torch.cat([after, after], -1), positions)
    torch.testing.assert_close(partial[..., dim:], after)


@pytest.mark.parametrize(("group", "scale"), [(1, 8**-0.5), (3, 8**-0.5), (3, 0.1)])
def test_expected_attention_against_its_formula(group, scale):
    """exp(s mu k + s^2 k Sigma k / 2), normalized, times the value's norm.

    Some models have a softmax scale s other than 1 / sqrt(head_dim).
    """
    print("seed", SEED)
    generator = torch.Generator().manual_seed(SEED)
    heads, tokens, dim, sinks = 2, 70, 8, 4
    rotary = rotary_table(dim, 700, True)
    raw = torch.randn(heads * group, tokens, dim, generator=generator) + 0.3
    queries = torch.stack(
        [raw[:, p] @ rotation(rotary, p, dim).T for p in range(tokens)], 1
    )
    keys = torch.randn(heads, tokens, dim, generator=generator)
    values = torch.randn(heads, tokens, dim, generator=generator)
    policy = parse_policy({"name": "expected-attention", "future": 100})

    observed = None
    for first, stop in [(0, 3), (3, 30), (30, 70)]:  # a chunk of sinks only as well
        view = view_of(
            keys[:, :stop], queries[:, first:stop], first, observed, rotary=rotary
        )
        observed = policy.observation.observe(view)
    view = view_of(
        keys,
        queries[:, :0],
        tokens,
        observed,
        rotary=rotary,
        values=values,
        scale=scale,
    )
    scores = policy.score(view)

    turn = torch.stack(
        [rotation(rotary, p, dim) for p in range(tokens, tokens + 100)]
    ).mean(0)
    for head in range(heads):
        total = torch.zeros(tokens - sinks)
        for member in range(group):
            sample = raw[head * group + member, sinks:]
            mean = turn @ sample.mean(0)
            spread = turn @ torch.cov(sample.T, correction=0) @ turn.T
            logits = torch.stack(
                [
                    scale * (k @ mean) + scale**2 * (k @ spread @ k) / 2
                    for k in keys[head, sinks:]
                ]
            )
            total += logits.softmax(0) / group
        expected = total * values[head, sinks:].norm(dim=-1)
        torch.testing.assert_close(scores[head, sinks:], expected, atol=1e-5, rtol=1e-4)
    assert torch.isinf(scores[:, :sinks]).all()


def test_expected_attention_lets_go_of_the_largest_tensor_before_it_reads_values():
    heads, group, tokens, dim = 2, 3, 71, 8  # no other tensor has as many elements
    rotary = rotary_table(dim, 700, True)
    keys = torch.randn(heads, tokens, dim)
    queries = torch.randn(heads * group, 30, dim)
    policy = parse_policy({"name": "expected-attention", "future": 100})
    observed = policy.observation.observe(
        view_of(keys, queries, 40, None, rotary=rotary)
    )
    alive = []

    def values() -> torch.Tensor:
        size = heads * group * tokens * dim
        tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
        alive.append(sum(tensor.shape.numel() == size for tensor in tensors))
        return keys

    view = view_of(keys, queries[:, :0], tokens, observed, rotary=rotary)
    policy.score(dataclasses.replace(view, load_values=values))
    assert alive == [0]
