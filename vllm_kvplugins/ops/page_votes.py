"""Attention that some queries pay to each slot of a request, read from its pages.

Policies score slots by it. The compiled version needs neither a dense copy of the keys
nor a matrix of weights. Compiled if built, in torch otherwise; ``KVP_OPS`` overrides
this (``extension.py``). Checks on CUDA work as ``dispatch.py`` describes.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.ops import checks, torch_ops
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import check_forced, compiled_for
from vllm_kvplugins.ops.layout import PageLayout

_OP = "page_votes"
# In torch, largest number of weights held at a time: 128 MiB.
_MAX_WEIGHTS = 1 << 25


def page_votes(
    heap: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    queries: torch.Tensor,
    query_positions: torch.Tensor,
    layout: PageLayout,
    scale: float,
    most: bool = False,
    own_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum, or maximum, over queries of the attention weight of each slot.

    The sum over the window's queries, divided by their number, gives the window votes
    of ``scoring`` (equation 4 of the ProtoKV paper). With the queries and keys of a
    probe, the mean over a group gives the attention mass and the maximum over queries
    and group the attention peak (equation 3 of the EpiCache paper).

    The mask is causal by position; slots may lie in any order. A query that sees no
    slot has no weights.

    Args:
        heap: float32, float16 or bfloat16 [num_pages, page_elems].
        page_table: int64 [kv_heads, pages], the request's pages.
        positions: int64 [kv_heads, slots], positions of the first slots of these
            pages; -1 where there is no token.
        queries: [q_heads, num_queries, head_dim] of the heap's dtype, after RoPE; the
            query heads of a KV head follow each other.
        query_positions: int64 [num_queries].
        layout: order of elements in a page, on the heap's device.
        scale: softmax scale.
        most: the largest weight instead of the sum.
        own_keys: [kv_heads, num_queries, head_dim], keys of the queries' own tokens if
            no page holds them; they take part in the softmax but get no votes.

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
    compiled = compiled_for(heap.device)[0]
    forced = check_forced(heap.device)
    if not compiled or forced:
        _check(heap, page_table, positions, queries, query_positions, layout, own_keys)
        if heap.device.type == "cpu" or forced:
            used = -(-positions.shape[1] // layout.block_size)
            checks.check_range(
                _OP, "page_table", page_table[:, :used], "page", len(heap)
            )
    if not compiled:
        return _in_torch(
            heap,
            page_table,
            positions,
            queries,
            query_positions,
            layout,
            scale,
            most,
            own_keys,
        )
    keys = layout.keys
    return call_compiled(
        _OP,
        heap,
        page_table.contiguous(),
        positions.contiguous(),
        queries.contiguous(),
        query_positions.contiguous(),
        None if own_keys is None else own_keys.contiguous(),
        keys.offsets,
        layout.block_size,
        scale,
        most,
        *((keys.base, keys.row_stride) if keys.row_stride else ()),
    )


def _in_torch(
    heap: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    queries: torch.Tensor,
    query_positions: torch.Tensor,
    layout: PageLayout,
    scale: float,
    most: bool,
    own_keys: torch.Tensor | None,
) -> torch.Tensor:
    """Products have the heap's dtype, everything else is float32."""
    kv_heads, slots = positions.shape
    used = -(-slots // layout.block_size)
    keys = torch_ops.gather_plane(heap, page_table[:, :used], layout.keys, layout)
    keys = keys[:, :slots]
    if own_keys is not None:
        keys = torch.cat([keys, own_keys], 1)
        own = query_positions.expand(kv_heads, -1)
        positions = torch.cat([positions, own], 1)
    grouped = queries.unflatten(0, (kv_heads, -1))
    votes = keys.new_zeros(*grouped.shape[:2], slots, dtype=torch.float32)
    step = max(_MAX_WEIGHTS // max(len(queries) * positions.shape[1], 1), 1)
    for first in range(0, queries.shape[1], step):
        part = grouped[:, :, first : first + step]
        logits = torch.bmm(part.flatten(1, 2), keys.transpose(1, 2)).float() * scale
        at = query_positions[first : first + step, None]
        hidden = (positions[:, None] > at) | (positions[:, None] < 0)
        logits = logits.view(*part.shape[:3], -1)
        logits.masked_fill_(hidden[:, None], -torch.inf)
        weights = logits.softmax(-1)[..., :slots]
        weights = weights.masked_fill(hidden.all(-1)[:, None, :, None], 0)
        if most:
            torch.maximum(votes, weights.amax(2), out=votes)
        else:
            votes += weights.sum(2)
    return votes


def _check(
    heap: torch.Tensor,
    page_table: torch.Tensor,
    positions: torch.Tensor,
    queries: torch.Tensor,
    query_positions: torch.Tensor,
    layout: PageLayout,
    own_keys: torch.Tensor | None,
) -> None:
    """The checks of csrc/vote_check.hpp, with the same messages in the same order."""
    checks.check_heap(_OP, heap, layout)
    if layout.head_dim > checks.MAX_HEAD_DIM:
        checks.fail(
            _OP,
            f"head_dim must be at most {checks.MAX_HEAD_DIM}, got {layout.head_dim}",
        )
    checks.check_indices(_OP, "page_table", page_table, heap, dim=2)
    checks.check_indices(_OP, "positions", positions, heap, dim=2)
    kv_heads, pages = page_table.shape
    room = pages * layout.block_size
    if len(positions) != kv_heads or positions.shape[1] > room:
        checks.fail(
            _OP,
            f"positions must be of at most {room} slots of {kv_heads} KV heads, got "
            f"shape {list(positions.shape)}",
        )
    _check_rows("queries", queries, heap, layout.head_dim, -1)
    if kv_heads == 0 or len(queries) % kv_heads:
        checks.fail(
            _OP,
            f"queries must be of a multiple of {kv_heads} KV heads, got shape "
            f"{list(queries.shape)}",
        )
    checks.check_indices(_OP, "query_positions", query_positions, heap)
    checks.check_size(_OP, "query_positions", query_positions, queries.shape[1])
    if own_keys is None:
        return
    _check_rows("own_keys", own_keys, heap, layout.head_dim, kv_heads)
    if own_keys.shape[1] != queries.shape[1]:
        checks.fail(
            _OP,
            f"own_keys must have {queries.shape[1]} rows per head, got shape "
            f"{list(own_keys.shape)}",
        )


def _check_rows(
    name: str, rows: torch.Tensor, heap: torch.Tensor, head_dim: int, first: int
) -> None:
    checks.check_device(_OP, name, rows, heap, "the heap")
    checks.check_dim(_OP, name, rows, 3)
    checks.check_dtype(_OP, name, rows, heap.dtype)
    if rows.shape[2] != head_dim or (first >= 0 and len(rows) != first):
        checks.fail(
            _OP,
            f"{name} must have head_dim {head_dim} and a row per head, got shape "
            f"{list(rows.shape)}",
        )
