"""Probes: their tokens, attention over any slots, and the policies' scores from it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine import probe_attention
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.probe_attention import LocalLayer, Reach
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.capabilities import Probe, ProbeOccasion
from vllm_kvplugins.scoring.logits import LogitRules

SEED = 23
HEADS, GROUP, DIM = 2, 3, 16


def encode(text: str) -> list[int]:
    """The length of each word; 1000 for a text without words."""
    return [1000 + len(word) for word in text.split()] or [1000]


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
        positions=positions,
        valid=positions >= 0 if evicted else None,
        queries=torch.randn(HEADS * GROUP, own, DIM, generator=rng),
        query_positions=torch.arange(cached, cached + own),
        scale=DIM**-0.5,
        rotary=None,
        observed=None,
        budget_tokens=0,
        load_keys=lambda: keys,
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
    monkeypatch.setattr(probe_attention, "_MAX_MASK", {"cpu": chunk})
    view = probe_view(40, 37, evicted)
    weights = weights_of(view, view.positions >= 0)
    expected = torch.einsum("hgqk,hkd->hgqd", weights, view.values.nan_to_num())
    result = probe_attention.dense_attention(view)
    torch.testing.assert_close(result, expected.flatten(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_dense_attention_applies_what_the_layer_does_to_logits(softcap, with_sinks):
    print("seed", SEED)
    rng = torch.Generator().manual_seed(SEED)
    sinks = torch.randn(HEADS * GROUP, generator=rng) if with_sinks else None
    rules = LogitRules(sinks, softcap)
    view = dataclasses.replace(probe_view(40, 7, True), rules=rules)
    queries = view.queries.view(HEADS, GROUP, -1, DIM)
    logits = torch.einsum("hgqd,hkd->hgqk", queries, view.keys.nan_to_num())
    logits = logits * view.scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    visible = (view.positions >= 0)[:, None] & (
        view.positions[:, None] <= view.query_positions[:, None]
    )
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        extra = sinks.view(HEADS, GROUP, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, extra], -1)
    weights = logits.softmax(-1)[..., : view.keys.shape[1]]
    expected = torch.einsum("hgqk,hkd->hgqd", weights, view.values.nan_to_num())
    torch.testing.assert_close(
        probe_attention.dense_attention(view),
        expected.flatten(0, 1),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("reach", [Reach(window=20), Reach(chunk=24)])
@pytest.mark.parametrize("tokens", [9, 48, 71])
def test_a_probe_attends_to_the_window_of_a_local_layer(reach, tokens):
    """Freed blocks before the window hold NaN of other requests."""
    print("seed", SEED)
    size, own = 8, 30
    rng = torch.Generator().manual_seed(SEED)
    layout = PageLayout.interleaved(size, DIM)
    blocks = torch.randperm(12, generator=rng)[:9]
    pages = torch.full((12 * HEADS, 2 * size * DIM), torch.nan)
    heap = Heap(pages, layout, 1, 12, HEADS)
    keys, values = torch.randn(2, HEADS, tokens + own, DIM, generator=rng)
    # the first token of the probe has position `tokens`
    first = reach.first(tokens) // size * size
    for token in range(first, tokens):
        for head in range(HEADS):
            page = pages[int(blocks[token // size]) * HEADS + head].view(size, 2, DIM)
            page[token % size, 0] = keys[head, token]
            page[token % size, 1] = values[head, token]
    queries = torch.randn(HEADS * GROUP, own, DIM, generator=rng)
    layer = LocalLayer(heap, lambda first_query: blocks, reach, DIM**-0.5)
    result = layer.attend(0, tokens, queries, keys[:, tokens:], values[:, tokens:])

    place = torch.arange(tokens + own)
    at = place[tokens:, None]
    if reach.window:
        visible = (place <= at) & (place > at - reach.window)
    else:
        visible = (place <= at) & (place // reach.chunk == at // reach.chunk)
    grouped = queries.view(HEADS, GROUP, own, DIM)
    logits = torch.einsum("hgqd,hkd->hgqk", grouped, keys) * DIM**-0.5
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = torch.einsum("hgqk,hkd->hgqd", weights, values).flatten(0, 1)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


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
        assert probe.token_ids[-len(repeated) - 1] == 1000, "a newline stands before it"
    announced = list(probes[1].token_ids)[-109:-101]
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


def test_kvzip_gives_a_head_without_attention_a_fifth_of_the_average():
    allocator = parse_policy({"name": "kvzip"}).allocator
    scores = torch.stack([torch.arange(128.0) + 1, torch.zeros(128)])[None]
    scores[..., :4] = torch.inf
    pages = allocator.allocate(scores, 10, 4, torch.full((1, 2), 32))
    assert pages.tolist() == [[17, 3]], "of 10 pages 2, and the first tokens"


def test_kvzip_refuses_to_fold():
    with pytest.raises(KVPolicyError, match="remove decode_budget"):
        parse_policy({"name": "kvzip", "decode_budget": 256})


@pytest.mark.parametrize(("size", "codes"), [(64, ()), (128, ("KVP040",))])
def test_windowed_layers_with_other_heads_are_refused_at_start_up(size, codes):
    flat = pytest.importorskip("vllm_kvplugins.vllm_adapter.attention.flat")
    others = {"window": SimpleNamespace(head_size=size)}
    builder = SimpleNamespace(
        runtime=SimpleNamespace(policy=parse_policy({"name": "kvzip"})),
        layers=[SimpleNamespace(head_size=64)],
        _local_attention_layers=lambda: others,
    )
    problems = flat.PolicyBuilder._local_problems(builder)
    assert codes_in("\n".join(problems)) == codes
