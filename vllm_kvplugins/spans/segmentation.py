"""Divide a prompt into spans and anchors by surprisal, within a given room.

Capitals stay resident; the other tokens move to host memory::

    S S a b c A d e f g h A B i j C C C W W W
    sinks  span   span        short     window
               anchors

Anchors are surprising tokens. The tokens between two anchors form a span, or several
spans if there are many.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Segments:
    """The division of one prompt, the same for all layers and KV heads.

    Attributes:
        resident: bool [tokens], whether a token stays at full resolution.
        positions: int64 [n], positions of the other tokens, ascending.
        span: int64 [n], the number of their span, ascending from 0.
        sizes: int64 [spans], tokens of each.
        weights: float32 [n], a token's share of its span's surprisal (equation 2);
            the weights of a span add up to 1.
        anchors: int64 [a], positions of the tokens that cut spans.
    """

    resident: torch.Tensor
    positions: torch.Tensor
    span: torch.Tensor
    sizes: torch.Tensor
    weights: torch.Tensor
    anchors: torch.Tensor

    @property
    def num_spans(self) -> int:
        return int(self.sizes.numel())


def segment(
    surprisal: torch.Tensor,
    fixed: torch.Tensor,
    room: int,
    sensitivity: float,
    least_span: int,
    most_spans: int,
) -> Segments:
    """Divide a prompt (SeKV, section 3.1, equations 1 and 2).

    Tokens whose surprisal is more than ``sensitivity`` standard deviations above the
    mean become anchors, the most surprising first, while there is room for them and for
    the spans shorter than ``least_span`` that they cut off, which stay resident. The
    remaining room goes to the next most surprising tokens, which are no anchors.

    Differs from the paper: the paper has no limited room. It therefore neither stops
    adding anchors nor keeps tokens that are not anchors.

    Args:
        surprisal: float32 [tokens], in nats; the first token's value is ignored.
        fixed: bool [tokens], tokens that always stay and are no anchors: sinks and
            window.
        room: number of other tokens that stay, at most all of them.
        sensitivity: alpha of the paper.
        least_span: L_min.
        most_spans: at least 1.

    Raises:
        ValueError: a surprisal is not finite.

    Cost: O(tokens log tokens); about a millisecond for 4K tokens.
    """
    if not bool(torch.isfinite(surprisal).all()):
        raise ValueError("surprisal holds NaN or infinity")
    free = (~fixed).nonzero().squeeze(1)
    room = min(room, free.numel())
    anchors = _anchors(surprisal, fixed, room, sensitivity, least_span, most_spans)
    resident = fixed.clone()
    resident[anchors] = True
    short = _short_tokens(resident, least_span)
    if int(short.sum()) <= room - anchors.numel():
        resident |= short
    left = room - int(resident.sum() - fixed.sum())
    order = surprisal[free].argsort(descending=True, stable=True)
    rest = free[order]
    rest = rest[~resident[rest]][:left]
    resident[rest] = True
    return _divided(surprisal, resident, anchors)


def cut_evenly(segments: Segments, least_span: int, most_spans: int) -> Segments:
    """Cut the longest spans into equal parts, so that a zoom has room for them.

    Makes the longest part as short as possible. The paper has no counterpart: its spans
    are as long as the distance of anchors, even if no room could hold them.

    Args:
        least_span: smallest length of a part.
        most_spans: largest number of spans; if there are more already, nothing is cut.

    Cost: see ``segment``.
    """
    sizes = segments.sizes

    def parts(longest: int) -> torch.Tensor:
        return (-(-sizes // longest)).minimum((sizes // least_span).clamp(min=1))

    limits = range(1, int(sizes.max()) if sizes.numel() else 1)
    # Longer parts mean fewer parts.
    at = bisect_left(limits, -most_spans, key=lambda limit: -int(parts(limit).sum()))
    counts = parts(at + 1)
    span = torch.arange(sizes.numel()).repeat_interleave(counts)
    number = torch.arange(span.numel()) - (counts.cumsum(0) - counts)[span]
    size, count = sizes[span], counts[span]
    cut = (number + 1) * size // count - number * size // count
    owner = torch.arange(cut.numel()).repeat_interleave(cut)
    weights = _shares(segments.weights, owner, cut)
    return replace(segments, span=owner, sizes=cut, weights=weights)


def _anchors(
    surprisal: torch.Tensor,
    fixed: torch.Tensor,
    room: int,
    sensitivity: float,
    least_span: int,
    most_spans: int,
) -> torch.Tensor:
    """int64 [a], ascending: the most surprising tokens, as many as fit."""
    known = surprisal[1:] if surprisal.numel() > 1 else surprisal
    limit = known.mean() + sensitivity * known.std(correction=0)
    wanted = ((surprisal > limit) & ~fixed).nonzero().squeeze(1)
    order = surprisal[wanted].argsort(descending=True, stable=True)
    walls = [-1, *fixed.nonzero().squeeze(1).tolist(), fixed.numel()]
    chosen = wanted[order].tolist()
    kept = _most_that_fit(walls, chosen, room, least_span, most_spans)
    return torch.tensor(sorted(chosen[:kept]), dtype=torch.int64)


def _most_that_fit(
    walls: list[int], chosen: list[int], room: int, least_span: int, most_spans: int
) -> int:
    """The number of tokens of ``chosen``, in their order, that can be anchors.

    Each anchor takes a place, and so does every token of a gap between two walls
    (anchors are walls) that is shorter than ``least_span``. That sum never decreases
    when an anchor is added; the number of spans can.
    """

    def short(tokens: int) -> int:
        return tokens if tokens < least_span else 0

    gaps = [right - left - 1 for left, right in itertools.pairwise(walls)]
    used = sum(map(short, gaps))
    spans = sum(gap >= least_span for gap in gaps)
    most = 0
    for count, position in enumerate(chosen, 1):
        at = bisect_left(walls, position)
        left, right = position - walls[at - 1] - 1, walls[at] - position - 1
        whole = left + right + 1
        used += 1 + short(left) + short(right) - short(whole)
        spans += (left >= least_span) + (right >= least_span) - (whole >= least_span)
        if used > room:
            break
        if spans <= most_spans:
            most = count
        insort(walls, position)
    return most


def _short_tokens(resident: torch.Tensor, least_span: int) -> torch.Tensor:
    """bool [tokens]: tokens of non-resident runs shorter than ``least_span``."""
    run = resident.long().cumsum(0)  # the same throughout a run
    length = torch.bincount(run[~resident], minlength=int(run.max()) + 1)
    return ~resident & (length[run] < least_span)


def _divided(
    surprisal: torch.Tensor, resident: torch.Tensor, anchors: torch.Tensor
) -> Segments:
    positions = (~resident).nonzero().squeeze(1)
    cut = torch.searchsorted(anchors, positions)  # anchors in front of each
    _, span, sizes = cut.unique_consecutive(return_inverse=True, return_counts=True)
    weights = _shares(surprisal[positions].clamp(min=0), span, sizes)
    return Segments(resident, positions, span, sizes, weights, anchors)


def _shares(
    worth: torch.Tensor, span: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """float32 [n]: each token's share of its span; equal shares if the sum is 0."""
    total = torch.zeros(sizes.numel()).index_add_(0, span, worth)
    even = 1 / sizes.float()
    return torch.where(total[span] > 0, worth / total[span], even[span])
