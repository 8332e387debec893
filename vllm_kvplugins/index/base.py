"""What every key index can do, and what its answers look like."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from vllm_kvplugins.index.keys import Keys


class TopKeys(NamedTuple):
    """The best keys of every query, best first; equal scores by ascending slot.

    Args:
        slots: int64 [..., heads, group, k]; -1 where there are fewer than k keys.
        scores: float32 of that shape, query . key without scale; -inf for -1.
        visits: int64 [..., heads, group], keys that were looked at.
    """

    slots: torch.Tensor
    scores: torch.Tensor
    visits: torch.Tensor


class Pages(NamedTuple):
    """The pages that hold the best keys, for all queries of a KV head together.

    Args:
        pages: int64 [..., heads, max_pages], the page of a best key before that of
            a second-best; -1 behind the last.
        counts: int64 [..., heads], pages found.
    """

    pages: torch.Tensor
    counts: torch.Tensor


class KeyIndex(Protocol):
    """An index over the keys of one request and layer: a tree for each KV head.

    A *slot* numbers the keys of a head in the order of arrival; a *place* is
    ``page * page_size + slot in page``, where the index wants the key stored. A
    key never changes its place.
    """

    num_heads: int
    head_dim: int
    page_size: int

    def build(self, keys: Keys, count: int | None = None) -> None:
        """Index the first ``count`` keys of every head; the index must be empty."""

    def insert(self, keys: Keys, count: int | None = None) -> None:
        """Add the first ``count`` keys described (only new ones) to every head."""

    def query_topk(
        self, queries: torch.Tensor, keys: Keys, k: int, max_visits: int | None = None
    ) -> TopKeys:
        """The keys with the largest dot products, for each query."""

    def query_pages(
        self,
        queries: torch.Tensor,
        keys: Keys,
        k: int,
        max_pages: int,
        max_visits: int | None = None,
    ) -> Pages:
        """The pages of those keys, for each KV head."""

    def places(self, first: int = 0) -> torch.Tensor:
        """int64 [heads, num_keys - first]: places of slots ``first`` and later."""

    def check_integrity(self, keys: Keys) -> None:
        """Raise AssertionError if the index is not what it promises to be."""

    @property
    def num_keys(self) -> int:
        """Keys per head."""

    @property
    def num_pages(self) -> list[int]:
        """Pages of each head."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the index holds; keys are not among them."""

    def close(self) -> None:
        """Free it; also done when the object is collected."""
