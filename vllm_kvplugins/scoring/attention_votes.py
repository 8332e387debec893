"""Shared maths of policies: attention votes and their pooling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F

# Attention weights are materialised for at most this many entries at a time;
# 2**25 float32 are 128 MiB.
_MAX_WEIGHTS = 1 << 25
# Work that goes over the slots once takes this many entries at a time.
_MAX_TILE = 1 << 22


def window_votes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean attention that the newest queries pay to each earlier slot.

    Equation 4 of the ProtoKV paper, divided by the number of queries. The
    softmax runs over all slots, causally inside the window; only the slots
    before the window are returned.

    Args:
        queries: [num_q_heads, window, head_dim], after RoPE, newest last; they
            belong to the last ``window`` slots.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE.
        scale: softmax scale.
        valid: bool [num_kv_heads, num_slots], slots that hold a token; None =
            all.

    Returns:
        float32 [num_kv_heads, group, num_slots - window]; 0 at invalid slots.

    Raises:
        ValueError: the window is not smaller than the number of slots.

    Cost: O(num_q_heads * window * num_slots * head_dim); weights are held for
        one KV head at a time.
    """
    num_q_heads, window, head_dim = queries.shape
    num_kv_heads, num_slots, _ = keys.shape
    if window >= num_slots:
        raise ValueError(f"window {window} must be smaller than {num_slots} slots")
    group = num_q_heads // num_kv_heads
    rows = group * window
    grouped = queries.reshape(num_kv_heads, rows, head_dim)
    # Query i of the window sits at slot num_slots - window + i.
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu_(
        diagonal=1
    )
    votes = keys.new_empty(num_kv_heads, group, num_slots - window, dtype=torch.float32)
    # A product instead of a mean: it reads the weights in their memory order.
    share = votes.new_full((group, 1, window), 1 / window)
    # One KV head at a time, in memory that is used again: fresh memory of this
    # size costs the kernel a page fault per 4 KiB, more than all the arithmetic.
    narrow = keys.new_empty(rows, num_slots)
    weights = votes.new_empty(group, window, num_slots)
    for head in range(num_kv_heads):
        torch.mm(grouped[head], keys[head].T, out=narrow)
        weights.view(rows, num_slots).copy_(narrow).mul_(scale)
        weights[..., num_slots - window :].masked_fill_(future, -torch.inf)
        if valid is not None:
            weights.masked_fill_(~valid[head], -torch.inf)
        torch.softmax(weights, dim=-1, out=weights)
        votes[head] = torch.bmm(share, weights)[:, 0, : num_slots - window]
    return votes


def attention_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    query_positions: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Attention that some queries pay to each slot, summed over the queries.

    Causal by position, so slots may be in any order. Arguments and cost: see
    ``_attention``.

    Returns:
        float32 [num_kv_heads, num_slots], mean over the queries' group; 0 where
        there is no token.
    """
    mass = torch.zeros(positions.shape, device=keys.device)
    for weights in _attention(queries, keys, scale, query_positions, positions):
        mass += weights.sum(2).mean(1)
    return mass


def attention_peak(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    query_positions: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Most attention that any of some queries pays to each slot.

    Equation 3 (max) of the EpiCache paper, the maximum also over the queries
    that share a KV head (its appendix A.2). Causal by position, so slots may be
    in any order. Arguments and cost: see ``_attention``.

    Returns:
        float32 [num_kv_heads, num_slots]; 0 where there is no token.
    """
    peak = torch.zeros(positions.shape, device=keys.device)
    for weights in _attention(queries, keys, scale, query_positions, positions):
        torch.maximum(peak, weights.flatten(1, 2).amax(1), out=peak)
    return peak


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    query_positions: torch.Tensor,
    positions: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Attention weights of a few queries at a time.

    Args:
        queries: [num_q_heads, num_queries, head_dim], after RoPE.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE.
        scale: softmax scale.
        query_positions: int64 [num_queries].
        positions: int64 [num_kv_heads, num_slots], -1 where there is no token.

    Yields:
        float32 [num_kv_heads, group, some queries, num_slots]; 0 where there is no
        token.

    Cost: O(num_q_heads * num_queries * num_slots * head_dim), as much as the
        attention itself; weights are held for as many queries at a time as fit
        128 MiB.
    """
    num_q_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_slots, _ = keys.shape
    group = num_q_heads // num_kv_heads
    grouped = queries.reshape(num_kv_heads, group, num_queries, head_dim)
    step = max(_MAX_WEIGHTS // (num_q_heads * num_slots), 1)
    keys_t = keys.transpose(1, 2)
    for first in range(0, num_queries, step):
        part = grouped[:, :, first : first + step]
        logits = torch.bmm(part.flatten(1, 2), keys_t).to(torch.float32).mul_(scale)
        logits = logits.view(num_kv_heads, group, -1, num_slots)
        at = query_positions[first : first + step, None]
        hidden = (positions[:, None] > at) | (positions[:, None] < 0)
        yield logits.masked_fill_(hidden[:, None], -torch.inf).softmax(-1)


def pool_votes(
    votes: torch.Tensor, kernel_size: int, pooling: Literal["avg", "max"]
) -> torch.Tensor:
    """Smooth votes over neighbouring slots, same length out.

    Equation 5 of the ProtoKV paper (``max``); SnapKV's code uses ``avg``, with
    zeros beyond the ends.

    Args:
        votes: float32 [..., rows, num_slots].
        kernel_size: width in slots; odd.
        pooling: which.

    Raises:
        ValueError: ``kernel_size`` is even.
    """
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")
    pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    return pool(votes, kernel_size, stride=1, padding=kernel_size // 2)


def mark_window(scores: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Append the observation window as slots that must stay.

    Args:
        scores: float32 [num_kv_heads, num_slots - window].
        num_slots: total, window included.

    Returns:
        float32 [num_kv_heads, num_slots], ``inf`` in the window.
    """
    return F.pad(scores, (0, num_slots - scores.shape[-1]), value=torch.inf)


