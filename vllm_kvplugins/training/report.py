"""Evaluate a router on held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplugins.ops.zoom import within_room
from vllm_kvplugins.routers.files import RouterReport
from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.training.examples import Example
from vllm_kvplugins.training.losses import divergence, lost_energy, rank_gates
from vllm_kvplugins.training.student import Decide, routed, student_logits
from vllm_kvplugins.training.thresholds import Gates, best_thresholds, router_logits

# Share of the tokens of spans that may be zoomed when spans compete for room.
_ROOM = 0.25


@dataclass(slots=True)
class Counts:
    """Decision counts per layer and query head.

    Attributes:
        right: zoomed spans that are targets.
        zoomed: zoomed spans.
        targets: spans that should be zoomed.
        decisions: all decisions.
    """

    right: torch.Tensor
    zoomed: torch.Tensor
    targets: torch.Tensor
    decisions: torch.Tensor

    @staticmethod
    def of(chosen: torch.Tensor, targets: torch.Tensor) -> Counts:
        """Counts of one example; both bool [layers, heads, queries, spans]."""

        def count(marks: torch.Tensor) -> torch.Tensor:
            return marks.sum((-1, -2)).float()

        every = torch.ones_like(targets)
        return Counts(*map(count, (chosen & targets, chosen, targets, every)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.right + other.right,
            self.zoomed + other.zoomed,
            self.targets + other.targets,
            self.decisions + other.decisions,
        )

    @property
    def f1(self) -> float:
        """Over all layers and heads."""
        return float(2 * self.right.sum() / (self.zoomed + self.targets).sum())


def summed(counts: Sequence[Counts]) -> Counts:
    """Sum over at least one example."""
    total = counts[0]
    for more in counts[1:]:
        total = total + more
    return total


def mean_key_gates(example: Example) -> torch.Tensor:
    """Attention shares of span means: [layers, num_q_heads, queries, spans]."""
    keys = example.means[0]
    group = example.queries.shape[1] // keys.shape[1]
    queries = example.queries.float() * example.scale
    scores = queries @ keys.repeat_interleave(group, 1).mT + example.log_sizes
    return scores.softmax(-1)


def grouped(gates: torch.Tensor, example: Example) -> torch.Tensor:
    """Gates by KV head: [layers, num_kv_heads, group, queries, spans], on the CPU."""
    return gates.unflatten(1, (example.means.shape[2], -1)).cpu()


def mean_key_ranking(example: Example) -> torch.Tensor:
    """Ranking of ``router: mean-key``: [layers, num_kv_heads, queries, spans]."""
    return grouped(mean_key_gates(example), example).sum(2)


def router_ranking(router: Router, example: Example) -> torch.Tensor:
    """Ranking of a router; -inf for spans below all thresholds of a KV head."""
    logits = router_logits(router, example)
    above = grouped(logits > router.threshold[..., None, None], example).any(2)
    shares = mean_key_ranking(example) + grouped(logits.softmax(-1), example).sum(2)
    return shares.masked_fill(~above, -torch.inf)


def teacher_ranking(example: Example) -> torch.Tensor:
    """Ranking by the teacher's attention: [layers, num_kv_heads, queries, spans]."""
    return grouped(example.mass, example).sum(2)


def chosen_in_room(ranking: torch.Tensor, example: Example) -> torch.Tensor:
    """Spans zoomed in order of rank until a quarter of the tokens is used.

    Returns:
        bool, same shape as ``ranking``.
    """
    sizes = example.segments.sizes
    room = int(_ROOM * int(sizes.sum()))
    return within_room(ranking.flatten(0, -2), sizes, room).view(ranking.shape)


def covered_in_room(ranking: torch.Tensor, example: Example) -> float:
    """Share of the attention to spans that falls on the chosen spans."""
    mass = teacher_ranking(example)
    return float((mass * chosen_in_room(ranking, example)).sum() / mass.sum())


def f1_in_room(ranking: Gates, examples: Sequence[Example]) -> float:
    """F1 of the chosen spans against those that the teacher's attention chooses."""
    counts = []
    for example in examples:
        best = chosen_in_room(teacher_ranking(example), example)
        counts.append(Counts.of(chosen_in_room(ranking(example), example), best))
    return summed(counts).f1


