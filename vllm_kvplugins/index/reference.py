"""Oracles of the index: the exact scan in torch, sorted instead of selected.

Slow on purpose and written apart from the compiled scan. Used where the extension
is not built, and by tests.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.index.base import Pages, TopKeys


def topk(queries: torch.Tensor, keys: torch.Tensor, k: int) -> TopKeys:
    """The k keys with the largest dot products; ties to the lower slot.

    Args:
        queries: [requests, heads, group, head_dim].
        keys: [requests, heads, n, head_dim]; n may be 0.
        k: how many; answers are padded if there are fewer keys.

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
    """Pages of the best slots: by rank, and by query within a rank.

    Args:
        slots: int64 [heads, group, k], -1 for none.
        places: int64 [heads, n].
        page_size: slots per page.
        limit: pages per head at most.

    Returns:
        :class:`Pages` of one request.
    """
    heads = len(slots)
    found = torch.full((heads, limit), -1)
    counts = torch.zeros(heads, dtype=torch.int64)
    for head in range(heads):
        in_order = slots[head].t().reshape(-1)
        taken: list[int] = []
        for slot in in_order[in_order >= 0].tolist():
            page = int(places[head, slot]) // page_size
            if page not in taken and len(taken) < limit:
                taken.append(page)
        found[head, : len(taken)] = torch.tensor(taken, dtype=torch.int64)
        counts[head] = len(taken)
    return Pages(found, counts)
