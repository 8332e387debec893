"""Training examples: a text cut into spans, and what full attention looked at."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from vllm_kvplugins.budgets import Budget
from vllm_kvplugins.ops.svd import reconstruct, truncated_svd
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.routers.router import spectra
from vllm_kvplugins.spans.coarse import CoarseSpans
from vllm_kvplugins.spans.segmentation import Segments
from vllm_kvplugins.training.teacher import Reading


@dataclass(frozen=True, slots=True)
class Cut:
    """How texts become examples.

    Attributes:
        budget: smallest and largest share of the prefix that stays on the device;
            drawn anew for each text, so that a router knows long and short spans.
        queries: tokens behind the prefix that may ask.
        mined: of those, the ones that look farthest, whose choice is learned.
        window: of those, in one run, that the student reads for the distillation.
        coverage: rho, share of a query's attention to spans that its targets hold.
        max_rank: R.
    """

    budget: tuple[float, float] = (0.1, 0.5)
    queries: int = 256
    mined: int = 192
    window: int = 32
    coverage: float = 0.9
    max_rank: int = 32


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens that the student reads, and what lies before them.

    Attributes:
        tokens: int64 [window].
        first_position: of the first.
        hidden: [window, hidden], the teacher's, before the output layer.
        keys, values: [layers, num_kv_heads, first_position, head_dim]; those of spans
            as their factors give them.
    """

    tokens: torch.Tensor
    first_position: int
    hidden: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def to(self, device: torch.device) -> Passage:
        return replace(
            self,
            hidden=self.hidden.to(device),
            keys=self.keys.to(device),
            values=self.values.to(device),
        )


@dataclass(frozen=True, slots=True)
class Example:
    """One text.

    Attributes:
        segments: of the prefix.
        means: float32 [2, layers, num_kv_heads, spans, head_dim], of keys and values.
        log_sizes: float32 [spans].
        spectrum: float32 [2, layers, num_kv_heads, spans, R], of keys and of values.
        queries: [layers, num_q_heads, mined, head_dim].
        mass: [layers, num_q_heads, mined, spans], teacher attention to each.
        targets: bool, as ``mass`` (equation 12).
        passage: for the distillation; None: not for this one.
        scale: softmax scale of the model.
    """

    segments: Segments
    means: torch.Tensor
    log_sizes: torch.Tensor
    spectrum: torch.Tensor
    queries: torch.Tensor
    mass: torch.Tensor
    targets: torch.Tensor
    passage: Passage | None
    scale: float

    def to(self, device: torch.device) -> Example:
        """The same with all that a training step computes with on ``device``; what
        says where spans lie stays on the CPU."""
        return replace(
            self,
            means=self.means.to(device),
            log_sizes=self.log_sizes.to(device),
            spectrum=self.spectrum.to(device),
            queries=self.queries.to(device),
            mass=self.mass.to(device),
            targets=self.targets.to(device),
            passage=self.passage and self.passage.to(device),
        )


def make_example(
    reading: Reading, cut: Cut, geometry: Geometry, seed: int, with_passage: bool
) -> Example | None:
    """Turn a reading into an example; None if the prefix has fewer than two spans.

    Args:
        seed: of the budget that is drawn.
        with_passage: for the student, which takes the memory of all keys and values.

    Cost: attention scores of ``cut.queries`` queries and the decomposition of all
        spans, layer by layer.
    """
    prefix = len(reading.tokens) - cut.queries
    share = random.Random(seed).uniform(*cut.budget)
    segments = _segments(reading.surprisal[:prefix], share, geometry)
    if segments is None or segments.num_spans < 2:
        return None
    layers = list(zip(reading.queries, reading.keys, reading.values, strict=True))
    masses, means, spectrums, again = [], [], [], []
    for query, key, value in layers:
        masses.append(span_mass(query, key, segments, prefix, reading.scale))
        rows = torch.stack([key, value])[:, :, segments.positions]
        coarse = CoarseSpans.of(rows[0], rows[1], segments, torch.clone)
        means.append(torch.stack([coarse.keys, coarse.values]))
        found, made = _factored(rows, segments, cut.max_rank)
        spectrums.append(found)
        again.append(made)
    mass = torch.stack(masses)
    far = mass.sum(-1).mean((0, 1))  # [queries]
    mined = far.topk(min(cut.mined, len(far))).indices.sort().values
    mass = mass[:, :, mined]
    return Example(
        segments=segments,
        means=torch.stack(means, 1),
        log_sizes=segments.sizes.float().log(),
        spectrum=torch.stack(spectrums, 1),
        queries=reading.queries[:, :, mined],
        mass=mass,
        targets=covering(mass, cut.coverage),
        passage=_passage(reading, cut, far, segments, torch.stack(again, 1))
        if with_passage
        else None,
        scale=reading.scale,
    )


