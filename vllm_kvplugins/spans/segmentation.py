"""Divides a prompt into spans and anchors by surprisal, within a budget.

Capital letters are resident tokens; the other tokens move to host memory::

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
        span: int64 [n], index of the span of each of these tokens, ascending.
        sizes: int64 [spans], tokens per span.
        weights: float32 [n], share of each token in the surprisal of its span
            (equation 2); the sum over a span is 1.
        anchors: int64 [a], positions of the anchors, ascending.
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
    min_span: int,
    max_spans: int,
) -> Segments:
    """Divide a prompt (SeKV, section 3.1, equations 1 and 2).

    Tokens whose surprisal is more than ``sensitivity`` standard deviations above the
    mean become anchors, the most surprising first. Runs shorter than ``min_span``
    between anchors stay resident too. When anchors and short runs fill the room, no
    more anchors are added. The remaining room goes to the next most surprising tokens,
    which are not anchors.

    Differs from the paper, where room is unlimited: it adds all anchors, and only
    anchors and short runs stay resident.

    Args:
        surprisal: float32 [tokens], in nats; the value of the first token is ignored.
        fixed: bool [tokens], sinks and window: tokens that always stay and are not
            anchors.
        room: number of other tokens that stay.
        sensitivity: alpha of the paper.
        min_span: L_min, in tokens.
        max_spans: largest number of spans, at least 1.

    Raises:
        ValueError: a surprisal is not finite.

    Cost: O(tokens log tokens); about a millisecond for 4K tokens.
    """
    if not bool(torch.isfinite(surprisal).all()):
        raise ValueError("surprisal contains NaN or infinity")
    free = (~fixed).nonzero().squeeze(1)
    room = min(room, free.numel())
    anchors = _anchors(surprisal, fixed, room, sensitivity, min_span, max_spans)
    resident = fixed.clone()
    resident[anchors] = True
    short = _short_runs(resident, min_span)
    if int(short.sum()) <= room - anchors.numel():
        resident |= short
    room_left = room - int(resident.sum() - fixed.sum())
    by_surprisal = free[surprisal[free].argsort(descending=True, stable=True)]
    resident[by_surprisal[~resident[by_surprisal]][:room_left]] = True
    return _segments(surprisal, resident, anchors)


def cut_evenly(segments: Segments, min_span: int, max_spans: int) -> Segments:
    """Cut the longest spans into equal parts, so that a zoomed span fits its room.

    Makes the longest part as short as possible. Not in the paper, where the distance of
    anchors alone determines the length of spans.

    Args:
        min_span: smallest length of a part, in tokens.
        max_spans: largest number of spans; if there are more already, nothing is cut.

    Cost: see ``segment``.
    """
    sizes = segments.sizes

    def parts(longest: int) -> torch.Tensor:
        """Number of parts of each span for a length of the longest part."""
        return (-(-sizes // longest)).minimum((sizes // min_span).clamp(min=1))

    # Longer parts mean fewer parts: find the smallest length by bisection.
    lengths = range(1, int(sizes.max()) if sizes.numel() else 1)
    index = bisect_left(
        lengths, -max_spans, key=lambda length: -int(parts(length).sum())
    )
    counts = parts(index + 1)
    old_span = torch.arange(sizes.numel()).repeat_interleave(counts)
    number = torch.arange(old_span.numel()) - (counts.cumsum(0) - counts)[old_span]
    size, count = sizes[old_span], counts[old_span]
    new_sizes = (number + 1) * size // count - number * size // count
    span = torch.arange(new_sizes.numel()).repeat_interleave(new_sizes)
    weights = _shares(segments.weights, span, new_sizes)
    return replace(segments, span=span, sizes=new_sizes, weights=weights)


def _anchors(
    surprisal: torch.Tensor,
    fixed: torch.Tensor,
    room: int,
    sensitivity: float,
    min_span: int,
    max_spans: int,
) -> torch.Tensor:
    """Positions of the most surprising tokens that fit: int64 [a], ascending."""
    measured = surprisal[1:] if surprisal.numel() > 1 else surprisal
    threshold = measured.mean() + sensitivity * measured.std(correction=0)
    surprising = ((surprisal > threshold) & ~fixed).nonzero().squeeze(1)
    order = surprisal[surprising].argsort(descending=True, stable=True)
    candidates = surprising[order].tolist()
    fixed_positions = fixed.nonzero().squeeze(1).tolist()
    count = _num_anchors(
        [-1, *fixed_positions, fixed.numel()], candidates, room, min_span, max_spans
    )
    return torch.tensor(sorted(candidates[:count]), dtype=torch.int64)


def _num_anchors(
    bounds: list[int], candidates: list[int], room: int, min_span: int, max_spans: int
) -> int:
    """How many of the candidates, in their order, can be anchors.

    An anchor takes the room of one token. A gap between two bounds that is shorter than
    ``min_span`` takes the room of its tokens. A new anchor never frees room, but it can
    reduce the number of spans.

    Args:
        bounds: ascending positions of fixed tokens and of both ends; anchors are added.
    """

    def room_of(gap: int) -> int:
        return gap if gap < min_span else 0

    gaps = [right - left - 1 for left, right in itertools.pairwise(bounds)]
    used = sum(map(room_of, gaps))
    spans = sum(gap >= min_span for gap in gaps)
    num_anchors = 0
    for count, position in enumerate(candidates, 1):
        index = bisect_left(bounds, position)
        left, right = position - bounds[index - 1] - 1, bounds[index] - position - 1
        whole = left + right + 1
        used += 1 + room_of(left) + room_of(right) - room_of(whole)
        spans += (left >= min_span) + (right >= min_span) - (whole >= min_span)
        if used > room:
            break
        if spans <= max_spans:
            num_anchors = count
        insort(bounds, position)
    return num_anchors


def _short_runs(resident: torch.Tensor, min_span: int) -> torch.Tensor:
    """Tokens of non-resident runs shorter than ``min_span``: bool [tokens]."""
    run = resident.long().cumsum(0)  # equal for all tokens of a run
    length = torch.bincount(run[~resident], minlength=int(run.max()) + 1)
    return ~resident & (length[run] < min_span)


def _segments(
    surprisal: torch.Tensor, resident: torch.Tensor, anchors: torch.Tensor
) -> Segments:
    positions = (~resident).nonzero().squeeze(1)
    anchors_before = torch.searchsorted(anchors, positions)
    _, span, sizes = anchors_before.unique_consecutive(
        return_inverse=True, return_counts=True
    )
    weights = _shares(surprisal[positions].clamp(min=0), span, sizes)
    return Segments(resident, positions, span, sizes, weights, anchors)


def _shares(
    weights: torch.Tensor, span: torch.Tensor, sizes: torch.Tensor
) -> torch.Tensor:
    """Share of each token in its span: float32 [n]; equal shares if the sum is 0."""
    total = torch.zeros(sizes.numel()).index_add_(0, span, weights)
    equal = 1 / sizes.float()
    return torch.where(total[span] > 0, weights / total[span], equal[span])
