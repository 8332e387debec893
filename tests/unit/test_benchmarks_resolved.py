"""The benchmarks' model attends to spans correctly; the ablations of sekv."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")
import sekv_ablations
from _masked_model import Prompt, attend
from _resolved_model import Resolved, surprisals
from routers import write_random_router

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies import registry
from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.routers.files import read_router
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments

SEED = 20261122
HEADS, GROUP, DIM, TOKENS, SIZE = 2, 2, 16, 300, 4
SCALE = DIM**-0.5
GEOMETRY = Geometry(SIZE, 1, HEADS, 4 * DIM * HEADS)
POLICY = {"name": "sekv", "budget": 120, "least_span": 3, "span_tokens": 10}


def made_up() -> tuple[Prompt, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prompt with its surprisal, and a new token's query, key and value."""
    print("seed", SEED)
    rng = torch.Generator().manual_seed(SEED)
    keys, values = torch.randn(2, HEADS, TOKENS, DIM, generator=rng).bfloat16().float()
    surprisal = torch.rand(TOKENS, generator=rng) ** 4
    query = torch.randn(HEADS * GROUP, DIM, generator=rng) * 2
    new = torch.randn(2, HEADS, 1, DIM, generator=rng)
    return Prompt([query], [keys], [values], [SCALE]), surprisal, query, new


def test_with_room_for_all_spans_all_tokens_are_seen():
    prompt, surprisal, query, (new_key, new_value) = made_up()
    policy = parse_policy(POLICY | {"rank": DIM})
    resolved = Resolved.of(policy, prompt, surprisal, GEOMETRY)
    shape = (1, HEADS, TOKENS)
    expected = attend(
        query[None, :, None],
        prompt.keys[0],
        prompt.values[0],
        new_key[None],
        new_value[None],
        torch.ones(shape, dtype=torch.bool),
        SCALE,
    )[0, :, 0]
    some = resolved.attend(0, query, new_key, new_value, SCALE)
    assert float((some - expected).abs().max()) > 0.05
    resolved.room = TOKENS
    everything = resolved.attend(0, query, new_key, new_value, SCALE)
    # factors are rounded to bfloat16
    torch.testing.assert_close(everything, expected, rtol=0, atol=0.02)


def test_without_a_zoom_a_span_is_its_mean_and_its_size():
    prompt, surprisal, query, (new_key, new_value) = made_up()
    policy = parse_policy(POLICY | {"zoom_share": 0})
    resolved = Resolved.of(policy, prompt, surprisal, GEOMETRY)
    actual = resolved.attend(0, query, new_key, new_value, SCALE).view(
        HEADS, GROUP, DIM
    )
    segments = resolved.segments
    assert segments.num_spans > 5
    parts = list(
        zip(
            segments.positions.split(segments.sizes.tolist()),
            segments.weights.split(segments.sizes.tolist()),
            strict=True,
        )
    )
    for head in range(HEADS):
        keys, values = prompt.keys[0][head], prompt.values[0][head]
        stay = segments.resident
        key_means, value_means = (
            torch.stack([(w[:, None] * rows[at]).sum(0) for at, w in parts])
            for rows in (keys, values)
        )
        keys_seen = torch.cat([keys[stay], key_means, new_key[head]])
        values_seen = torch.cat([values[stay], value_means, new_value[head]])
        bias = [math.log(len(at)) for at, _ in parts]
        extra = torch.tensor([0.0] * int(stay.sum()) + bias + [0.0])
        for number in range(GROUP):
            one_query = query[head * GROUP + number]
            expected = (keys_seen @ one_query * SCALE + extra).softmax(0) @ values_seen
            torch.testing.assert_close(
                actual[head, number], expected, rtol=0, atol=1e-5
            )


def test_prompts_within_the_budget_need_no_spans():
    prompt, surprisal, *_ = made_up()
    policy = parse_policy(POLICY | {"budget": TOKENS})
    assert Resolved.of(policy, prompt, surprisal, GEOMETRY) is None


def test_surprisal_is_of_the_token_that_came():
    logits = torch.tensor([[0.0, math.log(3)], [math.log(7), 0.0], [5.0, 5.0]])
    actual = surprisals(logits, [0, 1, 0])
    assert actual.tolist() == pytest.approx([0, math.log(4 / 3), math.log(8 / 7)])