def valid_keys(keys: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The keys, zero where there is no token (such slots may hold NaN).

    Args:
        keys: [num_kv_heads, num_slots, head_dim].
        valid: bool [num_kv_heads, num_slots], or None if all are.
    """
    return keys if valid is None else keys.masked_fill(~valid.unsqueeze(2), 0)


def drop_invalid(scores: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The scores, ``-inf`` where there is no token.

    Args:
        scores: float32 [num_kv_heads, num_slots].
        valid: bool, same shape, or None if all are.
    """
    return scores if valid is None else scores.masked_fill(~valid, -torch.inf)


def cluster_mean(
    values: torch.Tensor, clusters: torch.Tensor, num_clusters: int
) -> torch.Tensor:
    """Replace every value by the mean over its cluster.

    ProtoKV, equation 18. Sums are of 64-bit integers in units of a power of two
    far below float32 precision of the largest value, so they do not depend on
    the order of additions: the same input gives the same output with atomics too.

    Args:
        values: float32 [rows, n], finite.
        clusters: int64 [rows, n], each in ``[0, num_clusters)``.
        num_clusters: of each row; rows do not mix.

    Returns:
        float32 [rows, n]; bitwise equal within a cluster.

    Cost: two passes over the values, one ``num_clusters``-sized table per row.
    """
    num_rows, num_values = values.shape
    # |sum| < num_values * 2 ** bits <= 2 ** 62
    bits = 62 - num_values.bit_length()
    peak = values.abs().amax(dim=-1, keepdim=True).double()
    _, exponent = torch.frexp(peak)
    unit = torch.exp2(exponent.double() - bits)
    whole = (values.double() / unit).round().long()
    table = whole.new_zeros(num_rows, num_clusters)
    sums = table.scatter_add(1, clusters, whole)
    sizes = table.scatter_add(1, clusters, torch.ones_like(clusters))
    means = (sums.double() / sizes.clamp(min=1) * unit).to(torch.float32)
    return means.gather(1, clusters)


def mean_over_heads(
    scores: torch.Tensor, places: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Replace every score by the mean over all heads' slots of the same place.

    For policies that decide once per layer. Slots are matched by place, not by
    index, because KV heads may hold different tokens.

    Args:
        scores: float32 [num_kv_heads, num_slots], finite where valid.
        places: int64, same shape; positions, or numbers of chunks of positions.
            Negative where invalid, and nowhere else.
        valid: bool, same shape, or None if all are.

    Returns:
        float32, same shape; equal for equal places, 0 where invalid.
    """
    if valid is not None:
        scores = scores.masked_fill(~valid, 0)
    # Renumber the places, so that the table is as long as the slots.
    found, clusters = torch.unique(places, return_inverse=True)
    flat = cluster_mean(scores.reshape(1, -1), clusters.view(1, -1), found.numel())
    return flat.view_as(scores)


def slot_tiles(num_slots: int, entries_per_slot: int) -> list[slice]:
    """Cut the slots into runs whose float32 copies stay small.

    Args:
        num_slots: how many to cover.
        entries_per_slot: numbers held per slot while a tile is worked on.

    Returns:
        Slices that cover ``[0, num_slots)`` in order, each of at most
        ``2**22 / entries_per_slot`` slots (16 MiB of float32) but at least one.
    """
    size = max(_MAX_TILE // max(entries_per_slot, 1), 1)
    starts = range(0, num_slots, size)
    return [slice(start, min(start + size, num_slots)) for start in starts]
