"""The zoom of a step: choose the spans that queries see token by token.

Compiled if built, in torch otherwise; ``KVP_OPS`` overrides this (``extension.py``).
Spans are chosen on the CPU; keys and values can be on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.ops import checks
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.svd import LowRank, reconstruct

_OP = "zoom_spans"


@dataclass(frozen=True, slots=True, eq=False)
class ZoomEntries:
    """Means of spans and zoomed tokens of many requests, for one layer.

    Args:
        keys, values: float32 or bfloat16 [capacity, head_dim], on any device.
        bias: float32 [capacity], on the CPU; added to the score of an entry. For a
            mean: log of the span's length, or -inf while the span is zoomed. For a
            token: 0, or -inf if the entry is free.
        owner: int64 [capacity], on the CPU; the span of each token, -1 = free.
            Undefined for means.
        bias_there: a copy of the bias on the device of the keys, if that differs.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    owner: torch.Tensor
    bias_there: torch.Tensor | None = None

    @property
    def attended_bias(self) -> torch.Tensor:
        """The bias on the device of the keys."""
        return self.bias if self.bias_there is None else self.bias_there


@dataclass(frozen=True, slots=True, eq=False)
class ZoomRegions:
    """The places of some requests' entries, and their spans.

    Args:
        table: int64 [requests, 3]: first entry, number of spans, and room for tokens.
            Each KV head has a run of ``spans + room`` entries, head after head.
        num_kv_heads: number of KV heads, the same for every request.
        sizes: int64 [spans of all requests], tokens per span; positive.
        log_sizes: float32, the logarithms of ``sizes``.
    """

    table: torch.Tensor
    num_kv_heads: int
    sizes: torch.Tensor
    log_sizes: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """int64, the numbers of all entries of the requests, in order."""
        lengths = self.num_kv_heads * self.table[:, 1:].sum(1)
        before = self.table[:, 0] - (lengths.cumsum(0) - lengths)
        return torch.arange(int(lengths.sum())) + before.repeat_interleave(lengths)

    @property
    def starts(self) -> torch.Tensor:
        """int64 [requests * num_kv_heads], first entry of each KV head."""
        head = torch.arange(self.num_kv_heads)
        return (self.table[:, :1] + head * self.table[:, 1:].sum(1, True)).flatten()

    @property
    def counts(self) -> torch.Tensor:
        """int64 [requests * num_kv_heads], entries of each KV head."""
        return self.table[:, 1:].sum(1).repeat_interleave(self.num_kv_heads)


def zoom_spans(
    entries: ZoomEntries,
    regions: ZoomRegions,
    gates: torch.Tensor,
    factors: Sequence[LowRank],
) -> tuple[int, int]:
    """Zoom into the best spans that fit, and out of all others.

    SeKV, section 3.3, see :func:`within_room`. Tokens of spans that were zoomed before
    keep their entries. Tokens of new spans are reconstructed from their factors
    (:func:`~vllm_kvplugins.ops.svd.reconstruct`) into the first free entries.

    Args:
        entries: written in place, within the regions.
        regions: must not overlap.
        gates: float32, [num_kv_heads, spans] of one request after the other, flat.
        factors: per request, of all spans' keys, KV head by KV head, and then of all
            values; read only if a span is new.

    Returns:
        The number of tokens reconstructed and the number of zoomed tokens, over all KV
        heads.

    Raises:
        ValueError: a shape, dtype, region, size or owner does not fit, or needed
            factors are invalid. The entries are then unchanged.

    Results do not depend on the number of threads.

    Cost: reads every gate, bias and owner once, ``O(log spans)`` per zoomed span, and
        ``reconstruct`` for new spans. In torch, about 40 calls per request.
    """
    if entries.keys.device.type != "cpu":
        checks.fail(
            _OP,
            f"keys must be on the CPU, got {entries.keys.device}; use "
            "ops.zoom_transfer.fetch_spans",
        )
    if compiled_for(entries.keys.device)[0]:
        reconstructed, zoomed = call_compiled(
            _OP,
            entries.keys,
            entries.values,
            entries.bias,
            entries.owner,
            regions.table,
            regions.num_kv_heads,
            gates,
            regions.sizes,
            regions.log_sizes,
            [each.factors for each in factors],
            [each.offsets for each in factors],
            [each.ranks for each in factors],
            [each.tokens for each in factors],
        )
        return reconstructed, zoomed
    _check(entries, regions, gates, factors)
    return _in_torch(entries, regions, gates, factors)


def within_room(gates: torch.Tensor, sizes: torch.Tensor, room: int) -> torch.Tensor:
    """The best spans that fit together, which queries see token by token.

    Spans are taken in decreasing order of gates (SeKV, section 3.3) until one does not
    fit into the remaining room. Spans larger than the whole room are skipped. Ties go
    to the lower number.

    Args:
        gates: float32 [num_kv_heads, spans]; ``-inf`` or NaN = never.
        sizes: int64 [spans], tokens.
        room: tokens per KV head.

    Returns:
        bool [num_kv_heads, spans].
    """
    gates = gates.masked_fill((sizes > room) | gates.isnan(), -torch.inf)
    order = gates.argsort(dim=1, descending=True, stable=True)
    fits = sizes[order].cumsum(1) <= room
    fits &= gates.gather(1, order) > -torch.inf
    return torch.zeros_like(fits).scatter_(1, order, fits)


