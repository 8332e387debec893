"""What a router is worth on texts that it has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplugins.routers.examples import Example
from vllm_kvplugins.routers.losses import divergence, lost_energy, rank_gates
from vllm_kvplugins.routers.router import Router
from vllm_kvplugins.routers.student import Decide, routed, student_logits
from vllm_kvplugins.spans.coarse import within_room

# Candidates among which thresholds of the mean-key gate are chosen.
_THRESHOLDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
# Share of the tokens of spans that may be zoomed where choices compete for room.
_ROOM = 0.25

# example -> gates, larger = sooner, [layers, num_q_heads, queries, spans].
Gates = Callable[[Example], torch.Tensor]


@dataclass(slots=True)
class Counts:
    """Of decisions, per layer and query head; F1 comes of them."""

    right: torch.Tensor
    zoomed: torch.Tensor
    wanted: torch.Tensor
    asked: torch.Tensor

    @staticmethod
    def of(chosen: torch.Tensor, targets: torch.Tensor) -> Counts:
        def count(marks: torch.Tensor) -> torch.Tensor:
            return marks.sum((-1, -2)).float()

        every = torch.ones_like(targets)
        return Counts(*map(count, (chosen & targets, chosen, targets, every)))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.right + other.right,
            self.zoomed + other.zoomed,
            self.wanted + other.wanted,
            self.asked + other.asked,
        )

    @property
    def f1(self) -> float:
        """Over all layers and heads."""
        return float(2 * self.right.sum() / (self.zoomed + self.wanted).sum())

    @property
    def f1_per_head(self) -> torch.Tensor:
        """[layers, num_q_heads]; 0 where nothing is wanted or zoomed."""
        return 2 * self.right / (self.zoomed + self.wanted).clamp(min=1)


def summed(counts: Sequence[Counts]) -> Counts:
    total = counts[0]
    for more in counts[1:]:
        total = total + more
    return total


def mean_key_gates(example: Example) -> torch.Tensor:
    """What ``router: mean-key`` ranks by: attention to means, as a share."""
    keys = example.means[0]
    group = example.queries.shape[1] // keys.shape[1]
    asked = example.queries.float() * example.scale
    scores = asked @ keys.repeat_interleave(group, 1).mT + example.log_sizes
    return scores.softmax(-1)


def router_gates(router: Router, example: Example) -> torch.Tensor:
    """Equation 5, for the queries that were mined."""
    every = slice(None)
    summary = router.summarize(example.means[0], every)
    return router.logits(example.queries, summary, example.log_sizes, every).sigmoid()


def best_thresholds(gates: Gates, examples: Sequence[Example]) -> torch.Tensor:
    """The threshold of each head with the best F1 on these examples,
    [layers, num_q_heads]."""
    found = []
    for threshold in _THRESHOLDS:
        counts = [Counts.of(gates(e) > threshold, e.targets) for e in examples]
        found.append(summed(counts).f1_per_head)
    best = torch.stack(found).argmax(0)
    return torch.tensor(_THRESHOLDS, device=best.device)[best]


def covered_in_room(gates: torch.Tensor, example: Example) -> float:
    """Share of the attention to spans that the zoomed ones hold, when the query heads
    of a KV head choose together, best first, until a quarter of the tokens is in."""
    sizes, heads = example.segments.sizes, example.means.shape[2]
    room = int(_ROOM * int(sizes.sum()))

    def shared(rows: torch.Tensor, how: str) -> torch.Tensor:
        grouped = rows.unflatten(1, (heads, -1))
        made = grouped.amax(2) if how == "most" else grouped.sum(2)
        return made.flatten(0, -2)

    chosen = within_room(shared(gates, "most").cpu(), sizes, room)
    mass = shared(example.mass, "sum").cpu()
    return float((mass * chosen).sum() / mass.sum())


def report(
    model: Any,
    router: Router,
    training: Sequence[Example],
    held_out: Sequence[Example],
) -> dict[str, Any]:
    """Figures of a router beside those of the mean-key gate.

    The mean-key gate gets the best threshold per head on the training examples.

    Args:
        training: to choose those thresholds on.

    Returns:
        JSON-like. Divergences are in nats per token, of the passages; "zoomed" is the
        share of (query, query head, span) that is seen token by token.
    """

    thresholds = best_thresholds(mean_key_gates, training)[..., None, None]
    tau = router.tau[..., None, None]
    ours = summed(
        [Counts.of(router_gates(router, e) > tau, e.targets) for e in held_out]
    )
    theirs = summed(
        [Counts.of(mean_key_gates(e) > thresholds, e.targets) for e in held_out]
    )
    everything = summed(
        [Counts.of(torch.ones_like(e.targets), e.targets) for e in held_out]
    )

    def average(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def covered(gates: Gates) -> float:
        return average([covered_in_room(gates(e), e) for e in held_out])

    ranks = [_ranks(router, example) for example in held_out]
    return {
        "zoom_f1": {
            "router": ours.f1,
            "mean_key": theirs.f1,
            "all": everything.f1,
        },
        "zoomed": {
            "router": float(ours.zoomed.sum() / ours.asked.sum()),
            "mean_key": float(theirs.zoomed.sum() / theirs.asked.sum()),
            "wanted": float(ours.wanted.sum() / ours.asked.sum()),
        },
        "covered_in_room": {
            "router": covered(lambda e: router_gates(router, e)),
            "mean_key": covered(mean_key_gates),
            "teacher": covered(lambda e: e.mass),
        },
        "divergence": _divergences(model, router, thresholds, held_out),
        "kept_energy": average([energy for energy, _ in ranks]),
        "mean_rank": average([rank for _, rank in ranks]),
        "zoom_rate": (ours.zoomed / ours.asked).tolist(),
        "tau": router.tau.tolist(),
    }


def _ranks(router: Router, example: Example) -> tuple[float, float]:
    """Share of the squared norm that gated components keep, and how many they are, as
    the sum of their gates (section 3.2)."""
    gates = rank_gates(router, example, router.summarize(example.means[0], slice(None)))
    kept = (gates * (example.spectrum > 0)).sum(-1).mean()
    return 1 - float(lost_energy(gates, example.spectrum)), float(kept)


def _divergences(
    model: Any,
    router: Router,
    thresholds: torch.Tensor,
    examples: Sequence[Example],
) -> dict[str, float]:
    """From full attention, of each way to decide; the mean over examples."""

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
    found = dict.fromkeys(ways, 0.0)
    for example in examples:
        teacher = model.get_output_embeddings()(example.passage.hidden).float()
        for name, way in ways.items():
            student = student_logits(model, example, way(example))
            found[name] += float(divergence(teacher, student)) / len(examples)
    return found
