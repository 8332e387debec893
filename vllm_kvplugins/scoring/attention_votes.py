"""Scores from attention: votes of queries, their pooling, and masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F

from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

# Largest number of attention weights in memory: 2**22 float32 are 16 MiB, which a CPU
# partly keeps in its cache. GPUs want fewer, larger operations: 128 MiB.
_MAX_WEIGHTS = {"cpu": 1 << 22}
_MAX_WEIGHTS_ON_GPU = 1 << 25
# Fewest queries of a part: each part reads all keys.
_LEAST_QUERIES = 16
# Largest number of entries of a tile of slots.
_MAX_TILE = 1 << 22


def window_votes(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    valid: torch.Tensor | None = None,
    rules: LogitRules = PLAIN,
) -> torch.Tensor:
    """Mean attention of the newest queries to each earlier slot.

    Equation 4 of the ProtoKV paper, divided by the number of queries. The softmax is
    over all slots, causal inside the window. The result contains only the slots before
    the window.

    Args:
        queries: [num_q_heads, window, head_dim], after RoPE, newest last; those of the
            last ``window`` slots.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE.
        scale: softmax scale.
        valid: bool [num_kv_heads, num_slots], slots that hold a token; None: all.
        rules: of the layer.

    Returns:
        float32 [num_kv_heads, group, num_slots - window]; 0 at invalid slots.

    Raises:
        ValueError: the window is not smaller than the number of slots.

    Cost: O(num_q_heads * window * num_slots * head_dim); memory for the weights of one
        KV head.
    """
    num_q_heads, window, head_dim = queries.shape
    num_kv_heads, num_slots, _ = keys.shape
    if window >= num_slots:
        raise ValueError(f"window {window} must be smaller than {num_slots} slots")
    group = num_q_heads // num_kv_heads
    rows = group * window
    grouped = queries.reshape(num_kv_heads, rows, head_dim)
    # Query i of the window is at slot num_slots - window + i.
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu_(
        diagonal=1
    )
    votes = keys.new_empty(num_kv_heads, group, num_slots - window, dtype=torch.float32)
    # A matrix product instead of a mean, because it reads weights in memory order.
    share = votes.new_full((group, 1, window), 1 / window)
    # All KV heads reuse this memory. New memory of this size causes a page fault per
    # 4 KiB, which takes longer than the arithmetic.
    products = keys.new_empty(rows, num_slots)
    weights = votes.new_empty(group, window, num_slots)
    for head in range(num_kv_heads):
        torch.mm(grouped[head], keys[head].T, out=products)
        weights.view(rows, num_slots).copy_(products).mul_(scale)
        rules.cap(weights)
        weights[..., num_slots - window :].masked_fill_(future, -torch.inf)
        if valid is not None:
            weights.masked_fill_(~valid[head], -torch.inf)
        rules.softmax(weights, slice(head * group, (head + 1) * group))
        votes[head] = torch.bmm(share, weights)[:, 0, : num_slots - window]
    return votes


def attention_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    query_positions: torch.Tensor,
    positions: torch.Tensor,
    rules: LogitRules = PLAIN,
) -> torch.Tensor:
    """Attention to each slot, summed over queries.

    Causal by position, so slots can have any order. Arguments and cost: see
    ``_attention``.

    Returns:
        float32 [num_kv_heads, num_slots], mean over the query heads that share a KV
        head; 0 where there is no token.
    """
    mass = torch.zeros(positions.shape, device=keys.device)
    at = query_positions, positions
    for weights in _attention(queries, keys, scale, *at, rules):
        mass[:, : weights.shape[-1]] += weights.sum(2).mean(1)
    return mass


def attention_peak(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    query_positions: torch.Tensor,
    positions: torch.Tensor,
    rules: LogitRules = PLAIN,
) -> torch.Tensor:
    """Largest attention of any query to each slot.

    Equation 3 (max) of the EpiCache paper, with the maximum over the query heads that
    share a KV head (appendix A.2). Causal by position, so slots can have any order.
    Arguments and cost: see ``_attention``.

    Returns:
        float32 [num_kv_heads, num_slots]; 0 where there is no token.
    """
    peak = torch.zeros(positions.shape, device=keys.device)
    at = query_positions, positions
    for weights in _attention(queries, keys, scale, *at, rules):
        seen = peak[:, : weights.shape[-1]]
        torch.maximum(seen, weights.flatten(1, 2).amax(1), out=seen)
    return peak


def _attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    scale: float,
    query_positions: torch.Tensor,
    positions: torch.Tensor,
    rules: LogitRules,
) -> Iterator[torch.Tensor]:
    """Attention weights, for a few queries at a time.

    Args:
        queries: [num_q_heads, num_queries, head_dim], after RoPE.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE.
        scale: softmax scale.
        query_positions: int64 [num_queries].
        positions: int64 [num_kv_heads, num_slots], -1 where there is no token.
        rules: of the layer.

    Yields:
        float32 [num_kv_heads, group, queries of this part, seen slots]; 0 where there
        is no token. No query of the part sees a slot after these.

    Cost: O(num_q_heads * num_queries * num_slots * head_dim), as for attention itself;
        weights of 16 queries, or up to 16 MiB (128 MiB on a GPU). Waits for the device
        once if there are several parts.
    """
    num_q_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_slots, _ = keys.shape
    group = num_q_heads // num_kv_heads
    grouped = queries.reshape(num_kv_heads, group, num_queries, head_dim)
    most = _MAX_WEIGHTS.get(keys.device.type, _MAX_WEIGHTS_ON_GPU)
    step = most // (num_q_heads * num_slots)
    keys_t = keys.transpose(1, 2)
    for part, slots in query_parts(query_positions, positions, step):
        rows = grouped[:, :, part].flatten(1, 2)
        logits = torch.bmm(rows, keys_t[..., :slots]).float().mul_(scale)
        logits = rules.cap(logits).view(num_kv_heads, group, -1, slots)
        at = positions[:, None, :slots]
        masked = (at > query_positions[part, None]) | (at < 0)
        yield rules.softmax(logits.masked_fill_(masked[:, None], -torch.inf))


def query_parts(
    query_positions: torch.Tensor, positions: torch.Tensor, size: int
) -> list[tuple[slice, int]]:
    """Divide queries into parts, and find the slots that each part sees.

    Args:
        query_positions: int64 [num_queries], at least one.
        positions: int64 [num_kv_heads, num_slots], -1 where there is no token.
        size: queries per part; at least 16 are taken.

    Returns:
        For each part its queries, and the number of slots up to the last one that any
        of them sees, at least 1.

    Cost: O(num_kv_heads * num_slots). Waits for the device if there are several parts.
    """
    size = max(size, _LEAST_QUERIES)
    num_queries, num_slots = len(query_positions), positions.shape[1]
    parts = [slice(at, at + size) for at in range(0, num_queries, size)]
    if len(parts) == 1:
        return [(parts[0], num_slots)]
    never = torch.iinfo(positions.dtype).max
    first_seen = positions.masked_fill(positions < 0, never).amin(0)
    # Position from which on a query sees this slot or a later one; ascending.
    from_here_on = first_seen.flip(0).cummin(0).values.flip(0)
    newest = torch.stack([query_positions[part].amax() for part in parts])
    counts = torch.searchsorted(from_here_on, newest, right=True).clamp(min=1)
    return list(zip(parts, counts.tolist(), strict=True))


def pool_votes(
    votes: torch.Tensor, kernel_size: int, pooling: Literal["avg", "max"]
) -> torch.Tensor:
    """Pool votes over neighbouring slots.

    Equation 5 of the ProtoKV paper (``max``). SnapKV's code uses ``avg``, with zeros
    beyond the ends.

    Args:
        votes: float32 [..., rows, num_slots].
        kernel_size: width in slots; odd.
        pooling: mean or maximum.

    Returns:
        float32, same shape.

    Raises:
        ValueError: ``kernel_size`` is even.
    """
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd; got {kernel_size}")
    pool = F.avg_pool1d if pooling == "avg" else F.max_pool1d
    return pool(votes, kernel_size, stride=1, padding=kernel_size // 2)


def mark_window(scores: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Append the slots of the observation window, which must stay.

    Args:
        scores: float32 [num_kv_heads, num_slots - window].
        num_slots: number of slots with the window.

    Returns:
        float32 [num_kv_heads, num_slots], ``inf`` in the window.
    """
    return F.pad(scores, (0, num_slots - scores.shape[-1]), value=torch.inf)


