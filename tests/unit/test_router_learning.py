"""Training of routers: examples and gradients, against SeKV's equations."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from routers import Shape, random_example, random_router, write_random_router

from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.ops.svd import truncated_svd
from vllm_kvplugins.policies.sekv import MEAN_KEY, SeKV
from vllm_kvplugins.routers.files import read_router
from vllm_kvplugins.routers.router import spectra
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.training import examples, loop, losses, report, thresholds
from vllm_kvplugins.training.settings import TrainSettings
from vllm_kvplugins.training.student import Memory, mixed_attention, straight_through

SEED = 20261123
SHAPE = Shape()
MODEL = ModelFingerprint(
    architecture=None,
    num_layers=SHAPE.layers,
    num_heads=SHAPE.heads,
    num_kv_heads=SHAPE.kv_heads,
    head_dim=SHAPE.head_dim,
    hidden_size=None,
    vocab_size=None,
    rope=None,
)


@pytest.fixture
def random():
    print("seed", SEED)
    return torch.Generator().manual_seed(SEED)


# -- what is learned from ------------------------------------------------------------


def test_examples_hold_what_full_attention_looked_at(random):
    reading, example = random_example(SHAPE, random)
    segments, prefix = example.segments, 300
    scores = reading.queries.double() @ reading.keys.double().repeat_interleave(
        SHAPE.group, 1
    ).transpose(-1, -2)
    scores *= reading.scale
    later = torch.arange(340) > prefix + torch.arange(40)[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    spans = segments.positions.split(segments.sizes.tolist())
    mass = torch.stack([weights[..., span].sum(-1) for span in spans], -1)
    far = mass.sum(-1).mean((0, 1))
    mined = far.topk(12).indices.sort().values
    assert torch.allclose(example.mass.double(), mass[:, :, mined], atol=1e-5)
    assert example.queries.equal(reading.queries[:, :, mined])
    worth = segments.weights.double().split(segments.sizes.tolist())
    for which, rows in enumerate((reading.keys, reading.values)):
        expected = torch.stack(
            [
                (rows[:, :, s].double() * w[:, None]).sum(2)
                for s, w in zip(spans, worth, strict=True)
            ],
            2,
        )
        assert torch.allclose(example.means[which].double(), expected, atol=1e-5)
    passage = example.passage
    runs = [float(far[i : i + 6].mean()) for i in range(35)]
    first = prefix + runs.index(max(runs))
    assert passage.first_position == first
    assert passage.tokens.equal(reading.tokens[first : first + 6])
    outside = segments.resident.nonzero().squeeze(1)
    assert passage.keys[:, :, outside].equal(reading.keys[:, :, outside])
    off = (passage.keys - reading.keys[:, :, :first])[:, :, segments.positions]
    kept = example.spectrum[0].square().sum()
    whole = reading.keys[:, :, segments.positions].square().sum()
    assert 0.01 < float(off.square().sum() / whole) < 0.5
    assert float(off.square().sum()) == pytest.approx(float(whole - kept), rel=1e-3)


def test_targets_are_the_smallest_sets_that_cover(random):
    mass = torch.rand(40, 6, generator=random) ** 3
    actual = examples.covering(mass, 0.9)
    for row, chosen in zip(mass.double(), actual, strict=True):
        fewest = min(
            len(pick)
            for count in range(7)
            for pick in itertools.combinations(range(6), count)
            if float(row[list(pick)].sum()) >= 0.9 * float(row.sum()) - 1e-7
        )
        assert int(chosen.sum()) == fewest
        assert float(row[chosen].sum()) >= 0.9 * float(row.sum()) - 1e-6


def test_ties_go_to_the_first_and_nothing_is_wanted_of_nothing():
    even = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 0.0, 0.0]])
    actual = examples.covering(even, 0.5).tolist()
    assert actual == [[True, True, False, False], [False] * 4]


# -- the student ---------------------------------------------------------------------


def memory_of(random) -> tuple[Memory, torch.Tensor, torch.Tensor, torch.Tensor]:
    _, example = random_example(SHAPE, random)
    dim = SHAPE.head_dim
    query = torch.randn(SHAPE.heads, 6, dim, generator=random)
    key = torch.randn(SHAPE.kv_heads, 6, dim, generator=random)
    value = torch.randn(SHAPE.kv_heads, 6, dim, generator=random)
    return Memory.of(example, 1), query, key, value


@pytest.mark.parametrize("kind", ["none", "all", "some"])
def test_attention_at_two_resolutions_is_one_softmax(random, kind):
    memory, query, key, value = memory_of(random)
    spans = len(memory.log_sizes)
    zoom = torch.rand(SHAPE.heads, 6, spans, generator=random) < 0.5
    zoom = {"none": zoom & False, "all": zoom | True, "some": zoom}[kind]
    result = mixed_attention(query, key, value, memory, zoom.float(), 0.3)
    for head, ask in itertools.product(range(SHAPE.heads), range(6)):
        kv = head // SHAPE.group
        visible = memory.span < 0
        visible |= zoom[head, ask][memory.span.clamp(min=0)]
        whole = ~zoom[head, ask]
        keys = [
            memory.keys[kv, visible],
            key[kv, : ask + 1],
            memory.mean_keys[kv, whole],
        ]
        rows = [
            memory.values[kv, visible],
            value[kv, : ask + 1],
            memory.mean_values[kv, whole],
        ]
        scores = torch.cat(keys).double() @ query[head, ask].double() * 0.3
        scores[len(scores) - int(whole.sum()) :] += memory.log_sizes[whole]
        expected = scores.softmax(0) @ torch.cat(rows).double()
        assert torch.allclose(result[head, ask].double(), expected, atol=1e-5)


def test_gradients_say_what_the_other_choice_changes(random):
    memory, query, key, value = memory_of(random)
    shape = (SHAPE.heads, 6, len(memory.log_sizes))
    zoom = torch.rand(shape, generator=random).double().requires_grad_()

    def attend(zoom: torch.Tensor) -> torch.Tensor:
        return mixed_attention(query, key, value, memory, zoom.float(), 0.3).sum()

    attend(zoom).backward()
    assert zoom.grad is not None
    at = (3, 2, 1)
    step = torch.zeros_like(zoom)
    step[at] = 1e-2
    with torch.no_grad():
        slope = (attend(zoom + step) - attend(zoom - step)) / 2e-2
    assert float(zoom.grad[at]) == pytest.approx(float(slope), rel=2e-2, abs=1e-3)


def test_lost_energy_is_what_a_gated_reconstruction_lacks(random):
    rows = torch.randn(1, 12, 6, generator=random)
    factors = truncated_svd(rows, torch.tensor([0]), torch.tensor([12]), 6)
    gates = torch.rand(1, 6, generator=random)
    left, right = factors.left(0), factors.right(0)
    again = (left * factors.singular_values(0) * gates) @ right.T
    expected = (rows[0] - again).square().sum() / rows.square().sum()
    actual = losses.lost_energy(gates, spectra(factors, 6))
    assert float(actual) == pytest.approx(float(expected), rel=1e-4)


def test_the_report_counts_decisions(random):
    _, example = random_example(SHAPE, random)
    chosen = torch.rand(example.targets.shape, generator=random) < 0.3
    counts = report.summed([report.Counts.of(chosen, example.targets)] * 2)
    right = float((chosen & example.targets).sum())
    wrong = float((chosen ^ example.targets).sum())
    assert counts.f1 == pytest.approx(2 * right / (2 * right + wrong))
    mass = report.teacher_ranking(example)
    best = report.covered_in_room(mass, example)
    worst = report.covered_in_room(-mass, example)
    assert worst < 0.25 < best < 1
    assert report.f1_in_room(report.teacher_ranking, [example]) == 1
    assert report.f1_in_room(lambda e: -report.teacher_ranking(e), [example]) < 0.3


def test_the_report_ranks_as_the_policy_does(random, tmp_path):
    """Both ways of routing, for each of the mined queries."""
    _, example = random_example(SHAPE, random)
    path = tmp_path / "router.safetensors"
    high = 4 + 2 * torch.randn(SHAPE.layers, SHAPE.heads, generator=random)
    write_random_router(path, MODEL, random, threshold=high)
    ranks = {
        MEAN_KEY: report.mean_key_ranking(example),
        str(path): report.router_ranking(read_router(path)[0], example),
    }
    for router, ranking in ranks.items():
        policy = SeKV(router=router)
        for layer in range(SHAPE.layers):
            keys = example.means[0, layer]
            summary = policy.summarize(layer, keys)
            sizes = example.segments.sizes
            spans = CoarseSpans(keys, example.log_sizes, sizes, summary)
            for ask in range(example.queries.shape[2]):
                queries = example.queries[layer, :, ask]
                queries = queries.unflatten(0, (SHAPE.kv_heads, -1))
                gates = policy.gates(layer, queries, spans, example.scale)
                actual = ranking[layer, :, ask]
                assert gates.isinf().equal(actual.isinf())
                assert torch.allclose(gates, actual, atol=1e-5)


def test_decisions_are_hard_and_gradients_go_through():
    logits = torch.tensor([-2.0, 0.3, 0.5], requires_grad=True)
    threshold = torch.tensor(0.4, requires_grad=True)
    result = straight_through(logits, threshold)
    assert result.tolist() == pytest.approx([0.0, 0.0, 1.0])
    result.sum().backward()
    assert logits.grad is not None
    assert threshold.grad is not None
    slope = torch.sigmoid(logits) * (1 - torch.sigmoid(logits))
    assert torch.allclose(logits.grad, slope.detach())
    assert float(threshold.grad) == pytest.approx(-3 * 0.2403, abs=1e-3)


# -- what is learned, and looked up ---------------------------------------------------


def test_the_ranking_term_is_a_distance_between_shares(random):
    mass = torch.rand(2, 3, 4, 5, generator=random) ** 4
    mass[0, 0, 0] = 0.0  # a query without spans does not count
    logits = 2 * torch.randn(2, 3, 4, 5, generator=random)
    expected = total = 0.0
    for mass_row, logit_row in zip(mass.view(-1, 5), logits.view(-1, 5), strict=True):
        weight = float(mass_row.sum())
        if weight:
            share = mass_row.double() / weight
            expected += weight * float(
                (share * (share.log() - logit_row.double().log_softmax(0))).sum()
            )
        total += weight
    actual = float(losses.ranking_loss(logits, mass))
    assert actual == pytest.approx(expected / total, rel=1e-4)
    # nothing is lost where shares agree, whatever the level of a query's logits
    level = torch.randn(2, 3, 4, 1, generator=random)
    exact = (mass + 1e-9).log() + level
    assert float(losses.ranking_loss(exact, mass)) == pytest.approx(0, abs=1e-5)


def test_a_threshold_is_the_best_there_is(random):
    _, example = random_example(SHAPE, random)
    gates = torch.randn(example.targets.shape, generator=random) + example.targets
    actual = thresholds.best_thresholds(lambda _: gates, [example, example])
    for layer, head in itertools.product(range(SHAPE.layers), range(SHAPE.heads)):
        values = gates[layer, head].flatten()
        expected = example.targets[layer, head].flatten()

        def f1(threshold, values=values, expected=expected):
            above = values > threshold
            return 2 * int((above & expected).sum()) / int(above.sum() + expected.sum())

        candidates = [float(value) for value in values]
        best = max(map(f1, [*candidates, min(candidates) - 1]))
        assert f1(float(actual[layer, head])) == pytest.approx(best)
        assert actual[layer, head] not in values


def test_where_all_spans_are_wanted_the_threshold_is_below_all(random):
    _, example = random_example(SHAPE, random)
    example = replace(example, targets=torch.ones_like(example.targets))
    gates = torch.randn(example.targets.shape, generator=random)
    actual = thresholds.best_thresholds(lambda _: gates, [example])
    assert (gates > actual[..., None, None]).all()


def test_calibrated_thresholds_decide_better_than_any_one(random):
    _, example = random_example(SHAPE, random)
    router = random_router(SHAPE, random)
    logits = thresholds.router_logits(router, example)
    tuned = thresholds.calibrated(router, [example])
    assert tuned.projection is router.projection

    def f1(threshold):
        above = logits > threshold[..., None, None]
        counts = report.Counts.of(above, example.targets)
        return 2 * counts.right / (counts.zoomed + counts.targets).clamp(min=1)

    for level in logits.flatten()[::997]:
        flat = torch.full_like(router.threshold, float(level))
        assert (f1(tuned.threshold) >= f1(flat) - 1e-6).all()


def test_training_starts_from_the_coordinates_that_tell_spans_apart(random):
    _, example = random_example(SHAPE, random)
    means = example.means.clone()
    means[0, :, :, :, [1, 3, 4, 6]] = 2.0  # the same for all spans
    example = replace(example, means=means)
    settings = TrainSettings(routing_dim=4, max_rank=SHAPE.max_rank)
    router = loop.starting_router([example], settings)
    for weight in router.projection.flatten(0, 1):
        assert (weight != 0).sum(-1).eq(1).all()
        assert weight.abs().sum(0).nonzero().squeeze(1).tolist() == [0, 2, 5, 7]
    # logits differ about as much as attention scores of means
    logits = thresholds.router_logits(router, example) - example.log_sizes
    keys = means[0].repeat_interleave(SHAPE.group, 1)
    scores = example.queries.float() @ keys.mT * example.scale
    ratio = logits.std(-1).mean() / scores.std(-1).mean()
    assert 0.7 < ratio < 1.4
