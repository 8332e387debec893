"""The contract of a key index, and the results of its queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from vllm_kvplugins.index.keys import Keys


class KeyIndex(ABC):
    """An index over the offloaded keys of one request and layer.

    The tree, the exact scans and the page and quantized indices of the retrieval
    policies implement it; the engine calls nothing else. Tokens are numbered in the
    order in which they were appended, from 0. An index stores no keys: ``select``
    reads them in place.
    """

    @abstractmethod
    def append(self, keys: torch.Tensor, first: int) -> None:
        """Add the keys of new tokens; the first call builds the index.

        May run on another thread. Two calls never overlap.

        Args:
            keys: float32, float16 or bfloat16 [num_kv_heads, n, head_dim], after
                RoPE, on the CPU; only the new tokens.
            first: number of the first new token, which is how many tokens the index
                has.

        Raises:
            ValueError, RuntimeError: the index cannot take these keys, for example
                because one is not finite. The engine then scans all keys instead.
        """

    @abstractmethod
    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens that some queries attend to most.

        Args:
            queries: [num_kv_heads, group, head_dim], after RoPE: all queries that
                share a KV head, of one new token or of several.
            keys: the memory of the appended keys, of one request. They equal the
                appended keys.
            scale: softmax scale.
            count: tokens per KV head.

        Returns:
            int64 [num_kv_heads, count] token numbers, distinct in each row, best
            first; -1 where the index finds fewer.

        Raises:
            ValueError, RuntimeError: as for ``append``.
        """

    def keep_first(self, tokens: int) -> int:
        """Forget the newest tokens: the session of a request is continued earlier.

        Overridden where forgetting is cheaper than building a new index. Never runs at
        the same time as ``append``.

        Args:
            tokens: number of first tokens that stay, below the number of appended ones.

        Returns:
            How many first tokens the index has from now on, at most ``tokens``. The
            engine appends the others again, in one call. The index equals one that got
            its tokens by the same calls, cut off there. 0: it has not changed, and the
            engine builds a new one.
        """
        return 0


class PageIndex(KeyIndex):
    """A :class:`KeyIndex` that also selects whole pages of :data:`PAGE_TOKENS` keys.

    Row r of a KV head is the place of a key in the order of pages; page p has rows
    ``PAGE_TOKENS * p`` and later. The engine stores keys and values in the order of
    rows, so that a page is copied at once. A key changes its row at most once.
    """

    @abstractmethod
    def select_pages(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """The full pages that some queries attend to most.

        Args:
            queries, scale: see :meth:`select`.
            keys: the memory of the appended keys, in the order of rows.
            count: pages per KV head.

        Returns:
            int64 [num_kv_heads, count] page numbers, distinct in each row, best first;
            -1 only where there are fewer full pages.
        """

    @abstractmethod
    def order(self, first: int) -> torch.Tensor:
        """int64 [num_kv_heads, n]: the tokens of rows ``first``, ``first + 1``, ...
        that are in the order of pages for good; rows behind them are in the order of
        arrival."""


# Tokens per page of a PageIndex.
PAGE_TOKENS = 8


class TopKeys(NamedTuple):
    """The best keys of every query, best first; equal scores by ascending slot.

    Attributes:
        slots: int64 [..., heads, group, k]; -1 where there are fewer than k keys.
        scores: float32 of that shape, query . key without scale; -inf for -1.
        visits: int64 [..., heads, group], number of keys scored.
    """

    slots: torch.Tensor
    scores: torch.Tensor
    visits: torch.Tensor


class Pages(NamedTuple):
    """The pages that hold the best keys, for all queries of a KV head together.

    Attributes:
        pages: int64 [..., heads, max_pages]; the page of a best key precedes that of
            a second-best key. -1 after the last page.
        counts: int64 [..., heads], number of pages.
    """

    pages: torch.Tensor
    counts: torch.Tensor