# -- ablations ---------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ablations(monkeypatch):
    """Registered for one test; other tests run what is available."""
    monkeypatch.setattr(registry, "_POLICIES", registry._POLICIES.copy())
    sekv_ablations.register()


def segments_of(name: str) -> tuple[SeKV, Segments]:
    policy = parse_policy(POLICY | {"name": name})
    assert isinstance(policy, SeKV)
    (compaction,) = policy.plan(Lengths(TOKENS), GEOMETRY).compactions
    stays = len(compaction.retained) * SIZE + TOKENS % SIZE
    actual = policy.segment(made_up()[1], stays, GEOMETRY)
    # without either component, the budget is the same
    assert int(actual.resident.sum()) == stays
    assert int(actual.sizes.sum()) == TOKENS - stays
    sums = torch.zeros(actual.num_spans).index_add_(0, actual.span, actual.weights)
    torch.testing.assert_close(sums, torch.ones(actual.num_spans))
    return policy, actual


def test_fixed_chunks_have_one_length_and_the_same_surprising_tokens():
    _, whole = segments_of("sekv")
    _, chunks = segments_of("sekv-fixed-chunks")
    assert whole.anchors.numel() > 3
    assert chunks.anchors.numel() == 0
    assert int(chunks.sizes.max() - chunks.sizes.min()) <= 1
    assert int(whole.sizes.max() - whole.sizes.min()) > 1
    assert chunks.num_spans == pytest.approx(whole.num_spans, abs=2)
    assert bool(chunks.resident[whole.anchors].all())


def test_without_anchors_the_newest_stay():
    _, whole = segments_of("sekv")
    policy, plain = segments_of("sekv-no-anchors")
    newest = int(plain.resident.sum()) - policy.sinks
    assert bool(plain.resident[-newest:].all())
    assert bool(plain.resident[: policy.sinks].all())
    # a surprising token still starts a span
    starts = plain.positions[plain.sizes.cumsum(0) - plain.sizes].tolist()
    inside = [p for p in whole.anchors.tolist() if p < TOKENS - newest]
    assert len(inside) > 2
    assert set(inside) <= set(starts)
    assert plain.num_spans <= whole.num_spans


def test_plain_means_weigh_alike_what_sekv_weighs_by_surprise():
    _, whole = segments_of("sekv")
    _, plain = segments_of("sekv-plain-means")
    assert torch.equal(plain.span, whole.span)
    assert torch.equal(plain.resident, whole.resident)
    assert plain.weights.tolist() == pytest.approx(
        [1 / int(plain.sizes[s]) for s in plain.span]
    )
    assert not torch.allclose(plain.weights, whole.weights)


def test_one_threshold_is_the_mean_of_all(tmp_path):
    random = torch.Generator().manual_seed(SEED)
    model = ModelFingerprint(
        architecture=None,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        hidden_size=None,
        vocab_size=None,
        rope=None,
    )
    path = tmp_path / "router.safetensors"
    high = torch.tensor([[-1e4, 1e4], [6.0, -2.0]])
    write_random_router(path, model, random, threshold=high)
    settings = POLICY | {"router": str(path)}
    keys = torch.randn(2, 9, 8, generator=random)
    queries = 3 * torch.randn(2, 1, 8, generator=random)
    actual = {}
    for name in ("sekv", "sekv-one-threshold"):
        policy = parse_policy(settings | {"name": name})
        assert isinstance(policy, SeKV)
        sizes = torch.full((9,), 4)
        log_sizes, summary = sizes.float().log(), policy.summarize(0, keys)
        spans = CoarseSpans(keys, log_sizes, sizes, summary)
        actual[name] = policy.gates(0, queries, spans, 1.0)
    everything, nothing = (actual["sekv"] > -math.inf).all(1).tolist()
    assert everything
    assert not nothing
    one = actual["sekv-one-threshold"]
    router = read_router(path)[0]
    summary = router.summarize(keys, 0)
    logits = router.logits(queries, summary, sizes.float().log(), 0)[0, 0]
    assert 0 < int((logits > 1.0).sum()) < 9
    assert one[0].tolist() == actual["sekv"][0].where(logits > 1.0, -math.inf).tolist()
    assert bool((one > -math.inf).any(1).all())
    with pytest.raises(ValueError, match="needs a router"):
        parse_policy(POLICY | {"name": name}).gates(0, queries, spans, 1.0)
