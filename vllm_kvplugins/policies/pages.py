"""Pages in the order of the text, each known by a digest of its keys."""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field

from vllm_kvplugins.index import KeyIndex, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.retrieval import Retriever, tokens_of_pages


class OrderedPages(KeyIndex):
    """Runs of the text; finds the pages whose digests promise most attention.

    Subclasses say what a digest is and what it promises. The keys of the page that
    is not full are kept, so digests do not depend on the portions that keys came in.

    Args:
        page_tokens: tokens per page.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._tokens = 0
        self._open = torch.empty(num_kv_heads, 0, head_dim)
        none = torch.empty(num_kv_heads, 0, page_tokens, head_dim)
        self._digests = self.digest(none)

    @abstractmethod
    def digest(self, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What to know of some pages.

        Args:
            pages: float32 [num_kv_heads, n, tokens per page, head_dim], equally many
                tokens in each.

        Returns:
            Any number of tensors [num_kv_heads, n, ...].
        """

    @abstractmethod
    def promise(self, queries: torch.Tensor) -> torch.Tensor:
        """The largest q . k that each page may hold, by its digest.

        Args:
            queries: float32 [num_kv_heads, group, head_dim].

        Returns:
            float32 [num_kv_heads, group, pages].
        """

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Digests of the new pages; the one that was not full gets a new one."""
        size, known = self._page_tokens, first // self._page_tokens
        fresh = torch.cat([self._open, keys.to(torch.float32)], 1)
        full = fresh.shape[1] // size
        parts = [self.digest(fresh[:, : full * size].unflatten(1, (full, size)))]
        self._open = fresh[:, full * size :].clone()
        if self._open.shape[1]:
            parts.append(self.digest(self._open.unsqueeze(1)))
        self._digests = tuple(
            torch.cat([old[:, :known], *new], 1)
            for old, *new in zip(self._digests, *parts, strict=True)
        )
        self._tokens = first + keys.shape[1]

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens of the pages that promise most: per query a softmax over the
        promises, added up over queries and group.

        Cost: O(group * tokens / page_tokens * head_dim) per KV head.
        """
        worth = self.promise(queries.to(torch.float32)).mul_(scale).softmax(-1).sum(1)
        # one more than needed: the last page may be among them, and not full
        num_pages = min(-(-count // self._page_tokens) + 1, worth.shape[1])
        pages = worth.topk(num_pages, dim=-1).indices
        slots = torch.arange(self._page_tokens)
        numbers = pages[..., None] * self._page_tokens + slots
        numbers = numbers.masked_fill(numbers >= self._tokens, -1)
        return tokens_of_pages(numbers, count)


class PageRetriever(Retriever):
    """Base of policies that fetch such pages."""

    page_tokens: int = Field(default=16, ge=1, description="Tokens per page.")

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        stored = super().host_bytes(tokens, geometry)
        # a digest is two float32 vectors: at most two bfloat16 keys and values
        return stored + -(-2 * stored // self.page_tokens)
