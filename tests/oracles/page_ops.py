"""Oracles of the page operations: plain loops over tokens, dimensions by table.

Slow, and written independently of the fast versions, so that the two can disagree.
Tests compare every implementation with these bit for bit. They check no arguments.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.ops.layout import PageLayout


def gather_tokens(
    heap: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.gather_tokens`."""
    keys = heap.new_empty(len(pages), layout.head_dim)
    values = heap.new_empty(len(pages), layout.head_dim)
    for i, (page, slot) in enumerate(zip(pages.tolist(), slots.tolist(), strict=True)):
        keys[i] = heap[page][_row(layout.k_offsets, slot, layout)]
        values[i] = heap[page][_row(layout.v_offsets, slot, layout)]
    return keys, values


def scatter_tokens(
    heap: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.scatter_tokens`."""
    for i, (page, slot) in enumerate(zip(pages.tolist(), slots.tolist(), strict=True)):
        heap[page][_row(layout.k_offsets, slot, layout)] = keys[i]
        heap[page][_row(layout.v_offsets, slot, layout)] = values[i]


def move_tokens(
    heap: torch.Tensor,
    src_pages: torch.Tensor,
    src_slots: torch.Tensor,
    dst_pages: torch.Tensor,
    dst_slots: torch.Tensor,
    layout: PageLayout,
) -> None:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.move_tokens`."""
    for i in range(len(src_pages)):
        one = slice(i, i + 1)
        keys, values = gather_tokens(heap, src_pages[one], src_slots[one], layout)
        scatter_tokens(heap, dst_pages[one], dst_slots[one], keys, values, layout)


def gather_keys(
    heap: torch.Tensor, page_table: torch.Tensor, layout: PageLayout
) -> torch.Tensor:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.gather_keys`."""
    return _all_slots(heap, page_table, layout)[0]


def gather_values(
    heap: torch.Tensor, page_table: torch.Tensor, layout: PageLayout
) -> torch.Tensor:
    """Oracle of :func:`vllm_kvplugins.ops.dispatch.gather_values`."""
    return _all_slots(heap, page_table, layout)[1]


def _all_slots(
    heap: torch.Tensor, page_table: torch.Tensor, layout: PageLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of every slot of every listed page, in order."""
    rows, per_row = page_table.shape
    pages = page_table.reshape(-1).repeat_interleave(layout.block_size)
    slots = torch.arange(layout.block_size).repeat(rows * per_row)
    shape = (rows, per_row * layout.block_size, layout.head_dim)
    keys, values = gather_tokens(heap, pages, slots, layout)
    return keys.view(shape), values.view(shape)


def _row(offsets: torch.Tensor, slot: int, layout: PageLayout) -> torch.Tensor:
    return offsets[slot * layout.head_dim : (slot + 1) * layout.head_dim].long()


def attend_mixed(
    queries: torch.Tensor,
    heap: torch.Tensor,
    layout: PageLayout,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    coarse: tuple[torch.Tensor, ...],
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle of :func:`vllm_kvplugins.ops.mixed_attention.attend_mixed`.

    Keys, values, scores and weights are of ``dtype``, and so is what it returns.
    """
    entry_keys, entry_values, bias, starts, counts = coarse
    heads = len(page_table) // len(queries)
    group = queries.shape[1] // heads
    out = queries.new_zeros(queries.shape, dtype=dtype)
    lse = queries.new_zeros(queries.shape[:2], dtype=dtype)
    for sequence, length in enumerate(lengths.tolist()):
        row, head = divmod(sequence, heads)
        slot = torch.arange(length)
        pages = page_table[sequence, slot // layout.block_size].long()
        keys, values = gather_tokens(heap, pages, slot % layout.block_size, layout)
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
    """Oracle of :func:`vllm_kvplugins.ops.page_votes.page_votes`, float64."""
    kv_heads, slots = positions.shape
    group = len(queries) // kv_heads
    votes = torch.zeros(kv_heads, group, slots, dtype=torch.float64)
    for head in range(kv_heads):
        there = (positions[head] >= 0).nonzero()[:, 0]
        pages = page_table[head, there // layout.block_size]
        keys, _ = gather_tokens(heap, pages, there % layout.block_size, layout)
        at = positions[head, there]
        if own_keys is not None:
            keys = torch.cat([keys, own_keys[head]])
            at = torch.cat([at, query_positions])
        for g in range(group):
            for q, position in enumerate(query_positions.tolist()):
                seen = at <= position
                query = queries[head * group + g, q].double()
                weights = (keys[seen].double() @ query * scale).softmax(0)
                slot = there[seen[: len(there)]]
                mine = weights[: len(slot)]
                old = votes[head, g, slot]
                votes[head, g, slot] = old.maximum(mine) if most else old + mine
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
    made: dict[int, tuple[int, int]] = {}
    for span in sorted(chosen):
        if bias[span] == -torch.inf:
            continue
        for token in range(int(sizes[span])):
            entry = spans + int((owner[spans:] < 0).nonzero()[0])
            owner[entry], bias[entry], made[entry] = span, 0.0, (span, token)
    for span in range(spans):
        whole = sizes[span].float().log()
        bias[span] = -torch.inf if span in chosen else whole
    return bias, owner, made
