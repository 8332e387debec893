"""Quest: pages in the order of the text, ranked by the bounds of their keys."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from vllm_kvplugins.index import Keys
from vllm_kvplugins.policies.retrieval import Retriever, TokenIndex, tokens_of_pages


class PageBounds(TokenIndex):
    """Per page and channel the smallest and the largest key element.

    Args:
        page_tokens: tokens per page.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._tokens = 0
        self._least = torch.empty(num_kv_heads, 0, head_dim)
        self._most = torch.empty(num_kv_heads, 0, head_dim)

    def insert(self, keys: torch.Tensor, first: int) -> None:
        """Bounds of the new pages; the one that was not full gets wider ones."""
        size, full = self._page_tokens, first // self._page_tokens
        before, behind = first % size, -(first + keys.shape[1]) % size
        fresh = keys.to(torch.float32)
        # empty slots repeat a key of their own page, which bounds nothing new
        pages = torch.cat(
            [
                fresh[:, :1].expand(-1, before, -1),
                fresh,
                fresh[:, -1:].expand(-1, behind, -1),
            ],
            1,
        ).unflatten(1, (-1, size))
        least, most = pages.amin(2), pages.amax(2)
        if before:
            least[:, 0] = torch.minimum(least[:, 0], self._least[:, full])
            most[:, 0] = torch.maximum(most[:, 0], self._most[:, full])
        self._least = torch.cat([self._least[:, :full], least], 1)
        self._most = torch.cat([self._most[:, :full], most], 1)
        self._tokens = first + keys.shape[1]

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens of the pages with the largest bounds.

        Cost: O(group * tokens / page_tokens * head_dim) per KV head.
        """
        grouped = queries.to(torch.float32)
        bound = torch.bmm(F.relu(grouped), self._most.transpose(1, 2))
        bound -= torch.bmm(F.relu(-grouped), self._least.transpose(1, 2))
        worth = bound.mul_(scale).softmax(-1).sum(1)
        # one more than needed: the last page may be among them, and not full
        wanted = min(-(-count // self._page_tokens) + 1, worth.shape[1])
        pages = worth.topk(wanted, dim=-1).indices
        slots = torch.arange(self._page_tokens)
        numbers = pages[..., None] * self._page_tokens + slots
        numbers = numbers.masked_fill(numbers >= self._tokens, -1)
        return tokens_of_pages(numbers, count)


class Quest(Retriever):
    """Fetch the pages whose keys could get most attention (arXiv:2406.10774).

    A page's bound for a query is the sum over channels of the larger of q * min
    and q * max (section 3.3 there). Differs from the paper: its cache stays on the
    device, this one's lies on the host; queries that share a KV head add up their
    softmax over the bounds (the paper has no GQA).

    Cost: per step and selecting layer one pass over two vectors per page.
    """

    name: ClassVar[str] = "quest"
    summary: ClassVar[str] = "nothing dropped; fetches pages by bounds of their keys"

    page_tokens: int = Field(default=16, ge=1, description="Tokens per page.")

    def new_index(self, num_kv_heads: int, head_dim: int) -> TokenIndex:
        return PageBounds(num_kv_heads, head_dim, self.page_tokens)
