"""Quest: pages in the order of the text, ranked by the bounds of their keys."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from vllm_kvplugins.policies.retrieval import Retriever, TokenIndex, tokens_of_pages


class PageBounds(TokenIndex):
    """Per page and channel the smallest and the largest key element.

    Args:
        page_tokens: tokens per page.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._least = torch.empty(num_kv_heads, 0, head_dim)
        self._most = torch.empty(num_kv_heads, 0, head_dim)

    def insert(self, keys: torch.Tensor, first: int) -> None:
        """Bounds of the new pages, and anew of the one that was not full."""
        size = self._page_tokens
        full = first // size
        fresh = keys[:, full * size :].to(torch.float32)
        missing = -fresh.shape[1] % size
        # the last page's empty slots repeat its first key, which bounds nothing new
        start = fresh.shape[1] - (size - missing)
        filler = fresh[:, start : start + 1].expand(-1, missing, -1)
        pages = torch.cat([fresh, filler], 1).unflatten(1, (-1, size))
        self._least = torch.cat([self._least[:, :full], pages.amin(2)], 1)
        self._most = torch.cat([self._most[:, :full], pages.amax(2)], 1)

    def select(
        self, queries: torch.Tensor, keys: torch.Tensor, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens of the pages with the largest bounds.

        Cost: O(num_q_heads * num_queries * tokens / page_tokens * head_dim).
        """
        heads, tokens, head_dim = keys.shape
        grouped = queries.reshape(heads, -1, head_dim).to(torch.float32)
        bound = torch.bmm(F.relu(grouped), self._most.transpose(1, 2))
        bound -= torch.bmm(F.relu(-grouped), self._least.transpose(1, 2))
        worth = bound.mul_(scale).softmax(-1).sum(1)
        # one more than needed: the last page may be among them, and not full
        wanted = min(-(-count // self._page_tokens) + 1, worth.shape[1])
        pages = worth.topk(wanted, dim=-1).indices
        slots = torch.arange(self._page_tokens)
        numbers = pages[..., None] * self._page_tokens + slots
        return tokens_of_pages(numbers.masked_fill(numbers >= tokens, -1), count)


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