def choose_spans(
    bias: torch.Tensor, owner: torch.Tensor, regions: ZoomRegions, gates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """:func:`zoom_spans` without keys and values, which the caller reconstructs.

    Args:
        bias, owner: of :class:`ZoomEntries`, on the CPU; written.
        regions, gates: see :func:`zoom_spans`.

    Returns:
        int64 [2, n]: request and number of each new span, KV head by KV head; int64
        [tokens]: the entries of their tokens, span by span; and the number of zoomed
        tokens over all KV heads.

    Raises:
        ValueError: see :func:`zoom_spans`.
    """
    if compiled_for(bias.device)[0]:
        new_spans, slots, zoomed = call_compiled(
            "choose_spans",
            bias,
            owner,
            regions.table,
            regions.num_kv_heads,
            gates,
            regions.sizes,
            regions.log_sizes,
        )
        return new_spans, slots, zoomed
    changes = _changes(bias, owner, regions, gates)
    empty = torch.empty(0, dtype=torch.int64)
    spans, requests, slots = [empty], [empty], [empty]
    for request, change in enumerate(changes):
        spans.append(change.new_spans)
        requests.append(torch.full_like(change.new_spans, request))
        slots.append(change.first + change.apply())
    new_spans = torch.stack([torch.cat(requests), torch.cat(spans)])
    return new_spans, torch.cat(slots), sum(change.zoomed for change in changes)


@dataclass(slots=True, eq=False)
class _Change:
    """The change of one request's entries; tensors are views [num_kv_heads, ...].

    Attributes:
        first: the request's first entry.
        bias, owner: views of the entries, written by :meth:`apply`.
        sizes, log_sizes: [spans].
        chosen, is_new: bool [num_kv_heads, spans]; a new span was not zoomed before.
    """

    first: int
    bias: torch.Tensor
    owner: torch.Tensor
    sizes: torch.Tensor
    log_sizes: torch.Tensor
    chosen: torch.Tensor
    is_new: torch.Tensor

    @property
    def new_spans(self) -> torch.Tensor:
        """int64, numbers of new spans, KV head by KV head."""
        return self.is_new.flatten().nonzero()[:, 0]

    @property
    def zoomed(self) -> int:
        """Tokens of all chosen spans, over all KV heads."""
        return int((self.chosen * self.sizes).sum())

    def apply(self) -> torch.Tensor:
        """Write bias and owner; returns the entries of new tokens, from first on."""
        count = self.chosen.shape[1]
        owner, bias = self.owner[:, count:], self.bias[:, count:]
        stale = (owner >= 0) & ~_is_chosen(self.chosen, owner)
        owner[stale], bias[stale] = -1, -torch.inf
        self.bias[:, :count] = self.log_sizes.where(~self.chosen, -torch.inf)
        span = self.is_new.nonzero(as_tuple=True)[1]
        free = owner < 0
        tokens = (self.is_new * self.sizes).sum(1, keepdim=True)
        row, slot = (free & (free.cumsum(1) <= tokens)).nonzero(as_tuple=True)
        owner[row, slot] = span.repeat_interleave(self.sizes[span])
        bias[row, slot] = 0.0
        return row * self.bias.shape[1] + count + slot


def _changes(
    bias: torch.Tensor, owner: torch.Tensor, regions: ZoomRegions, gates: torch.Tensor
) -> list[_Change]:
    """The change of each request; writes nothing."""
    heads, changes = regions.num_kv_heads, []
    counts = regions.table[:, 1].tolist()
    own_gates = gates.split([heads * count for count in counts])
    sizes, log_sizes = regions.sizes.split(counts), regions.log_sizes.split(counts)
    for i, (first, count, room) in enumerate(regions.table.tolist()):
        own = slice(first, first + heads * (count + room))
        shape = heads, count + room
        own_bias, own_owner = bias[own].view(shape), owner[own].view(shape)
        chosen = within_room(own_gates[i].view(heads, count), sizes[i], room)
        is_new = chosen & (own_bias[:, :count] > -torch.inf)
        _check_room(i, chosen, is_new, own_owner[:, count:], sizes[i])
        own_sizes = sizes[i], log_sizes[i]
        changes.append(_Change(first, own_bias, own_owner, *own_sizes, chosen, is_new))
    return changes


def _in_torch(
    entries: ZoomEntries,
    regions: ZoomRegions,
    gates: torch.Tensor,
    factors: Sequence[LowRank],
) -> tuple[int, int]:
    """Choose and reconstruct everything before anything is written."""
    heads, reconstructed = regions.num_kv_heads, []
    changes = _changes(entries.bias, entries.owner, regions, gates)
    for i, (change, own) in enumerate(zip(changes, factors, strict=True)):
        spans = change.new_spans
        if not len(spans):
            continue
        _check_factors(i, own, spans, change.sizes.repeat(2 * heads))
        planes = (0, entries.keys), (change.is_new.numel(), entries.values)
        for first_matrix, plane in planes:
            rows = reconstruct(own, spans + first_matrix, plane.dtype)
            reconstructed.append((i, plane, rows))
    slots = [change.first + change.apply() for change in changes]
    for i, plane, rows in reconstructed:
        plane[slots[i]] = rows
    return sum(map(len, slots)), sum(change.zoomed for change in changes)


def _is_chosen(chosen: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Whether each entry belongs to a chosen span."""
    return torch.nn.functional.pad(chosen, (1, 0)).gather(1, owner + 1)


def _check_room(
    request: int,
    chosen: torch.Tensor,
    is_new: torch.Tensor,
    owner: torch.Tensor,
    sizes: torch.Tensor,
) -> None:
    free = owner.shape[1] - _is_chosen(chosen, owner).sum(1)
    free -= (is_new * sizes).sum(1)
    if (free < 0).any():
        head = int((free < 0).nonzero()[0])
        checks.fail(
            _OP,
            f"owner: request {request}, head {head} has more tokens than its bias says",
        )


def _check_factors(
    request: int, factors: LowRank, which: torch.Tensor, tokens: torch.Tensor
) -> None:
    if len(factors) != len(tokens):
        checks.fail(
            _OP,
            f"factors[{request}] must be of {len(tokens)} matrices, got {len(factors)}",
        )
    which = torch.cat([which, which + len(tokens) // 2])
    wrong = which[factors.tokens[which] != tokens[which]]
    if len(wrong):
        at = int(wrong.min())
        checks.fail(
            _OP,
            f"factors[{request}]: matrix {at} must have {int(tokens[at])} tokens, got "
            f"{int(factors.tokens[at])}",
        )


def _check(
    entries: ZoomEntries,
    regions: ZoomRegions,
    gates: torch.Tensor,
    factors: Sequence[LowRank],
) -> None:
    """The checks of csrc/zoom.cpp."""
    keys, table = entries.keys, regions.table
    checks.check_dim(_OP, "keys", keys, 2)
    if table.dim() != 2 or table.shape[1] != 3:
        checks.fail(_OP, f"regions must have 3 columns, got shape {list(table.shape)}")
    if regions.num_kv_heads < 1:
        checks.fail(_OP, f"heads must be positive, got {regions.num_kv_heads}")
    checks.check_dtype(_OP, "regions", table, torch.int64)
    _check_regions(len(keys), regions)
    checks.check_dtype(_OP, "keys", keys, *checks.FACTOR_DTYPES)
    checks.check_dtype(_OP, "values", entries.values, keys.dtype)
    checks.check_shape(_OP, "values", entries.values, tuple(keys.shape))
    checks.check_vector(_OP, "bias", entries.bias, len(keys), torch.float32)
    checks.check_vector(_OP, "owner", entries.owner, len(keys))
    spans = int(table[:, 1].sum())
    checks.check_vector(
        _OP, "gates", gates, regions.num_kv_heads * spans, torch.float32
    )
    checks.check_vector(_OP, "sizes", regions.sizes, spans)
    checks.check_vector(_OP, "log_sizes", regions.log_sizes, spans, torch.float32)
    if len(factors) != len(table):
        checks.fail(
            _OP, f"factors must be of {len(table)} requests, got {len(factors)}"
        )
    if (regions.sizes < 1).any():
        i = int((regions.sizes < 1).nonzero()[0])
        checks.fail(_OP, f"sizes[{i}] must be positive, got {int(regions.sizes[i])}")
    _check_owners(entries, regions)


def _check_regions(capacity: int, regions: ZoomRegions) -> None:
    heads, runs = regions.num_kv_heads, []
    for i, (first, count, room) in enumerate(regions.table.tolist()):
        stop = first + heads * (count + room)
        if min(first, count, room) < 0 or stop > capacity:
            checks.fail(
                _OP,
                f"regions[{i}] is {heads} x ({count} + {room}) entries from {first}, "
                f"but there are {capacity}",
            )
        runs.append((first, stop))
    for before, after in itertools.pairwise(sorted(runs)):
        if after[0] < before[1]:
            checks.fail(_OP, f"regions overlap at entry {after[0]}")


def _check_owners(entries: ZoomEntries, regions: ZoomRegions) -> None:
    heads = regions.num_kv_heads
    for first, count, room in regions.table.tolist():
        stop = first + heads * (count + room)
        owner = entries.owner[first:stop].view(heads, count + room)[:, count:]
        wrong = ((owner < -1) | (owner >= count)).nonzero()
        if len(wrong):
            head, slot = wrong[0].tolist()
            at = first + head * (count + room) + count + slot
            checks.fail(
                _OP,
                f"owner[{at}] is span {int(entries.owner[at])}, but there are 0 to "
                f"{count - 1}",
            )
