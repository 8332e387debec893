"""Quest: fetches pages of consecutive tokens, ranked by bounds of their keys."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_kvplugins.index import KeyIndex
from vllm_kvplugins.policies.pages import OrderedPages, PageRetriever


class PageBounds(OrderedPages):
    """Stores the smallest and the largest key element of each page and channel."""

    def digest(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Minima and maxima, each [num_kv_heads, n, head_dim]."""
        return pages.amin(2), pages.amax(2)

    @property
    def _minima(self) -> torch.Tensor:
        return self._digests[0]

    @property
    def _maxima(self) -> torch.Tensor:
        return self._digests[1]

    def upper_bounds(self, queries: torch.Tensor) -> torch.Tensor:
        """Sum over channels of the larger of q * min and q * max."""
        bound = torch.bmm(F.relu(queries), self._maxima.transpose(1, 2))
        return bound - torch.bmm(F.relu(-queries), self._minima.transpose(1, 2))


class Quest(PageRetriever):
    """Fetch the pages whose keys could get the most attention (arXiv:2406.10774).

    The upper bound of a page for a query is the sum over channels of the larger of
    q * min and q * max (section 3.3 of that paper).

    Differs from the paper: the cache is on the host, the paper's stays on the device.
    Queries that share a KV head sum their softmax over the bounds (the paper has no
    GQA).

    Cost: per step and selecting layer, one pass over two vectors per page.
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = (
        "keeps all tokens on the host; fetches pages by bounds of their keys"
    )

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return PageBounds(num_kv_heads, head_dim, self.page_tokens)
