"""The host tier: pages of keys and values that are not resident, in host memory."""

from __future__ import annotations

import torch


class HostTier:
    """One arena of pages for all requests, layers and KV heads of a worker.

    A page holds keys and values of ``page_tokens`` tokens of one KV head. The arena
    is reserved at once and touched as it fills, so that it costs what is used; freed
    pages are used again first.

    Args:
        limit_bytes: most memory of all pages together.
        page_tokens: tokens per page.
        head_dim: elements per key and per value.
        dtype: the cache's.
    """

    def __init__(
        self, limit_bytes: int, page_tokens: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.page_bytes = 2 * page_tokens * head_dim * dtype.itemsize
        count = limit_bytes // self.page_bytes
        # [num_pages, 2 (keys, values), page_tokens, head_dim]
        self.pages = torch.empty(count, 2, page_tokens, head_dim, dtype=dtype)
        self._fresh = 0
        self._returned: list[torch.Tensor] = []
        self._num_returned = 0

    @property
    def page_tokens(self) -> int:
        return int(self.pages.shape[2])

    @property
    def keys(self) -> torch.Tensor:
        """[num_pages, page_tokens, head_dim], a view."""
        return self.pages[:, 0]

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self.pages) - self._fresh + self._num_returned

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that requests own."""
        return int((len(self.pages) - self.num_free) * self.page_bytes)

    def take(self, count: int) -> torch.Tensor:
        """int64 [count]: ids of pages that are the caller's from now on.

        Raises:
            RuntimeError: there are not so many; nothing was taken.
        """
        if count > self.num_free:
            raise RuntimeError(
                f"the host tier has {self.num_free} free pages, {count} are wanted"
            )
        parts, missing = [], count
        while missing and self._returned:
            last = self._returned.pop()
            if len(last) > missing:
                self._returned.append(last[missing:])
                last = last[:missing]
            parts.append(last)
            missing -= len(last)
        self._num_returned -= count - missing
        parts.append(torch.arange(self._fresh, self._fresh + missing))
        self._fresh += missing
        return torch.cat(parts)

    def give(self, pages: torch.Tensor) -> None:
        """Return pages; nobody reads them any more."""
        if len(pages):
            self._returned.append(pages)
            self._num_returned += len(pages)

    def write(
        self, table: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store tokens of a request and layer.

        Args:
            table: int64 [num_kv_heads, pages], where they belong.
            first: number of the first one.
            keys, values: [num_kv_heads, n, head_dim].
        """
        token = torch.arange(first, first + keys.shape[1])
        page, slot = table[:, token // self.page_tokens], token % self.page_tokens
        self.pages[page, 0, slot] = keys
        self.pages[page, 1, slot] = values

    def check_integrity(self, owned: list[torch.Tensor]) -> None:
        """Every page is free or owned, and that once.

        Args:
            owned: pages of all who have any.
        """
        ids = torch.cat([*owned, *self._returned, torch.empty(0, dtype=torch.int64)])
        assert ids.unique().numel() == ids.numel(), "a host page has two owners"
        assert ids.numel() == self._fresh, "a host page is lost"


def default_limit_bytes() -> int:
    """Half of the memory that is free now."""
    import psutil

    return int(psutil.virtual_memory().available // 2)
