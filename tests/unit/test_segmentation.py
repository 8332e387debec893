"""Spans and anchors: the paper's rule, within exactly the given budget."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.spans.coarse import CoarseSpans, weighted_means
from vllm_kvplugins.spans.segmentation import Segments, cut_evenly, segment

SEED = 20261122


def flat(tokens: int, **peaks: float) -> torch.Tensor:
    """Surprisal 1 everywhere except at some positions, ``p7=5.0``."""
    surprisal = torch.ones(tokens)
    for name, value in peaks.items():
        surprisal[int(name[1:])] = value
    return surprisal


def none_fixed(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, dtype=torch.bool)


def runs(segments: Segments) -> list[list[int]]:
    """Positions of each span."""
    parts = segments.positions.split(segments.sizes.tolist())
    return [part.tolist() for part in parts]


def test_surprising_tokens_cut_spans_and_stay():
    surprisal = flat(20, p6=9.0, p13=8.0)
    result = segment(surprisal, none_fixed(20), 2, 1.0, 3, 9)
    assert result.anchors.tolist() == [6, 13]
    assert result.resident.nonzero().squeeze(1).tolist() == [6, 13]
    assert runs(result) == [[*range(6)], [*range(7, 13)], [*range(14, 20)]]
    assert result.span.tolist() == [0] * 6 + [1] * 6 + [2] * 6


def test_a_limit_is_deviations_above_the_mean_of_all_but_the_first_token():
    surprisal = torch.tensor([900.0, 1, 3, 1, 3, 1, 3, 1, 3.5])
    known = surprisal[1:]
    assert known.mean() + known.std(correction=0) < 3.5
    assert segment(surprisal, none_fixed(9), 5, 1.0, 1, 9).anchors.tolist() == [0, 8]
    assert segment(surprisal, none_fixed(9), 9, 0.0, 1, 9).anchors.tolist() == [
        0,
        2,
        4,
        6,
        8,
    ]


def test_spans_that_are_too_short_stay_whole():
    surprisal = flat(20, p6=9.0, p9=8.0)
    result = segment(surprisal, none_fixed(20), 4, 1.0, 3, 9)
    assert result.anchors.tolist() == [6, 9]
    assert result.resident.nonzero().squeeze(1).tolist() == [6, 7, 8, 9]
    # room for three spans does not fit the second anchor with its short span: the room
    # goes to the most surprising anchor, which cuts nothing
    result = segment(surprisal, none_fixed(20), 3, 1.0, 3, 9)
    assert result.anchors.tolist() == [6]
    assert result.resident.nonzero().squeeze(1).tolist() == [0, 6, 9]
    assert runs(result)[1] == [7, 8, *range(10, 20)]


def test_no_more_spans_than_there_may_be():
    surprisal = flat(40, p10=9.0, p20=8.0, p30=7.0)
    for max_span, anchors in ((4, [10, 20, 30]), (3, [10, 20]), (2, [10]), (1, [])):
        result = segment(surprisal, none_fixed(40), 3, 1.0, 3, max_span)
        assert result.anchors.tolist() == anchors
        assert result.num_spans == max_span
        assert int(result.resident.sum()) == 3


def test_sinks_and_window_stay_and_cut_nothing():
    surprisal = flat(20, p0=50.0, p10=9.0, p19=50.0)
    fixed = none_fixed(20)
    fixed[:2] = fixed[16:] = True
    result = segment(surprisal, fixed, 1, 0.1, 2, 9)
    assert result.anchors.tolist() == [10]
    assert runs(result) == [[*range(2, 10)], [*range(11, 16)]]


def test_weights_are_shares_of_a_spans_surprisal():
    surprisal = torch.tensor([2.0, 6.0, 9.0, 0.0, 0.0])
    result = segment(surprisal, none_fixed(5), 1, 0.5, 1, 9)
    assert runs(result) == [[0, 1], [3, 4]]
    # equation 2; a span without any surprise weighs its tokens equally
    assert result.weights.tolist() == [0.25, 0.75, 0.5, 0.5]


@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_text_without_surprise_is_one_span(tokens):
    result = segment(flat(tokens), none_fixed(tokens), 0, 1.0, 16, 9)
    assert result.anchors.numel() == 0
    assert runs(result) == [[*range(tokens)]]
    everything = segment(flat(tokens), none_fixed(tokens), tokens + 5, 1.0, 16, 9)
    assert everything.num_spans == 0
    assert bool(everything.resident.all())


def test_numbers_that_are_none_are_an_error():
    with pytest.raises(ValueError, match="NaN or infinity"):
        segment(torch.tensor([1.0, math.nan]), none_fixed(2), 1, 1.0, 1, 1)


def fits(
    surprisal: torch.Tensor, fixed: torch.Tensor, anchors: list[int], min_span: int
) -> tuple[int, int]:
    """Positions of anchors and short spans, and the number of spans left."""
    used, spans, length = len(anchors), 0, 0
    for position in range(len(surprisal) + 1):
        wall = position == len(surprisal) or bool(fixed[position])
        if not wall and position not in anchors:
            length += 1
            continue
        used += length if length < min_span else 0
        spans += length >= min_span
        length = 0
    return used, spans


def test_as_many_anchors_as_fit():
    print("seed", SEED)
    rng = random.Random(SEED)
    cuts = 0
    for _ in range(300):
        tokens = rng.randint(2, 40)
        # few values, so that there are ties
        surprisal = torch.tensor([float(rng.randint(0, 6)) for _ in range(tokens)])
        fixed = none_fixed(tokens)
        fixed[: rng.randint(0, 2)] = True
        fixed[tokens - rng.randint(0, 3) :] = True
        room, min_span = rng.randint(0, tokens), rng.randint(1, 6)
        max_span = rng.randint(1, 5)
        result = segment(surprisal, fixed, room, 0.5, min_span, max_span)
        free = int((~fixed).sum())
        assert int((result.resident & ~fixed).sum()) == min(room, free)
        assert result.num_spans <= max_span
        assert bool(result.resident[fixed].all())
        known = surprisal[1:]
        limit = known.mean() + 0.5 * known.std(correction=0)
        expected = [p for p in range(tokens) if surprisal[p] > limit and not fixed[p]]
        expected.sort(key=lambda p: (-float(surprisal[p]), p))
        best = 0
        for count in range(1, len(expected) + 1):
            used, spans = fits(surprisal, fixed, expected[:count], min_span)
            if used <= min(room, free) and spans <= max_span:
                best = count
        assert result.anchors.tolist() == sorted(expected[:best])
        cuts += best
        sums = torch.zeros(result.num_spans).index_add_(0, result.span, result.weights)
        torch.testing.assert_close(sums, torch.ones(result.num_spans))
        for name, run in enumerate(runs(result)):
            between = [a for a in result.anchors.tolist() if run[0] < a < run[-1]]
            assert not between, f"span {name} has an anchor inside"
    assert cuts > 300, "hardly anything was cut"


def test_thousands_of_spans():
    print("seed", SEED)
    rng = torch.Generator().manual_seed(SEED)
    surprisal = torch.rand(30_000, generator=rng)
    surprisal[::10] += 5
    result = segment(surprisal, none_fixed(30_000), 3000, 1.0, 4, 5000)
    assert result.num_spans == 3000
    assert result.anchors.tolist() == [*range(0, 30_000, 10)]


# -- long spans -------------------------------------------------------------------


def test_long_spans_are_cut_into_equal_parts():
    surprisal = flat(60, p10=9.0, p20=9.0)
    whole = segment(surprisal, none_fixed(60), 2, 1.0, 3, 9)
    assert whole.sizes.tolist() == [10, 9, 39]
    for max_span, sizes in (
        (3, [10, 9, 39]),
        (4, [10, 9, 19, 20]),
        (6, [10, 9, 9, 10, 10, 10]),
        # no more spans fit, although seven are allowed
        (7, [10, 9, 9, 10, 10, 10]),
        (9, [5, 5, 4, 5, 7, 8, 8, 8, 8]),
    ):
        result = cut_evenly(whole, 3, max_span)
        assert result.sizes.tolist() == sizes
        assert result.span.bincount().tolist() == sizes
        assert torch.equal(result.positions, whole.positions)
        assert torch.equal(result.resident, whole.resident)
        sums = torch.zeros(len(sizes)).index_add_(0, result.span, result.weights)
        torch.testing.assert_close(sums, torch.ones(len(sizes)))


def test_parts_keep_their_surprise_and_a_least_size():
    surprisal = torch.tensor([0.0, 0, 0, 1, 3, 4, 0, 9])
    whole = segment(surprisal, none_fixed(8), 1, 1.0, 2, 9)
    result = cut_evenly(whole, 3, 9)
    assert result.sizes.tolist() == [3, 4]
    assert result.weights.tolist() == pytest.approx(
        [1 / 3] * 3 + [0.125, 0.375, 0.5, 0]
    )
    assert cut_evenly(whole, 4, 9).sizes.tolist() == [7]
    nothing = segment(surprisal, none_fixed(8), 8, 1.0, 2, 9)
    assert cut_evenly(nothing, 4, 9).num_spans == 0


def test_the_longest_part_is_as_short_as_can_be():
    print("seed", SEED)
    rng = random.Random(SEED)
    for _ in range(200):
        sizes = [rng.randint(1, 60) for _ in range(rng.randint(1, 5))]
        min_span, max_span = rng.randint(1, 8), rng.randint(1, 40)
        tokens = sum(sizes) + len(sizes) - 1
        surprisal = torch.ones(tokens)
        place = 0
        for size in sizes[:-1]:
            surprisal[place + size] = 9.0
            place += size + 1
        anchors = (surprisal > 1).nonzero().squeeze(1)
        positions = (surprisal == 1).nonzero().squeeze(1)
        number = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        weights = torch.ones(len(positions))
        whole = Segments(
            surprisal > 1, positions, number, torch.tensor(sizes), weights, anchors
        )
        result = cut_evenly(whole, min_span, max_span).sizes.tolist()
        assert sum(result) == sum(sizes)
        assert len(result) <= max(max_span, len(sizes))
        assert min(result) >= min(min_span, *sizes)

        def count(limit: int, sizes=sizes, min_span=min_span) -> int:
            return sum(min(-(-s // limit), max(s // min_span, 1)) for s in sizes)

        limits = [n for n in range(1, max(sizes) + 1) if count(n) <= max_span]
        assert len(result) == count(limits[0] if limits else max(sizes))


# -- spans as a whole ------------------------------------------------------------


def test_means_are_weighted():
    print("seed", SEED)
    rng = torch.Generator().manual_seed(SEED)
    surprisal = torch.rand(50, generator=rng) * 3
    segments = segment(surprisal, none_fixed(50), 6, 0.3, 2, 9)
    count = segments.positions.numel()
    keys, values = torch.randn(2, 3, count, 8, generator=rng).bfloat16()
    spans = CoarseSpans.of(keys, segments, torch.clone, with_variance=True)
    mean_values = weighted_means(values, segments)
    for number, run in enumerate(runs(segments)):
        at = [segments.positions.tolist().index(p) for p in run]
        worth = surprisal[run] / surprisal[run].sum()
        for rows, means in ((keys, spans.keys), (values, mean_values)):
            expected = (rows[:, at].double() * worth[:, None].double()).sum(1)
            torch.testing.assert_close(
                means[:, number].double(), expected, rtol=0, atol=1e-5
            )
        from_mean = keys[:, at].double() - spans.keys[:, number, None].double()
        variance = (from_mean.square() * worth[:, None].double()).sum(1)
        torch.testing.assert_close(
            spans.key_variance[:, number].double(), variance, rtol=0.01, atol=1e-5
        )
        assert torch.equal(spans.summary, spans.keys)
        assert spans.log_sizes[number] == pytest.approx(math.log(len(run)))


def test_second_order_finds_a_key_that_its_mean_hides():
    """One key of eight answers the query; its span's mean is that of other spans."""
    policy, scale = SeKV(second_order=True), 0.25
    random = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    query = torch.nn.functional.normalize(torch.randn(16, generator=random), dim=0) * 16
    keys = 0.1 * torch.randn(1, 80, 16, generator=random)
    keys[0, 40:48] -= 2 / 7 * query / 16
    keys[0, 43] = 2 * query / 16
    keys[0, 8:16] += 0.1 * query / 16  # a span that gets more attention by its mean
    span = torch.arange(10).repeat_interleave(8)
    even = torch.full((80,), 1 / 8)
    segments = Segments(
        torch.zeros(80, dtype=torch.bool),
        torch.arange(80),
        span,
        torch.full((10,), 8),
        even,
        torch.empty(0, dtype=torch.int64),
    )
    exact = torch.zeros(10).index_add_(0, span, (keys[0] @ query * scale).softmax(0))
    spans = CoarseSpans.of(keys, segments, lambda means: None, with_variance=True)
    gates = policy.gates(0, query.view(1, 1, 16), spans, scale)[0]
    by_mean = replace(spans, key_variance=None)
    first_order = policy.gates(0, query.view(1, 1, 16), by_mean, scale)[0]
    assert int(exact.argmax()) == int(gates.argmax()) == 5
    assert int(first_order.argmax()) == 1


def test_second_order_is_exact_for_normally_distributed_keys():
    policy, scale, tokens = SeKV(second_order=True), 0.25, 20000
    random = torch.Generator().manual_seed(SEED)
    print("seed", SEED)
    width = torch.tensor([0.2, 0.6, 1.0])
    keys = torch.randn(1, 3, tokens, 16, generator=random) * width[:, None, None]
    segments = Segments(
        torch.zeros(3 * tokens, dtype=torch.bool),
        torch.arange(3 * tokens),
        torch.arange(3).repeat_interleave(tokens),
        torch.full((3,), tokens),
        torch.full((3 * tokens,), 1 / tokens),
        torch.empty(0, dtype=torch.int64),
    )
    query = torch.randn(1, 2, 16, generator=random)
    spans = CoarseSpans.of(
        keys.flatten(1, 2), segments, lambda means: None, with_variance=True
    )
    mass = (query @ keys.flatten(1, 2).mT * scale).softmax(-1)
    expected = mass.view(2, 3, tokens).sum(-1).sum(0)
    gates = policy.gates(0, query, spans, scale)[0]
    torch.testing.assert_close(gates, expected, rtol=0.03, atol=0)
