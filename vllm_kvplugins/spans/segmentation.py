"""Spans and anchors from surprisal, in a given room.

One prompt; capitals stay resident, the others are in the host's memory::

    S S a b c A d e f g h A B i j C C C W W W
    sinks  span   span        short     window
               anchors

Anchors are surprising tokens; what lies between two of them is a span, or several
where that would be long.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Segments:
    """How one prompt is divided; the same for all layers and KV heads.

    Attributes:
        resident: bool [tokens], whether a token stays at full resolution.
        positions: int64 [n], the others, ascending.
        span: int64 [n], the number of their span, ascending from 0.
        sizes: int64 [spans], tokens of each.
        weights: float32 [n], share of its span's surprisal (equation 2); the
            weights of a span add up to 1.
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

    Tokens whose surprisal lies more than ``sensitivity`` deviations above the mean
    cut spans and stay, the most surprising first, as long as there is room for them
    and for the spans shorter than ``least_span`` that they cut off, which stay whole.
    Room that is left goes to the next most surprising tokens, which cut nothing.

    Differs from the paper: it has no room to fit, so neither a last cut nor
    tokens that stay without being a boundary.

    Args:
        surprisal: float32 [tokens], in nats; of the first token anything.
        fixed: bool [tokens], tokens that stay and cut nothing, whatever their
            surprisal: sinks, the window.
        room: how many others stay; all if there are no more.
        sensitivity: alpha.
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

    The longest part is as short as can be. Nothing is in the paper: there, a span is
    as long as surprise leaves it, though no room may hold it.

    Args:
        least_span: no part is shorter.
        most_spans: how many there may be; where there are more already, nothing
            is cut.

    Cost: as ``segment``.
    """
    sizes = segments.sizes

    def parts(longest: int) -> torch.Tensor:
        return (-(-sizes // longest)).minimum((sizes // least_span).clamp(min=1))

    limits = range(1, int(sizes.max()) if sizes.numel() else 1)
    # the more a part may hold, the fewer there are
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
    """int64 [a], ascending: as many of the most surprising tokens as fit."""
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
    """How many of ``chosen``, first ones first, can be anchors.

    Each takes a place, and so do all tokens between two walls (anchors among them)
    that are fewer than ``least_span``. That sum never falls when an anchor is added;
    the number of spans may.
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
    """bool [tokens]: tokens of runs of fewer than ``least_span`` that do not stay."""
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
    """float32 [n]: of what a token's span is worth; of nothing, equal ones."""
    total = torch.zeros(sizes.numel()).index_add_(0, span, worth)
    even = 1 / sizes.float()
    return torch.where(total[span] > 0, worth / total[span], even[span])
