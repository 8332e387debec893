"""Exact scans in torch: the fallback of every index, and the oracle of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.index.base import PAGE_TOKENS, PageIndex, Pages, TopKeys
from vllm_kvplugins.index.keys import Keys


class ExactScan(PageIndex):
    """Scores all keys in torch. Never fails, for any values of the keys; the engine
    uses it where another index has failed.

    Args:
        num_tokens: tokens appended so far.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._num_tokens = num_tokens

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Count the tokens."""
        self._num_tokens = first + keys.shape[1]

    def keep_first(self, tokens: int) -> int:
        """See :meth:`KeyIndex.keep_first`; it keeps all of them."""
        self._num_tokens = tokens
        return tokens

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens with the largest attention, summed over the group."""
        return scan_in_torch([self._num_tokens], queries[None], keys, scale, count)[0]

    def select_pages(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """See :meth:`PageIndex.select_pages`; the rows have the engine's order."""
        return pages_in_torch(self._num_tokens, queries, keys, scale, count)

    def order(self, first: int) -> torch.Tensor:
        """None: rows stay where they are."""
        return torch.empty(0, 0, dtype=torch.int64)


def scan_in_torch(
    num_keys: Sequence[int],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """The tokens with the largest attention of several requests.

    The same as ``selection.select`` of exact scans, without the extension. Keys and
    queries may have any floating dtype and may be infinite or NaN.

    Args:
        num_keys: number of keys of each request.
        queries: [requests, heads, group, head_dim].
        keys: the memory of all requests' keys.
        scale: softmax scale.
        count: tokens per KV head.

    Returns:
        int64 [requests, heads, count], best first; -1 where there are fewer keys.

    Cost: a copy of all keys and O(group * n * head_dim) per KV head.
    """
    requests, heads = queries.shape[:2]
    chosen = queries.new_full((requests, heads, count), -1, dtype=torch.int64)
    gathered = keys.gather()
    for request, tokens in enumerate(num_keys):
        own = gathered[request, :, :tokens].float()
        logits = queries[request].float() @ own.transpose(1, 2)
        attention = logits.mul_(scale).softmax(-1).sum(1)
        best = attention.sort(dim=-1, descending=True, stable=True).indices
        selected = min(count, tokens)
        chosen[request, :, :selected] = best[:, :selected]
    return chosen


def pages_in_torch(
    num_keys: int, queries: torch.Tensor, keys: Keys, scale: float, count: int
) -> torch.Tensor:
    """The full pages with the largest attention of one request.

    Args:
        num_keys, queries, keys, scale, count: see :meth:`PageIndex.select_pages`; keys
            and queries as for :func:`scan_in_torch`.

    Returns:
        int64 [heads, count], best first, of equal pages the lower number; -1 where
        there are fewer.

    Cost: that of :func:`scan_in_torch`.
    """
    own = keys.gather()[0, :, :num_keys].float()
    logits = queries.float() @ own.transpose(1, 2)
    attention = logits.mul_(scale).softmax(-1).sum(1)
    full = num_keys // PAGE_TOKENS
    votes = attention[:, : full * PAGE_TOKENS].unflatten(1, (full, PAGE_TOKENS)).sum(2)
    chosen = votes.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1)


def topk(queries: torch.Tensor, keys: torch.Tensor, k: int) -> TopKeys:
    """The k keys with the largest dot products; ties to the lower slot.

    Args:
        queries: [requests, heads, group, head_dim].
        keys: [requests, heads, n, head_dim]; n may be 0.
        k: keys per query; the result is padded if there are fewer.

    Returns:
        :class:`TopKeys` with a leading dimension for requests.

    Cost: O(n * head_dim) per query and a sort of n scores, in float32.
    """
    scores = queries.float() @ keys.float().transpose(2, 3)
    best, slots = scores.sort(dim=-1, descending=True, stable=True)
    visits = torch.full(scores.shape[:3], keys.shape[2], dtype=torch.int64)
    missing = max(0, k - keys.shape[2])
    pad = torch.nn.functional.pad
    return TopKeys(
        pad(slots[..., :k], (0, missing), value=-1),
        pad(best[..., :k], (0, missing), value=-torch.inf),
        visits,
    )


def pages(
    slots: torch.Tensor, places: torch.Tensor, page_size: int, limit: int
) -> Pages:
    """Pages of the best slots, ordered by rank and, within a rank, by query.

    Args:
        slots: int64 [heads, group, k], -1 for none.
        places: int64 [heads, n].
        page_size: slots per page.
        limit: pages per head at most.

    Returns:
        :class:`Pages` of one request.
    """
    heads = len(slots)
    selected = torch.full((heads, limit), -1)
    counts = torch.zeros(heads, dtype=torch.int64)
    for head in range(heads):
        in_order = slots[head].t().reshape(-1)
        taken: list[int] = []
        for slot in in_order[in_order >= 0].tolist():
            page = int(places[head, slot]) // page_size
            if page not in taken and len(taken) < limit:
                taken.append(page)
        selected[head, : len(taken)] = torch.tensor(taken, dtype=torch.int64)
        counts[head] = len(taken)
    return Pages(selected, counts)
