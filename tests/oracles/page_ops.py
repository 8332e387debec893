"""Oracles of the page operations: plain loops over tokens, dimensions by table.

Slow and independent of the fast versions. Tests compare every implementation with them
bit for bit. They do not check arguments.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.ops import (
    CoarseEntries,
    PagedKV,
    PageLayout,
    VoteQueries,
    VoteSlots,
)


def gather_tokens(
    kv: PagedKV, pages: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.gather_tokens`."""
    heap, layout = kv.pages, kv.layout
    keys = heap.new_empty(len(pages), layout.head_dim)
    values = heap.new_empty(len(pages), layout.head_dim)
    for i, (page, slot) in enumerate(zip(pages.tolist(), slots.tolist(), strict=True)):
        keys[i] = heap[page][_row(layout.k_offsets, slot, layout)]
        values[i] = heap[page][_row(layout.v_offsets, slot, layout)]
    return keys, values


def scatter_tokens(
    kv: PagedKV,
    pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.scatter_tokens`."""
    for i, (page, slot) in enumerate(zip(pages.tolist(), slots.tolist(), strict=True)):
        kv.pages[page][_row(kv.layout.k_offsets, slot, kv.layout)] = keys[i]
        kv.pages[page][_row(kv.layout.v_offsets, slot, kv.layout)] = values[i]


def move_tokens(
    kv: PagedKV,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
) -> None:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.move_tokens`."""
    for i in range(len(src_pages)):
        one = slice(i, i + 1)
        keys, values = gather_tokens(kv, src_pages[one], src_slots[one])
        scatter_tokens(kv, dst_pages[one], dst_slots[one], keys, values)


def gather_keys(kv: PagedKV, page_table: torch.Tensor) -> torch.Tensor:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.gather_keys`."""
    return _all_slots(kv, page_table)[0]


def gather_values(kv: PagedKV, page_table: torch.Tensor) -> torch.Tensor:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.gather_values`."""
    return _all_slots(kv, page_table)[1]


def _all_slots(
    kv: PagedKV, page_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every slot of every listed page, in order."""
    layout = kv.layout
    rows, per_row = page_table.shape
    pages = page_table.reshape(-1).repeat_interleave(layout.block_size)
    slots = torch.arange(layout.block_size).repeat(rows * per_row)
    shape = (rows, per_row * layout.block_size, layout.head_dim)
    keys, values = gather_tokens(kv, pages, slots)
    return keys.view(shape), values.view(shape)


def _row(offsets: torch.Tensor, slot: int, layout: PageLayout) -> torch.Tensor:
    return offsets[slot * layout.head_dim : (slot + 1) * layout.head_dim].long()


def attend_mixed(
    queries: torch.Tensor,
    kv: PagedKV,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: CoarseEntries,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`vllm_kvplugins.ops.mixed_attention.attend_mixed`.

    Keys, values, scores and weights are of ``dtype``, and so is what it returns.
    """
    entry_keys, entry_values, bias, starts, counts = coarse.tensors
    block_size = kv.layout.block_size
    heads = len(page_table) // len(queries)
    group = queries.shape[1] // heads
    out = queries.new_zeros(queries.shape, dtype=dtype)
    lse = queries.new_zeros(queries.shape[:2], dtype=dtype)
    for sequence, length in enumerate(lengths.tolist()):
        row, head = divmod(sequence, heads)
        slot = torch.arange(length)
        pages = page_table[sequence, slot // block_size].long()
        keys, values = gather_tokens(kv, pages, slot % block_size)
        run = starts[sequence] + torch.arange(int(counts[sequence]))
        entries = run[bias[run] > -torch.inf]
        keys = torch.cat([keys.to(dtype), entry_keys[entries].to(dtype)])
        values = torch.cat([values.to(dtype), entry_values[entries].to(dtype)])
        added = torch.cat([torch.zeros(length), bias[entries]]).to(dtype)
        for q in range(head * group, (head + 1) * group):
            scores = keys @ queries[row, q].to(dtype) * scale + added
            lse[row, q] = scores.logsumexp(0)
            out[row, q] = scores.softmax(0) @ values
    return out, lse


def page_votes(
    kv: PagedKV,
    slots: VoteSlots,
    queries: VoteQueries,
    scale: float,
    largest: bool = False,
) -> torch.Tensor:
    """Oracle of :func:`vllm_kvplugins.ops.page_votes.page_votes`, float64."""
    positions, block_size = slots.positions, kv.layout.block_size
    kv_heads, num_slots = positions.shape
    group = len(queries.queries) // kv_heads
    votes = torch.zeros(kv_heads, group, num_slots, dtype=torch.float64)
    for head in range(kv_heads):
        there = (positions[head] >= 0).nonzero()[:, 0]
        pages = slots.page_table[head, there // block_size]
        keys, _ = gather_tokens(kv, pages, there % block_size)
        at = positions[head, there]
        if queries.own_keys is not None:
            keys = torch.cat([keys, queries.own_keys[head]])
            at = torch.cat([at, queries.positions])
        for g in range(group):
            for q, position in enumerate(queries.positions.tolist()):
                seen = at <= position
                query = queries.queries[head * group + g, q].double()
                weights = (keys[seen].double() @ query * scale).softmax(0)
                slot = there[seen[: len(there)]]
                head_weights = weights[: len(slot)]
                old = votes[head, g, slot]
                votes[head, g, slot] = (
                    old.maximum(head_weights) if largest else old + head_weights
                )
    return votes


def zoom_head(
    bias: torch.Tensor,
    owner: torch.Tensor,
    gates: torch.Tensor,
    sizes: torch.Tensor,
    room: int,
) -> tuple[torch.Tensor, torch.Tensor, dict[int, tuple[int, int]]]:
    """Oracle of :func:`vllm_kvplugins.ops.zoom.zoom_spans` for one KV head.

    Args:
        bias, owner: [spans + room], the head's run of entries.
        gates, sizes: [spans].

    Returns:
        The new bias and owner, and for each entry that received a token its span and
        which of the span's tokens it is.
    """
    bias, owner = bias.clone(), owner.clone()
    spans = len(gates)
    promising = [
        s for s in range(spans) if gates[s] > -torch.inf and int(sizes[s]) <= room
    ]
    chosen: set[int] = set()
    for span in sorted(promising, key=lambda s: (-float(gates[s]), s)):
        if sum(int(sizes[s]) for s in chosen) + int(sizes[span]) > room:
            break
        chosen.add(span)
    for entry in range(spans, spans + room):
        if int(owner[entry]) >= 0 and int(owner[entry]) not in chosen:
            owner[entry], bias[entry] = -1, -torch.inf
    zoomed: dict[int, tuple[int, int]] = {}
    for span in sorted(chosen):
        if bias[span] == -torch.inf:
            continue
        for token in range(int(sizes[span])):
            entry = spans + int((owner[spans:] < 0).nonzero()[0])
            owner[entry], bias[entry], zoomed[entry] = span, 0.0, (span, token)
    for span in range(spans):
        whole = sizes[span].float().log()
        bias[span] = -torch.inf if span in chosen else whole
    return bias, owner, zoomed
