"""Quest: pages in the order of the text, ranked by the bounds of their keys."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from vllm_kvplugins.index import KeyIndex
from vllm_kvplugins.policies.pages import OrderedPages, PageRetriever


class PageBounds(OrderedPages):
    """Per page and channel the smallest and the largest key element."""

    def digest(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Both [num_kv_heads, n, head_dim]."""
        return pages.amin(2), pages.amax(2)

    @property
    def _minima(self) -> torch.Tensor:
        return self._digests[0]

    @property
    def _maxima(self) -> torch.Tensor:
        return self._digests[1]

    def promise(self, queries: torch.Tensor) -> torch.Tensor:
        """Per channel the larger of q * min and q * max, summed."""
        bound = torch.bmm(F.relu(queries), self._maxima.transpose(1, 2))
        return bound - torch.bmm(F.relu(-queries), self._minima.transpose(1, 2))


class Quest(PageRetriever):
    """Fetch the pages whose keys could get most attention (arXiv:2406.10774).

    A page's bound for a query is the sum over channels of the larger of q * min
    and q * max (section 3.3 there). Differs from the paper: its cache stays on the
    device, this one's is on the host; queries that share a KV head add up their
    softmax over the bounds (the paper has no GQA).

    Cost: per step and selecting layer one pass over two vectors per page.
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "nothing dropped; fetches pages by bounds of their keys"

    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        return PageBounds(num_kv_heads, head_dim, self.page_tokens)