def report(
    model: Any,
    router: Router,
    training: Sequence[Example],
    held_out: Sequence[Example],
) -> RouterReport:
    """Figures of a router and of the mean-key gate on held-out examples.

    The mean-key gate uses the best threshold per head on the training examples, and so
    does "router_tuned".

    Args:
        training: examples on which these thresholds are chosen.
        held_out: examples that no training step has used; all with a passage.
    """

    def routing(example: Example) -> torch.Tensor:
        return router_logits(router, example).sigmoid()

    def ranking(example: Example) -> torch.Tensor:
        return router_ranking(router, example)

    def decided(gates: Gates, thresholds: torch.Tensor) -> Counts:
        above = thresholds[..., None, None]
        return summed([Counts.of(gates(e) > above, e.targets) for e in held_out])

    shares = best_thresholds(mean_key_gates, training)
    router_decisions = decided(routing, router.tau)
    mean_key_decisions = decided(mean_key_gates, shares)
    tuned = decided(routing, best_thresholds(routing, training))
    everything = decided(lambda e: e.mass + 1, torch.zeros_like(shares))

    def average(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def covered(ranking: Gates) -> float:
        return average([covered_in_room(ranking(e), e) for e in held_out])

    ranks = [_ranks(router, example) for example in held_out]
    return RouterReport(
        zoom_f1={
            "router": router_decisions.f1,
            "mean_key": mean_key_decisions.f1,
            "router_tuned": tuned.f1,
            "all": everything.f1,
        },
        zoom_f1_in_room={
            "router": f1_in_room(ranking, held_out),
            "mean_key": f1_in_room(mean_key_ranking, held_out),
        },
        zoomed={
            "router": float(
                router_decisions.zoomed.sum() / router_decisions.decisions.sum()
            ),
            "mean_key": float(
                mean_key_decisions.zoomed.sum() / mean_key_decisions.decisions.sum()
            ),
            "wanted": float(
                router_decisions.targets.sum() / router_decisions.decisions.sum()
            ),
        },
        covered_in_room={
            "router": covered(ranking),
            "mean_key": covered(mean_key_ranking),
            "teacher": covered(teacher_ranking),
        },
        divergence=_divergences(model, router, shares[..., None, None], held_out),
        kept_energy=average([energy for energy, _ in ranks]),
        mean_rank=average([rank for _, rank in ranks]),
        zoom_rate=(router_decisions.zoomed / router_decisions.decisions).tolist(),
        tau=router.tau.tolist(),
    )


def _ranks(router: Router, example: Example) -> tuple[float, float]:
    """Share of the squared norm that gated components keep, and their number.

    The number of components is the sum of their gates (section 3.2).
    """
    gates = rank_gates(router, example, router.summarize(example.means[0], slice(None)))
    kept = (gates * (example.spectrum > 0)).sum(-1).mean()
    return 1 - float(lost_energy(gates, example.spectrum)), float(kept)


def _divergences(
    model: Any,
    router: Router,
    thresholds: torch.Tensor,
    examples: Sequence[Example],
) -> dict[str, float]:
    """Divergence from full attention of each way to decide, mean over examples."""

    def constant(value: float) -> Callable[[Example], Decide]:
        def with_example(example: Example) -> Decide:
            spans = example.segments.num_spans
            return lambda layer, q: torch.full((*q.shape[:2], spans), value)

        return with_example

    def mean_key(example: Example) -> Decide:
        def decide(layer: int, queries: torch.Tensor) -> torch.Tensor:
            keys = example.means[0, layer]
            group = queries.shape[0] // keys.shape[0]
            scores = (
                queries.float() * example.scale @ keys.repeat_interleave(group, 0).mT
            )
            share = (scores + example.log_sizes).softmax(-1)
            return (share > thresholds[layer]).float()

        return decide

    ways: dict[str, Callable[[Example], Decide]] = {
        "router": lambda example: routed(router, example),
        "mean_key": mean_key,
        "none": constant(0.0),
        "all": constant(1.0),
    }
    divergences = dict.fromkeys(ways, 0.0)
    for example in examples:
        assert example.passage is not None
        teacher = model.get_output_embeddings()(example.passage.hidden).float()
        for name, way in ways.items():
            student = student_logits(model, example, way(example))
            divergences[name] += float(divergence(teacher, student)) / len(examples)
    return divergences