def valid_keys(keys: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The keys, with 0 where there is no token; these slots can contain NaN.

    Args:
        keys: [num_kv_heads, num_slots, head_dim].
        valid: bool [num_kv_heads, num_slots], slots that hold a token; None: all.
    """
    return keys if valid is None else keys.masked_fill(~valid.unsqueeze(2), 0)


def drop_invalid(scores: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """The scores, with ``-inf`` where there is no token.

    Args:
        scores: float32 [num_kv_heads, num_slots].
        valid: bool, same shape, slots that hold a token; None: all.
    """
    return scores if valid is None else scores.masked_fill(~valid, -torch.inf)


def cluster_mean(
    values: torch.Tensor, clusters: torch.Tensor, num_clusters: int
) -> torch.Tensor:
    """Replace each value by the mean of its cluster.

    ProtoKV, equation 18. Adds 64-bit integers, in units of a power of two far below the
    float32 precision of the largest value. Sums therefore do not depend on the order of
    additions: equal inputs give equal outputs, also with atomic additions.

    Args:
        values: float32 [rows, n], finite.
        clusters: int64 [rows, n], each in ``[0, num_clusters)``.
        num_clusters: number of clusters per row; each row has its own.

    Returns:
        float32 [rows, n]; bitwise equal within a cluster.

    Cost: two passes over the values, and a table of ``num_clusters`` per row.
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
    """Replace each score by the mean over the KV heads' slots of the same place.

    For policies that decide once per layer. Slots are matched by place and not by
    index, because KV heads can hold different tokens.

    Args:
        scores: float32 [num_kv_heads, num_slots], finite where valid.
        places: int64, same shape; positions, or indices of chunks of positions.
            Negative exactly where there is no token.
        valid: bool, same shape, slots that hold a token; None: all.

    Returns:
        float32, same shape; equal for equal places, 0 where there is no token.
    """
    if valid is not None:
        scores = scores.masked_fill(~valid, 0)
    # Number the distinct places, so that the table has at most one entry per slot.
    distinct, clusters = torch.unique(places, return_inverse=True)
    means = cluster_mean(scores.reshape(1, -1), clusters.view(1, -1), distinct.numel())
    return means.view_as(scores)


def slot_tiles(num_slots: int, entries_per_slot: int) -> list[slice]:
    """Divide slots into tiles whose float32 copies are small.

    Args:
        num_slots: number of slots.
        entries_per_slot: numbers in memory per slot of a tile.

    Returns:
        Consecutive slices of ``[0, num_slots)``, each with at least one and at most
        ``2**22 / entries_per_slot`` slots (16 MiB of float32).
    """
    size = max(_MAX_TILE // max(entries_per_slot, 1), 1)
    starts = range(0, num_slots, size)
    return [slice(start, min(start + size, num_slots)) for start in starts]
