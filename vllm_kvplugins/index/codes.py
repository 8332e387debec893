"""An index of one-byte codes, compiled (csrc/dci.cpp)."""

from __future__ import annotations

import torch

from vllm_kvplugins.index.base import PageIndex
from vllm_kvplugins.index.compiled import (
    CompiledIndex,
    require_extension,
    select_pages_compiled,
)
from vllm_kvplugins.index.keys import Keys


class CodedIndex(CompiledIndex, PageIndex):
    """Finds keys by codes of one byte per dimension.

    A query scores codes: those of all keys while there are fewer than ``flat_keys``,
    else those of the best pages and of the newest keys. A page has sixteen similar
    keys and is ranked by the code of their mean. From 64K keys on, a query first
    chooses the best quarter of the groups of sixteen pages. All queries of a KV head
    read the codes once, and no keys. Scores are therefore rounded to about 1 %.

    Args:
        num_heads: KV heads.
        head_dim: elements per key.
        page_size: keys per page of :meth:`query_pages`, in the order of insertion.
        max_visits: approximate number of keys in pages whose codes a query scores,
            unless the query states its own; 0 scores all keys exactly.
        segment: keys that are divided into pages together, a multiple of sixteen. Above
            32K keys, segments are merged when at least 256 keys are added at once.
        stored: whether the engine stores keys in the order of rows. Segments are then
            not merged, so that a key moves once. A page of codes is two stored pages.
        flat_keys: number of keys below which codes are not divided into pages.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: the extension is not built, or KVP_OPS=torch forbids it.

    Cost: about ``head_dim + 8`` bytes per key. A query O(n * head_dim) byte
    multiply-adds below ``flat_keys``, above it a sixteenth of that and
    ``max_visits * head_dim``. Building O(n * head_dim * log2(segment)).
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        page_size: int = 16,
        *,
        max_visits: int = 1024,
        segment: int = 2048,
        flat_keys: int = 4096,
        stored: bool = False,
    ) -> None:
        require_extension("CodedIndex")
        super().__init__(
            2,
            num_heads,
            head_dim,
            page_size,
            0.5,
            0,
            0,
            0,
            False,
            segment,
            flat_keys,
            stored,
        )
        self.default_visits = max_visits

    def select_pages(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """See :meth:`PageIndex.select_pages` and :func:`select_pages_compiled`."""
        return select_pages_compiled([self], queries, keys, scale, count)
