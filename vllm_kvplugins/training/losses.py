"""The training loss (SeKV, equations 10 to 15)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from vllm_kvplugins.routers.router import Router, group_mean
from vllm_kvplugins.training.examples import Example
from vllm_kvplugins.training.settings import TrainSettings
from vllm_kvplugins.training.student import straight_through


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the terms.

    Differs from the paper: its terms are sums over layers, heads and spans, which grow
    with model and text. Ours are means, and energies are shares of the squared norm of
    a span. Our values of the paper's symbols therefore differ from the paper's values.

    Attributes:
        zoom: lambda_1.
        ranking: of :func:`ranking_loss`, which is not in the paper.
        reconstruction: lambda_2.
        budget: lambda_3.
        rank: beta, cost of a component relative to a zoom.
        positive: w+, weight of a span that should be zoomed, relative to others.
    """

    zoom: float
    ranking: float
    reconstruction: float
    budget: float
    rank: float
    positive: float

    @staticmethod
    def of(settings: TrainSettings) -> Weights:
        return Weights(
            settings.zoom_weight,
            settings.ranking_weight,
            settings.reconstruction_weight,
            settings.budget_weight,
            settings.rank_weight,
            settings.positive_weight,
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of equation 10 for one example; scalars.

    Attributes:
        ranking: not in the paper; see :func:`ranking_loss`.
        rank: components that a span keeps, the second half of equation 15.
        distill: divergence of the student; None in steps without the student.
        zoomed: share of zoomed spans, the first half of equation 15; None in steps
            without the student.
    """

    zoom: torch.Tensor
    ranking: torch.Tensor
    reconstruction: torch.Tensor
    rank: torch.Tensor
    distill: torch.Tensor | None
    zoomed: torch.Tensor | None

    def total(self, weights: Weights, budget_ramp: float) -> torch.Tensor:
        """Equation 10.

        Args:
            budget_ramp: in [0, 1], factor of lambda_3.
        """
        budget = weights.budget * budget_ramp
        total = (
            weights.zoom * self.zoom
            + weights.ranking * self.ranking
            + weights.reconstruction * self.reconstruction
            + budget * weights.rank * self.rank
        )
        if self.distill is None or self.zoomed is None:
            return total
        return total + self.distill + budget * self.zoomed

    def detached(self) -> Terms:
        """The same values without gradients."""

        def number(term: torch.Tensor | None) -> torch.Tensor | None:
            return None if term is None else term.detach()

        return Terms(
            self.zoom.detach(),
            self.ranking.detach(),
            self.reconstruction.detach(),
            self.rank.detach(),
            number(self.distill),
            number(self.zoomed),
        )


def terms(
    router: Router,
    example: Example,
    weights: Weights,
    student: torch.Tensor | None,
    teacher: torch.Tensor | None,
) -> Terms:
    """All terms of one example.

    Args:
        student, teacher: logits [window, vocabulary], or both None.
    """
    every = slice(None)
    summary = router.summarize(example.means[0], every)
    logits = router.logits(example.queries, summary, example.log_sizes, every)
    gates = rank_gates(router, example, summary)
    distill = zoomed = None
    if student is not None and teacher is not None:
        distill = divergence(teacher, student)
        # the cost of a zoom trains only thresholds; projections learn from targets
        above = straight_through(logits.detach(), router.threshold[..., None, None])
        zoomed = above.mean()
    return Terms(
        zoom=zoom_loss(logits, example.targets, weights.positive),
        ranking=ranking_loss(logits, example.mass),
        reconstruction=lost_energy(gates, example.spectrum),
        rank=(gates * (example.spectrum > 0)).sum(-1).mean(),
        distill=distill,
        zoomed=zoomed,
    )


def divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """KL(teacher || student) per token, in nats (equation 11)."""
    return F.kl_div(
        student.log_softmax(-1),
        teacher.log_softmax(-1),
        reduction="batchmean",
        log_target=True,
    )


def zoom_loss(
    logits: torch.Tensor, targets: torch.Tensor, positive: float
) -> torch.Tensor:
    """Binary cross-entropy of the gates, with weighted targets (equation 13)."""
    return F.binary_cross_entropy_with_logits(
        logits, targets.float(), pos_weight=torch.tensor(positive, device=logits.device)
    )


def ranking_loss(logits: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """KL divergence of the router's shares of spans from the teacher's, in nats.

    The router's shares are a softmax of its logits. Queries are weighted by their
    attention to spans.

    Not in the paper, whose targets (equation 12) do not distinguish the most attended
    span from the one that completes 90 % of the attention. The difference
    matters when spans compete for room.

    Args:
        mass: teacher attention to each span, same shape as ``logits``.
    """
    total = mass.sum(-1, keepdim=True)
    shares = mass / total.clamp(min=1e-12)
    distance = torch.xlogy(shares, shares) - shares * logits.log_softmax(-1)
    return (total * distance).sum() / total.sum().clamp(min=1e-12)


def rank_gates(router: Router, example: Example, summary: torch.Tensor) -> torch.Tensor:
    """Rank gates (equation 7) of all spans: [2, layers, num_kv_heads, spans, R]."""
    spectrum = example.spectrum
    shared = group_mean(summary, spectrum.shape[2])
    kinds = torch.tensor([0.0, 1.0], device=spectrum.device)
    is_value = kinds.view(2, 1, 1, 1, 1).expand(*spectrum.shape[:-1], 1)
    shared = shared.expand(2, *shared.shape)
    return router.rank_logits(spectrum, shared, is_value).sigmoid()


def lost_energy(gates: torch.Tensor, spectrum: torch.Tensor) -> torch.Tensor:
    """Share of a span's squared norm that gates remove (eq. 14), mean over spans."""
    energy = spectrum.square()
    lost = ((1 - gates).square() * energy).sum(-1)
    total = energy.sum(-1)
    return (lost / total.clamp(min=1e-12)).mean()