def _segments(
    surprisal: torch.Tensor, share: float, geometry: Geometry
) -> Segments | None:
    """As the policy would cut the same prompt at that budget; None: it would not."""
    policy = SeKV(budget=Budget(fraction=share))
    plan = policy.plan(Lengths(surprisal.numel()), geometry)
    if not plan.compactions:
        return None
    size = geometry.block_size
    stays = len(plan.compactions[0].retained) * size + surprisal.numel() % size
    return policy.segment(surprisal, stays, geometry)


def span_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    segments: Segments,
    first_query: int,
    scale: float,
) -> torch.Tensor:
    """Attention of each query to each span as a whole, a_S of section 3.3.

    Args:
        queries: [num_q_heads, queries, head_dim], one after the other.
        keys: [num_kv_heads, tokens, head_dim].
        first_query: position of the first query.

    Returns:
        float32 [num_q_heads, queries, spans].
    """
    group = queries.shape[0] // keys.shape[0]
    scores = queries.float() @ keys.float().repeat_interleave(group, 0).mT * scale
    count, tokens = scores.shape[-2:]
    later = torch.arange(tokens) > torch.arange(count)[:, None] + first_query
    weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
    found = torch.zeros(*scores.shape[:2], segments.num_spans)
    return found.index_add_(2, segments.span, weights[:, :, segments.positions])


def covering(mass: torch.Tensor, coverage: float) -> torch.Tensor:
    """The smallest sets of spans that hold this share of the mass on all spans
    (equation 12); ties go to the lower number.

    Args:
        mass: [..., spans].
    """
    order = mass.argsort(dim=-1, descending=True, stable=True)
    sorted_mass = mass.gather(-1, order)
    before = sorted_mass.cumsum(-1) - sorted_mass
    wanted = before < coverage * mass.sum(-1, keepdim=True)
    return torch.zeros_like(wanted).scatter_(-1, order, wanted)


def _factored(
    rows: torch.Tensor, segments: Segments, max_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Spectra, float32 [2, num_kv_heads, spans, R], of keys and values [2,
    num_kv_heads, n, head_dim], and what their factors give back."""
    starts = segments.sizes.cumsum(0) - segments.sizes
    factors = truncated_svd(
        rows.flatten(0, 1).contiguous(), starts, segments.sizes, max_rank
    )
    found = spectra(factors, max_rank).view(*rows.shape[:2], -1, max_rank)
    again = reconstruct(factors, torch.arange(len(factors)))
    return found, again.view(rows.shape)


def _passage(
    reading: Reading,
    cut: Cut,
    far: torch.Tensor,
    segments: Segments,
    again: torch.Tensor,
) -> Passage:
    """The run of queries that looks farthest."""
    start = int(far.unfold(0, min(cut.window, len(far)), 1).mean(1).argmax())
    window = slice(start, start + cut.window)
    first = len(reading.tokens) - cut.queries + start
    before = torch.stack([reading.keys[:, :, :first], reading.values[:, :, :first]])
    before[:, :, :, segments.positions] = again.to(before.dtype)
    return Passage(
        tokens=reading.tokens[first : first + cut.window],
        first_position=first,
        hidden=reading.hidden[window].clone(),
        keys=before[0],
        values=before[1],
    )
