"""The exact scan, compiled (csrc/dci.cpp) or in torch."""

from __future__ import annotations

import torch

from vllm_kvplugins.index import scan
from vllm_kvplugins.index.base import PageIndex
from vllm_kvplugins.index.compiled import (
    CompiledIndex,
    extension_problem,
    select_pages_compiled,
)
from vllm_kvplugins.index.keys import Keys


class BruteForceIndex(CompiledIndex, PageIndex):
    """Exact scan of all keys with the interface of an index; the tree's oracle.

    Pages are runs of ``page_size`` slots in the order of insertion. ``max_visits`` is
    ignored. Runs in torch if the extension is not built or KVP_OPS=torch is set; that
    version sorts all scores and differs from the compiled one only by rounding.

    Args:
        num_heads: KV heads.
        head_dim: elements per key.
        page_size: keys per page.

    Cost: a query O(num_keys * head_dim); no memory.
    """

    def __init__(self, num_heads: int, head_dim: int, page_size: int = 32) -> None:
        self._torch_keys: int | None = None
        if not extension_problem():
            super().__init__(1, num_heads, head_dim, page_size, 0.5, 0, 0, 0, False)
            return
        self._handle = None
        self._torch_keys = 0
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.page_size = page_size

    def insert(self, keys: Keys, count: int | None = None) -> None:
        """See :meth:`CompiledIndex.insert`."""
        if self._torch_keys is None:
            super().insert(keys, count)
            return
        count = keys.capacity if count is None else count
        if not 0 <= count <= keys.capacity:
            raise ValueError(
                f"kvp.index_append: count is {count}, but keys has "
                f"{keys.capacity} slots per head"
            )
        norms = keys.gather()[0, :, :count].double().norm(dim=-1)
        wrong = (~(norms <= 1e18)).nonzero()
        if len(wrong):
            head, slot = wrong[0].tolist()
            raise ValueError(
                f"kvp.index_append: key {slot} of head {head} is not finite, or its "
                "norm exceeds 1e18; nothing was added"
            )
        self._torch_keys += count

    def select_pages(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """See :meth:`PageIndex.select_pages`; rows are in the order of arrival."""
        if self._torch_keys is None:
            return select_pages_compiled([self], queries, keys, scale, count)
        return scan.pages_in_torch(self._torch_keys, queries, keys, scale, count)

    def order(self, first: int) -> torch.Tensor:
        """None: rows stay where they are."""
        return torch.empty(self.num_heads, 0, dtype=torch.int64)

    def places(self, first: int = 0) -> torch.Tensor:
        """See :meth:`CompiledIndex.places`."""
        if self._torch_keys is None:
            return super().places(first)
        return torch.arange(first, self._torch_keys).expand(self.num_heads, -1)

    def check_integrity(self, keys: Keys) -> None:
        """See :meth:`CompiledIndex.check_integrity`."""
        if self._torch_keys is None:
            super().check_integrity(keys)
        elif keys.capacity < self._torch_keys:
            raise AssertionError("index is damaged: the view has fewer keys")

    def _stats(self) -> list[int]:
        if self._torch_keys is None:
            return super()._stats()
        pages = -(-self._torch_keys // self.page_size)
        return [self._torch_keys, 0, *[pages] * self.num_heads]
