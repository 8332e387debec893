"""Selection for all requests of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvplugins.index.base import KeyIndex
from vllm_kvplugins.index.compiled import CompiledIndex, select_compiled
from vllm_kvplugins.index.keys import Keys


def select(
    indices: Sequence[KeyIndex],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """:meth:`KeyIndex.select` of several requests.

    Args:
        indices: one per request, of the same heads and head_dim.
        queries: [requests, num_kv_heads, group, head_dim].
        keys: the memory of all requests' keys.
        scale: softmax scale.
        count: tokens per KV head.

    Returns:
        int64 [requests, num_kv_heads, count].

    Cost: one compiled call if all indices are compiled, else one call per index.
    """
    compiled = [index for index in indices if isinstance(index, CompiledIndex)]
    if len(compiled) == len(indices):
        return select_compiled(compiled, queries, keys, scale, count)
    selected = [
        index.select(queries[request], keys.of(request), scale, count)
        for request, index in enumerate(indices)
    ]
    return torch.stack(selected)
