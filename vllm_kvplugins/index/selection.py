"""The tokens that a step's queries want, for several requests in one call."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from vllm_kvplugins.index.compiled import CompiledIndex
from vllm_kvplugins.index.keys import Keys
from vllm_kvplugins.ops.dispatch import call_compiled


def select_tokens(
    indexes: Sequence[CompiledIndex],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """The keys that get most attention from all queries of a KV head together.

    Every query looks at keys as its index says (a ``DCIIndex`` at about
    ``max_visits`` of them, a ``BruteForceIndex`` at all) and spreads one vote over
    them in the proportions of its softmax; the votes of a group add up (IceCache
    section 4.2 joins the queries' own best keys instead, and does not weigh them).

    Args:
        indexes: one per request, of the same heads and head_dim; trees and scans may
            be mixed. The trees must have been made with the same settings.
        queries: float32 or bfloat16 [requests, heads, group, head_dim].
        keys: where the indexed keys of all requests lie.
        scale: softmax scale.
        count: keys per KV head.

    Returns:
        int64 [requests, heads, count], distinct, best first, the lower slot first
        among equals; -1 where fewer keys were looked at.

    Raises:
        ValueError: a shape, dtype or number does not fit; a query is not finite.

    Cost: that of :func:`query_topk`, and one exponential per key looked at; no Python
    work per request or head but a list of handles.
    """
    if not indexes:
        raise ValueError("kvp.index_select: there must be at least one index")
    if any(getattr(index, "_torch_keys", None) is not None for index in indexes):
        counts = [index.num_keys for index in indexes]
        return scan_in_torch(counts, queries, keys, scale, count)
    return call_compiled(
        "index_select",
        _as_tensor(tuple(index.handle for index in indexes)),
        queries.contiguous(),
        keys.data,
        keys.table,
        keys.by_page,
        max(index.default_visits for index in indexes),
        min(index.visit_ratio for index in indexes),
        scale,
        count,
    )


@functools.lru_cache(maxsize=4096)
def _as_tensor(handles: tuple[int, ...]) -> torch.Tensor:
    """int64; the same requests ask step after step."""
    return torch.tensor(handles)


def scan_in_torch(
    num_keys: Sequence[int],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """:func:`select_tokens` over all keys, without the extension. Takes keys and
    queries of any floating dtype, also such as are not finite.

    Args:
        num_keys: how many keys each request has.
    """
    requests, heads = queries.shape[:2]
    chosen = queries.new_full((requests, heads, count), -1, dtype=torch.int64)
    gathered = keys.gather()
    for request, tokens in enumerate(num_keys):
        own = gathered[request, :, :tokens].float()
        logits = queries[request].float() @ own.transpose(1, 2)
        worth = logits.mul_(scale).softmax(-1).sum(1)
        best = worth.sort(dim=-1, descending=True, stable=True).indices
        found = min(count, tokens)
        chosen[request, :, :found] = best[:, :found]
    return chosen
