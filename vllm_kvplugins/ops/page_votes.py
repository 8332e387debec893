"""Attention that some queries pay to each slot of a request, read from its pages.

Policies score slots by it. The compiled version needs neither a dense copy of the keys
nor a matrix of weights. Compiled if built, in torch otherwise; ``KVP_OPS`` overrides
this (``extension.py``). Checks on CUDA work as ``dispatch.py`` describes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.ops import checks, torch_ops
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import check_forced, compiled_for
from vllm_kvplugins.ops.layout import PagedKV

_OP = "page_votes"
# In torch, largest number of weights held at a time: 128 MiB.
_MAX_WEIGHTS = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class VoteSlots:
    """The slots of a request in one layer, which votes are for.

    Args:
        page_table: int64 [kv_heads, pages], the request's pages.
        positions: int64 [kv_heads, slots], positions of the first slots of these
            pages; -1 where there is no token.
    """

    page_table: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class VoteQueries:
    """The queries that vote.

    Args:
        queries: [q_heads, num_queries, head_dim] of the heap's dtype, after RoPE; the
            query heads of a KV head follow each other.
        positions: int64 [num_queries].
        own_keys: [kv_heads, num_queries, head_dim], keys of the queries' own tokens if
            no page holds them; they take part in the softmax but get no votes.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    own_keys: torch.Tensor | None = None


def page_votes(
    kv: PagedKV,
    slots: VoteSlots,
    queries: VoteQueries,
    scale: float,
    largest: bool = False,
) -> torch.Tensor:
    """Sum, or maximum, over queries of the attention weight of each slot.

    The sum over the window's queries, divided by their number, gives the window votes
    of ``scoring`` (equation 4 of the ProtoKV paper). With the queries and keys of a
    probe, the mean over a group gives the attention mass and the maximum over queries
    and group the attention peak (equation 3 of the EpiCache paper).

    The mask is causal by position; slots may lie in any order. A query that sees no
    slot has no weights.

    Args:
        kv: the heap.
        slots: the request's slots.
        queries: the queries, with their positions.
        scale: softmax scale.
        largest: the largest weight instead of the sum.

    Returns:
        float32 [kv_heads, group, slots].

    Raises:
        ValueError: a shape, dtype, device or page does not fit.

    Cost: reads the keys twice per query head; ``4 * q_heads * num_queries * slots *
        head_dim`` operations. The compiled version adds float32 in one order for any
        number of threads and needs one tile of slots per thread as scratch (on CUDA
        three launches, and two numbers per query and 1024 slots). The torch version
        needs a dense copy of the keys and up to 128 MiB of weights.
    """
    heap, layout = kv.pages, kv.layout
    compiled = compiled_for(heap.device)[0]
    forced = check_forced(heap.device)
    if not compiled or forced:
        _check(kv, slots, queries)
        if heap.device.type == "cpu" or forced:
            used = -(-slots.positions.shape[1] // layout.block_size)
            listed = slots.page_table[:, :used]
            checks.check_range(_OP, "page_table", listed, "page", len(heap))
    if not compiled:
        return _in_torch(kv, slots, queries, scale, largest)
    own_keys, keys = queries.own_keys, layout.keys
    return call_compiled(
        _OP,
        heap,
        slots.page_table.contiguous(),
        slots.positions.contiguous(),
        queries.queries.contiguous(),
        queries.positions.contiguous(),
        None if own_keys is None else own_keys.contiguous(),
        keys.offsets,
        layout.block_size,
        scale,
        largest,
        *((keys.base, keys.row_stride) if keys.row_stride else ()),
    )


def _in_torch(
    kv: PagedKV, slots: VoteSlots, queries: VoteQueries, scale: float, largest: bool
) -> torch.Tensor:
    """Products have the heap's dtype, everything else is float32."""
    positions, num_slots = slots.positions, slots.positions.shape[1]
    used = -(-num_slots // kv.layout.block_size)
    keys = torch_ops.gather_plane(kv, kv.layout.keys, slots.page_table[:, :used])
    keys = keys[:, :num_slots]
    if queries.own_keys is not None:
        keys = torch.cat([keys, queries.own_keys], 1)
        own = queries.positions.expand(len(keys), -1)
        positions = torch.cat([positions, own], 1)
    grouped = queries.queries.unflatten(0, (len(keys), -1))
    votes = keys.new_zeros(*grouped.shape[:2], num_slots, dtype=torch.float32)
    q_heads, num_queries, _ = queries.queries.shape
    step = max(_MAX_WEIGHTS // max(q_heads * positions.shape[1], 1), 1)
    for first in range(0, num_queries, step):
        part = grouped[:, :, first : first + step]
        logits = torch.bmm(part.flatten(1, 2), keys.transpose(1, 2)).float() * scale
        at = queries.positions[first : first + step, None]
        hidden = (positions[:, None] > at) | (positions[:, None] < 0)
        logits = logits.view(*part.shape[:3], -1)
        logits.masked_fill_(hidden[:, None], -torch.inf)
        weights = logits.softmax(-1)[..., :num_slots]
        weights = weights.masked_fill(hidden.all(-1)[:, None, :, None], 0)
        if largest:
            torch.maximum(votes, weights.amax(2), out=votes)
        else:
            votes += weights.sum(2)
    return votes


def _check(kv: PagedKV, slots: VoteSlots, queries: VoteQueries) -> None:
    """The checks of csrc/vote_check.hpp, with the same messages in the same order."""
    checks.check_heap(_OP, kv)
    heap, layout = kv.pages, kv.layout
    if layout.head_dim > checks.MAX_HEAD_DIM:
        limit = checks.MAX_HEAD_DIM
        checks.fail(_OP, f"head_dim must be at most {limit}, got {layout.head_dim}")
    checks.check_indices(_OP, "page_table", slots.page_table, heap, dim=2)
    checks.check_indices(_OP, "positions", slots.positions, heap, dim=2)
    kv_heads, pages = slots.page_table.shape
    room = pages * layout.block_size
    if len(slots.positions) != kv_heads or slots.positions.shape[1] > room:
        checks.fail(
            _OP,
            f"positions must be of at most {room} slots of {kv_heads} KV heads, got "
            f"shape {list(slots.positions.shape)}",
        )
    _check_rows("queries", queries.queries, kv)
    num_queries = queries.queries.shape[1]
    if kv_heads == 0 or len(queries.queries) % kv_heads:
        checks.fail(
            _OP,
            f"queries must be of a multiple of {kv_heads} KV heads, got shape "
            f"{list(queries.queries.shape)}",
        )
    checks.check_indices(_OP, "query_positions", queries.positions, heap)
    checks.check_size(_OP, "query_positions", queries.positions, num_queries)
    own_keys = queries.own_keys
    if own_keys is None:
        return
    _check_rows("own_keys", own_keys, kv, kv_heads)
    if own_keys.shape[1] != num_queries:
        checks.fail(
            _OP,
            f"own_keys must have {num_queries} rows per head, got shape "
            f"{list(own_keys.shape)}",
        )


def _check_rows(
    name: str, rows: torch.Tensor, kv: PagedKV, heads: int | None = None
) -> None:
    checks.check_device(_OP, name, rows, kv.pages, "the heap")
    checks.check_dim(_OP, name, rows, 3)
    checks.check_dtype(_OP, name, rows, kv.pages.dtype)
    head_dim = kv.layout.head_dim
    if rows.shape[2] != head_dim or (heads is not None and len(rows) != heads):
        checks.fail(
            _OP,
            f"{name} must have head_dim {head_dim} and a row per head, got shape "
            f"{list(rows.shape)}",
        )
