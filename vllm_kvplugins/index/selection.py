"""Selection for all requests of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.index.base import PAGE_TOKENS, KeyIndex, PageIndex
from vllm_kvplugins.index.compiled import (
    CompiledIndex,
    select_compiled,
    select_pages_compiled,
)
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


def select_pages(
    indices: Sequence[PageIndex],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """:meth:`PageIndex.select_pages` of several requests.

    Args:
        indices, queries, scale: see :func:`select`.
        keys: the memory of all requests' keys, in the order of pages.
        count: pages per KV head.

    Returns:
        int64 [requests, num_kv_heads, count].

    Cost: as for :func:`select`.
    """
    compiled = [index for index in indices if isinstance(index, CompiledIndex)]
    if len(compiled) == len(indices):
        return select_pages_compiled(compiled, queries, keys, scale, count)
    selected = [
        index.select_pages(queries[request], keys.of(request), scale, count)
        for request, index in enumerate(indices)
    ]
    return torch.stack(selected)


@dataclass(frozen=True, slots=True)
class PageSelection:
    """A policy fetches whole pages, which host memory has in the order of its indices.

    Args:
        segment_tokens: tokens that an index divides into pages together.
    """

    segment_tokens: int

    @property
    def page_tokens(self) -> int:
        """Tokens per page, also of host memory."""
        return PAGE_TOKENS

    def select(
        self,
        indices: Sequence[PageIndex],
        queries: torch.Tensor,
        keys: Keys,
        scale: float,
        count: int,
    ) -> torch.Tensor:
        """Select the pages to fetch, see :func:`select_pages`."""
        return select_pages(indices, queries, keys, scale, count)
