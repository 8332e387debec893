"""Training examples: the spans of a text, and the attention that each receives."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from vllm_kvplugins.budgets import Budget
from vllm_kvplugins.ops.svd import reconstruct, truncated_svd
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.routers.router import spectra
from vllm_kvplugins.spans.coarse import weighted_means
from vllm_kvplugins.spans.segmentation import Segments
from vllm_kvplugins.training.teacher import Reading


@dataclass(frozen=True, slots=True)
class Cut:
    """How a text becomes an example.

    Attributes:
        budget: smallest and largest share of the prefix that stays on the device.
            A share is drawn for each text, so a router learns long and short spans.
        queries: number of query tokens after the prefix.
        mined: number of these queries that targets are made of; those with the most
            attention to spans.
        window: length of the run of queries that the student reads.
        coverage: rho, share of a query's attention to spans that its targets cover.
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
    """Tokens that the student reads, and their context.

    Attributes:
        tokens: int64 [window].
        first_position: position of the first token.
        hidden: [window, hidden], of the teacher, before the output layer.
        keys, values: [layers, num_kv_heads, first_position, head_dim], the context;
            tokens of spans are reconstructed from their factors.
    """

    tokens: torch.Tensor
    first_position: int
    hidden: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def to(self, device: torch.device) -> Passage:
        """A copy whose activations are on ``device``."""
        return replace(
            self,
            hidden=self.hidden.to(device),
            keys=self.keys.to(device),
            values=self.values.to(device),
        )


@dataclass(frozen=True, slots=True)
class Example:
    """One text, prepared for training.

    Attributes:
        segments: of the prefix.
        means: float32 [2, layers, num_kv_heads, spans, head_dim], of keys and values.
        log_sizes: float32 [spans], logarithm of the span lengths.
        spectrum: float32 [2, layers, num_kv_heads, spans, R], singular values of keys
            and values.
        queries: [layers, num_q_heads, mined, head_dim].
        mass: [layers, num_q_heads, mined, spans], teacher attention to each span.
        targets: bool, same shape as ``mass`` (equation 12).
        passage: for the distillation; None if the student does not read this text.
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
        """A copy whose tensors are on ``device``; segments stay on the CPU."""
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
    """Make an example of a reading.

    Args:
        reading: activations of the text.
        cut: how to make the example.
        geometry: of the cache for which the policy would plan.
        seed: of the drawn budget.
        with_passage: also keep a passage for the student, which needs memory for all
            keys and values.

    Returns:
        The example, or None if the prefix has fewer than two spans.

    Cost: attention scores of ``cut.queries`` queries and the decomposition of all
        spans, layer by layer.
    """
    prefix = len(reading.tokens) - cut.queries
    share = random.Random(seed).uniform(*cut.budget)
    segments = _segments(reading.surprisal[:prefix], share, geometry)
    if segments is None or segments.num_spans < 2:
        return None
    layers = list(zip(reading.queries, reading.keys, reading.values, strict=True))
    masses, means, spectra_of_layers, reconstructed = [], [], [], []
    for query, key, value in layers:
        masses.append(span_mass(query, key, segments, prefix, reading.scale))
        rows = torch.stack([key, value])[:, :, segments.positions]
        means.append(torch.stack([weighted_means(part, segments) for part in rows]))
        spectrum, rebuilt = _factored(rows, segments, cut.max_rank)
        spectra_of_layers.append(spectrum)
        reconstructed.append(rebuilt)
    mass = torch.stack(masses)
    far = mass.sum(-1).mean((0, 1))  # [queries]
    mined = far.topk(min(cut.mined, len(far))).indices.sort().values
    mass = mass[:, :, mined]
    return Example(
        segments=segments,
        means=torch.stack(means, 1),
        log_sizes=segments.sizes.float().log(),
        spectrum=torch.stack(spectra_of_layers, 1),
        queries=reading.queries[:, :, mined],
        mass=mass,
        targets=covering(mass, cut.coverage),
        passage=_passage(reading, cut, far, segments, torch.stack(reconstructed, 1))
        if with_passage
        else None,
        scale=reading.scale,
    )


def _segments(
    surprisal: torch.Tensor, share: float, geometry: Geometry
) -> Segments | None:
    """Segments that the policy makes of this prefix; None if it compacts nothing."""
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
    """Attention of each query to each whole span, a_S of section 3.3.

    Args:
        queries: [num_q_heads, queries, head_dim], consecutive.
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
    mass = torch.zeros(*scores.shape[:2], segments.num_spans)
    return mass.index_add_(2, segments.span, weights[:, :, segments.positions])


def covering(mass: torch.Tensor, coverage: float) -> torch.Tensor:
    """The smallest sets of spans with this share of the mass of all spans (eq. 12).

    Ties go to the lower index.

    Args:
        mass: [..., spans].
        coverage: rho, in (0, 1].

    Returns:
        bool, same shape as ``mass``.
    """
    order = mass.argsort(dim=-1, descending=True, stable=True)
    sorted_mass = mass.gather(-1, order)
    before = sorted_mass.cumsum(-1) - sorted_mass
    selected = before < coverage * mass.sum(-1, keepdim=True)
    return torch.zeros_like(selected).scatter_(-1, order, selected)


def _factored(
    rows: torch.Tensor, segments: Segments, max_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose the keys and values of all spans in one layer.

    Args:
        rows: [2, num_kv_heads, n, head_dim].

    Returns:
        Spectra, float32 [2, num_kv_heads, spans, R], and the reconstructed rows.
    """
    starts = segments.sizes.cumsum(0) - segments.sizes
    factors = truncated_svd(
        rows.flatten(0, 1).contiguous(), starts, segments.sizes, max_rank
    )
    spectrum = spectra(factors, max_rank).view(*rows.shape[:2], -1, max_rank)
    rebuilt = reconstruct(factors, torch.arange(len(factors)))
    return spectrum, rebuilt.view(rows.shape)


def _passage(
    reading: Reading,
    cut: Cut,
    far: torch.Tensor,
    segments: Segments,
    reconstructed: torch.Tensor,
) -> Passage:
    """The run of queries with the most attention to spans."""
    start = int(far.unfold(0, min(cut.window, len(far)), 1).mean(1).argmax())
    window = slice(start, start + cut.window)
    first = len(reading.tokens) - cut.queries + start
    context = torch.stack([reading.keys[:, :, :first], reading.values[:, :, :first]])
    context[:, :, :, segments.positions] = reconstructed.to(context.dtype)
    return Passage(
        tokens=reading.tokens[first : first + cut.window],
        first_position=first,
        hidden=reading.hidden[window].clone(),
        keys=context[0],
        values=context[1],
    )
