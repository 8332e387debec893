"""Selection of tokens on a device: votes from codes of keys, and which tokens to fetch.

A decode step runs, per layer and without the host::

    code_votes ──> a vote per host token, from the queries of its KV head's group
    swap_tokens ─> which tokens replace which hot tokens, and the host rows they are in
    fetch_rows ──> those rows, from host memory into the hot slots

Every shape is known before the step: nothing depends on the contents of a tensor, so
that the host neither waits for the device nor reads from it.

Runs Triton kernels on CUDA, and torch otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.ops import host_fetch
from vllm_kvplugins.ops.extension import triton_for
from vllm_kvplugins.ops.layout import PagedKV

# Codes are -127 to 127. Dot products of head_dim <= 1024 codes are exact in float32.
LARGEST_CODE = 127
_CODE_STEP = 1 / LARGEST_CODE
# A key that differs less from the center counts as the center.
_LEAST_PEAK = 1e-30
_LARGEST_FLOAT = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True, eq=False)
class KeyCodes:
    """Codes of keys in pages. A key is about ``center + width * scale * code``.

    Args:
        codes: int8 [num_pages, page_tokens, head_dim].
        scales: float32 [num_pages, page_tokens].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return int(self.codes.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class HostRequests:
    """The host tokens of some requests in one layer; all tensors are on the device.

    Args:
        table: int64 [requests, heads, pages], pages of each request and head, of the
            host and of the codes; token t is in slot ``t % page_tokens`` of entry
            ``t // page_tokens``.
        lengths: int64 [requests], tokens per head.
    """

    table: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HotTokens:
    """The tokens in the hot slots of some requests; all tensors are on the device.

    Args:
        token: int64 [entries, heads, width], number of the host token in each hot slot
            of all requests of a layer; updated by :func:`swap_tokens`.
        slot_indices: int64 [requests], the entry of each request, distinct.
        counts: int64 [requests], how many hot slots each request has.
        width: the largest of these counts, or more.
    """

    token: torch.Tensor
    slot_indices: torch.Tensor
    counts: torch.Tensor
    width: int


def encode_keys(
    keys: torch.Tensor, center: torch.Tensor, width: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of keys, with a scale for each key.

    A key with an element that is not finite, or that is too far from the center for a
    float32, gets the code of the center.

    Args:
        keys: [heads, n, head_dim], any float type.
        center, width: float32 [heads, head_dim]; widths are positive.

    Returns:
        int8 [heads, n, head_dim] and float32 [heads, n]; see :class:`KeyCodes`.
    """
    values = (keys.float() - center[:, None]) / width[:, None]
    peak = values.abs().amax(-1)
    counts = (peak > _LEAST_PEAK) & (peak <= _LARGEST_FLOAT)
    scales = torch.where(counts, peak * _CODE_STEP, 0.0)
    codes = torch.where(counts[..., None], values / scales[..., None], 0.0)
    return codes.round().clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scales


def encode_queries(
    queries: torch.Tensor, width: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of queries, with a step for each query.

    The product of a query and a key, minus that of the query and the center, is about
    ``step * scale * (query code . key code)``. Elements that are not finite count as 0.

    Args:
        queries: [..., heads, group, head_dim], any float type.
        width: float32 [..., heads, head_dim].

    Returns:
        float32 [..., heads, group, head_dim], whole numbers; float32 [..., heads,
        group].
    """
    wide = queries.float() * width[..., None, :]
    wide = torch.where(wide.abs() <= _LARGEST_FLOAT, wide, 0.0)
    peak = wide.abs().amax(-1)
    inverse = torch.where(peak > 0, LARGEST_CODE / peak, 0.0)
    inverse = inverse.clamp_(max=_LARGEST_FLOAT)
    codes = (wide * inverse[..., None]).round()
    return codes.clamp_(-LARGEST_CODE, LARGEST_CODE), peak * _CODE_STEP


def code_votes(
    queries: torch.Tensor,
    width: torch.Tensor,
    keys: KeyCodes,
    host: HostRequests,
    scale: float,
) -> torch.Tensor:
    """How much the queries of each KV head attend to each host token, by its code.

    Each query distributes one vote over all host tokens of its request, by its softmax.
    The votes of a group add up. Sinks and window would scale all votes of a query
    alike, and the center would shift all its logits alike, so they are left out.

    Args:
        queries: [requests, heads, group, head_dim], any float type.
        width: float32 [requests, heads, head_dim], see :func:`encode_keys`.
        keys: codes of all keys.
        host: the tokens to vote for.
        scale: softmax scale.

    Returns:
        float32 [requests, heads, pages * page_tokens]; -1 behind the last token.

    Cost: reads each code once for all queries of its group. Writes a float32 per query
        and token. Three launches on CUDA; no host sync.
    """
    if triton_for(queries.device):
        from vllm_kvplugins.ops.triton import code_select as in_triton

        return in_triton.code_votes(queries, width, keys, host, scale)
    return votes_in_torch(queries, width, keys, host, scale)


def votes_in_torch(
    queries: torch.Tensor,
    width: torch.Tensor,
    keys: KeyCodes,
    host: HostRequests,
    scale: float,
) -> torch.Tensor:
    """:func:`code_votes` in torch; the oracle of the kernels.

    Cost: a float32 copy of the codes of all host tokens.
    """
    codes, steps = encode_queries(queries, width)
    rows = keys.codes[host.table].flatten(2, 3).float()
    scales = keys.scales[host.table].flatten(2)
    logits = (codes @ rows.transpose(2, 3)) * scales[:, :, None]
    logits *= (steps * scale)[..., None]
    slot = torch.arange(rows.shape[2], device=rows.device)
    exists = (slot < host.lengths[:, None])[:, None]
    logits.masked_fill_(~exists[:, :, None], -torch.inf)
    return torch.where(exists, logits.softmax(-1).sum(2), -1.0)


def swap_tokens(
    votes: torch.Tensor, page_tokens: int, host: HostRequests, hot: HotTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace hot tokens by tokens with more votes. Updates ``hot.token``.

    The tokens with the most votes become hot, as many as there are hot slots; of equal
    votes, the lower token. Those that are hot already keep their slots. The others go
    to the slots that become free, both in ascending order. If there are fewer tokens
    than hot slots, the other slots keep theirs.

    Args:
        votes: float32 [requests, heads, n], not negative for tokens that exist, n at
            least the largest of ``host.lengths``; see :func:`code_votes`.
        page_tokens: tokens per host page.
        host: the tokens to choose from.
        hot: the hot slots; hot tokens are distinct.

    Returns:
        int64 [requests, heads, width]: for each hot slot the row of its new key among
        the host pages, seen as ``[pages * 2 * page_tokens, head_dim]``, or -1 if it
        keeps its token; int64 [requests, heads], the number of new tokens.

    Cost: six passes over the votes; one launch on CUDA; no host sync.
    """
    if triton_for(votes.device):
        from vllm_kvplugins.ops.triton import code_select as in_triton

        return in_triton.swap_tokens(votes, page_tokens, host, hot)
    return swap_in_torch(votes, page_tokens, host, hot)


def swap_in_torch(
    votes: torch.Tensor, page_tokens: int, host: HostRequests, hot: HotTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`swap_tokens` in torch; the oracle of the kernel.

    Cost: a sort of the votes.
    """
    tokens, width, device = votes.shape[2], hot.width, votes.device
    table = hot.token[:, :, :width]
    held = table.index_select(0, hot.slot_indices)
    is_slot = torch.arange(width, device=device) < hot.counts[:, None, None]
    number = torch.arange(tokens, device=device).expand_as(votes)

    most = torch.minimum(hot.counts, host.lengths)[:, None, None]
    order = votes.sort(dim=-1, descending=True, stable=True).indices
    chosen = torch.zeros_like(votes, dtype=torch.bool)
    chosen.scatter_(2, order, number < most)
    # The last column stands for slots that are not used.
    is_hot = torch.zeros_like(votes[..., :1], dtype=torch.bool).repeat(1, 1, tokens + 1)
    is_hot.scatter_(2, torch.where(is_slot, held, tokens), True)
    missing = chosen & ~is_hot[..., :tokens]
    leaves = is_slot & ~chosen.gather(2, torch.where(is_slot, held, 0))

    # The i-th missing token goes to the i-th slot that becomes free.
    rank = torch.where(missing, missing.cumsum(2) - 1, width)
    listed = held.new_zeros(*held.shape[:2], width + 1).scatter_(2, rank, number)
    turn = leaves.cumsum(2) - 1
    fetched = missing.sum(2)
    taken = leaves & (turn < fetched[..., None])
    new = listed.gather(2, turn.clamp(min=0))
    rows = host.table.gather(2, new // page_tokens) * 2 * page_tokens
    rows = torch.where(taken, rows + new % page_tokens, -1)
    table.index_copy_(0, hot.slot_indices, torch.where(taken, new, held))
    return rows, fetched


def fetch_rows(
    kv: PagedKV,
    host_pages: torch.Tensor,
    rows: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write rows of host pages to hot slots, in place; see :func:`swap_tokens`.

    On CUDA the GPU reads the rows itself, in stream order: until then they must stay
    pinned (``host_fetch.pin``) and unchanged.

    Args:
        kv: the heap.
        host_pages: [host_pages, 2 (keys, values), page_tokens, head_dim] of the heap's
            dtype, on the CPU.
        rows: int64 [requests, heads, width], rows of keys, -1 = none.
        pages, slots: int64 of that shape, where each goes; pairs must differ. Like
            ``rows`` on the heap's device.

    Raises:
        RuntimeError: the device of the heap cannot read host memory.

    Cost: O(head_dim) per row that is not -1; one launch on CUDA; no host sync there.
    """
    if triton_for(kv.pages.device):
        from vllm_kvplugins.ops.triton import code_select as in_triton

        in_triton.fetch_rows(kv, host_pages, rows, pages, slots)
        return
    page_tokens = host_pages.shape[2]
    new = rows >= 0
    keys = rows[new]
    host_fetch.fetch_tokens(
        kv,
        pages[new],
        slots[new],
        host_pages.view(-1, host_pages.shape[3]),
        keys,
        keys + page_tokens,
    )
