"""The benchmark of SeKV's routing: its attention, and what it calls coverage."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import span_routing

from vllm_kvplugins.spans.segmentation import Segments

SEED = 20261126
TOKENS, SPAN, HEADS, DIM = 40, 8, 2, 16


def layer_of(keys: torch.Tensor) -> tuple[span_routing.Layer, Segments]:
    """Tokens 4 to 35 in four spans; the others are resident."""
    random = torch.Generator().manual_seed(SEED)
    prompt = span_routing.Prompt(
        keys=[keys], values=[torch.randn(HEADS, TOKENS, DIM, generator=random)]
    )
    positions = torch.arange(4, 36)
    resident = torch.ones(TOKENS, dtype=torch.bool)
    resident[positions] = False
    span = torch.arange(4).repeat_interleave(SPAN)
    sizes, even = torch.full((4,), SPAN), torch.full((32,), 1 / SPAN)
    segments = Segments(resident, positions, span, sizes, even, torch.empty(0))
    return span_routing.Layer.of(prompt, 0, segments), segments


def exact_output(layer: span_routing.Layer, queries: torch.Tensor) -> torch.Tensor:
    return (queries @ layer.keys.mT).softmax(-1) @ layer.values


def test_zoomed_spans_are_exact_and_means_are_where_keys_agree():
    random = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    keys = torch.randn(HEADS, TOKENS, DIM, generator=random)
    queries = torch.randn(HEADS, 3, DIM, generator=random)
    keys[:, 4:12] = keys[:, 4:5]  # one span whose keys agree
    layer, segments = layer_of(keys)
    everything = torch.ones(HEADS, 4, dtype=torch.bool)
    without_first = everything.clone()
    without_first[:, 0] = False
    for zoomed in (everything, without_first):
        for second_order in (False, True):
            output = span_routing.mixed_output(
                layer, segments, queries, TOKENS - 1, zoomed, second_order
            )
            torch.testing.assert_close(output, exact_output(layer, queries))
    by_order = [
        span_routing.mixed_output(
            layer, segments, queries, TOKENS - 1, ~everything, order
        )
        for order in (False, True)
    ]
    assert (by_order[0] - by_order[1]).abs().max() > 1e-3


def test_the_mass_of_a_span_is_that_of_its_tokens():
    _, segments = layer_of(torch.zeros(HEADS, TOKENS, DIM))
    weights = torch.arange(HEADS * TOKENS, dtype=torch.float32).view(HEADS, TOKENS)
    mass = span_routing.span_mass(weights, segments)
    assert mass[1].tolist() == [
        float(weights[1, s : s + 8].sum()) for s in (4, 12, 20, 28)
    ]


def test_coverage_is_a_share_and_the_exact_order_finds_most():
    random = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    tokens = 464
    prompt = span_routing.Prompt(
        queries=[3 * torch.randn(4, tokens, DIM, generator=random)],
        keys=[torch.randn(HEADS, tokens, DIM, generator=random)],
        values=[torch.randn(HEADS, tokens, DIM, generator=random)],
        scales=[DIM**-0.5],
    )
    surprisal = torch.rand(tokens, generator=random)
    rows = list(span_routing.measure(0.4, prompt, surprisal, 4))
    assert len(rows) == HEADS * 4
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    assert 0 < mean["coverage, first"] < mean["coverage, exact"] < 1
    assert 0 < mean["coverage, second"] < 1
    assert mean["rounded"] > 0.9
    assert 0 < mean["output error, first"] < 2
