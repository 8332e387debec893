"""Pages of consecutive tokens, each with a digest of its keys."""

from __future__ import annotations

from abc import abstractmethod

import torch
from pydantic import Field

from vllm_kvplugins.index import KeyIndex, Keys
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.retrieval import Retriever, tokens_of_pages


class OrderedPages(KeyIndex):
    """Selects the pages with the largest upper bounds on attention.

    A page holds ``page_tokens`` consecutive tokens. Subclasses define the digest of a
    page and the upper bound that follows from it. The index keeps the keys of the last,
    partly filled page, so digests do not depend on how keys are split over calls.

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
        """Digests of pages.

        Args:
            pages: float32 [num_kv_heads, n, tokens per page, head_dim]; all pages have
                the same number of tokens.

        Returns:
            Any number of tensors [num_kv_heads, n, ...].
        """

    @abstractmethod
    def upper_bounds(self, queries: torch.Tensor) -> torch.Tensor:
        """Upper bound, or estimate, of the largest q . k in each page.

        Args:
            queries: float32 [num_kv_heads, group, head_dim].

        Returns:
            float32 [num_kv_heads, group, pages].
        """

    def append(self, keys: torch.Tensor, first: int) -> None:
        """Add digests of new pages; recompute that of the last, partly filled page."""
        size, full_before = self._page_tokens, first // self._page_tokens
        new_keys = torch.cat([self._open, keys.to(torch.float32)], 1)
        full = new_keys.shape[1] // size
        parts = [self.digest(new_keys[:, : full * size].unflatten(1, (full, size)))]
        self._open = new_keys[:, full * size :].clone()
        if self._open.shape[1]:
            parts.append(self.digest(self._open.unsqueeze(1)))
        self._digests = tuple(
            torch.cat([old[:, :full_before], *new], 1)
            for old, *new in zip(self._digests, *parts, strict=True)
        )
        self._tokens = first + keys.shape[1]

    def keep_first(self, tokens: int) -> int:
        """Keep full pages; the digest of a page that is cut would need its keys."""
        full = tokens // self._page_tokens
        if not full:
            return 0
        self._open = self._open[:, :0]
        self._digests = tuple(old[:, :full].clone() for old in self._digests)
        self._tokens = full * self._page_tokens
        return self._tokens

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """Select the tokens of the best pages.

        The score of a page is the softmax over upper bounds, summed over the queries
        of the group.

        Cost: O(group * tokens / page_tokens * head_dim) per KV head.
        """
        bounds = self.upper_bounds(queries.to(torch.float32))
        page_scores = bounds.mul_(scale).softmax(-1).sum(1)
        # One more page than needed, because the last page may be partly filled.
        num_pages = min(-(-count // self._page_tokens) + 1, page_scores.shape[1])
        pages = page_scores.topk(num_pages, dim=-1).indices
        slots = torch.arange(self._page_tokens)
        numbers = pages[..., None] * self._page_tokens + slots
        numbers = numbers.masked_fill(numbers >= self._tokens, -1)
        return tokens_of_pages(numbers, count)


class PageRetriever(Retriever):
    """Base class of policies that fetch pages of consecutive tokens."""

    page_tokens: int = Field(default=16, ge=1, description="Tokens per page.")

    def index_bytes(self, tokens: int, geometry: Geometry) -> int:
        # A digest is two float32 vectors: at most the size of two bfloat16 tokens.
        return -(-2 * self.offloaded_bytes(tokens, geometry) // self.page_tokens)
