"""The host tier: pages of keys and values that are not resident, in host memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.engine.retrieval.pinned import PinnedArena
from vllm_kvplugins.ops.device import Reads

if TYPE_CHECKING:
    from vllm_kvplugins.engine.heap import Heap
    from vllm_kvplugins.policies.retrieval import Retriever


class HostTier:
    """One arena of pages for all requests, layers and KV heads of a worker.

    A page holds keys and values of ``page_tokens`` tokens of one KV head. The arena
    is reserved at once and touched as it fills, so that it costs what is used; freed
    pages are used again first.

    Where a GPU reads pages itself, it does so some time after it was told to. What is
    returned meanwhile rests until that is over: nobody gets it, so nobody writes there.

    Args:
        limit_bytes: most memory of all pages together.
        page_tokens: tokens per page.
        head_dim: elements per key and per value.
        dtype: the cache's.
        reader: a GPU that reads pages itself; they are pinned before anybody gets them.

    Raises:
        RuntimeError: the reader cannot, or nothing can be pinned.
    """

    def __init__(
        self,
        limit_bytes: int,
        page_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        reader: torch.device | None = None,
    ) -> None:
        self.page_bytes = 2 * page_tokens * head_dim * dtype.itemsize
        count = limit_bytes // self.page_bytes
        # [num_pages, 2 (keys, values), page_tokens, head_dim]
        shape = count, 2, page_tokens, head_dim
        self._arena: PinnedArena | None = None
        if reader is None:
            self.pages = torch.empty(shape, dtype=dtype)
        else:
            self._arena = PinnedArena(count * self.page_bytes, reader)
            self.pages = self._arena.memory.view(dtype).view(shape)
        self._fresh = 0
        # behind which work of the GPU they are returned
        self._resting: deque[tuple[list[torch.cuda.Event], torch.Tensor]] = deque()
        self._num_resting = 0
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
        returned = self._num_returned + self._num_resting
        return len(self.pages) - self._fresh + returned

    @property
    def reads(self) -> Reads | None:
        """What the GPU reads of the pages itself; None: it must not, they go through a
        staging buffer."""
        arena = self._arena
        return arena.reads if arena is not None and arena.complete else None

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that requests own."""
        return int((len(self.pages) - self.num_free) * self.page_bytes)

    def take(self, count: int) -> torch.Tensor:
        """int64 [count]: ids of pages that are the caller's from now on.

        Raises:
            RuntimeError: there are not so many; nothing was taken.

        Cost: waits for a GPU only if all that is left is what it still reads, and for
            pinning if that is not done.
        """
        if count > self.num_free:
            raise RuntimeError(
                f"the host tier has {self.num_free} free pages, {count} are wanted"
            )
        self._wake(count)
        parts, missing = [], count
        while missing and self._returned:
            last = self._returned.pop()
            if len(last) > missing:
                self._returned.append(last[missing:])
                last = last[:missing]
            parts.append(last)
            missing -= len(last)
        self._num_returned -= count - missing
        if self._arena is not None:
            self._arena.cover((self._fresh + missing) * self.page_bytes)
        parts.append(torch.arange(self._fresh, self._fresh + missing))
        self._fresh += missing
        return torch.cat(parts)

    def _wake(self, count: int) -> None:
        """Let go of what the GPU has read; wait for it if too little else is free."""
        while self._resting:
            events, pages = self._resting[0]
            late = [event for event in events if not event.query()]
            if late and len(self.pages) - self._fresh + self._num_returned >= count:
                return
            for event in late:
                event.synchronize()
            self._resting.popleft()
            self._num_resting -= len(pages)
            self._put_back(pages)

    def give(self, pages: torch.Tensor) -> None:
        """Return pages; nobody reads them any more, but for the GPU what it was told to
        read until now."""
        if not len(pages):
            return
        events = self._arena.reads.so_far() if self._arena is not None else []
        if events:
            self._resting.append((events, pages))
            self._num_resting += len(pages)
        else:
            self._put_back(pages)

    def _put_back(self, pages: torch.Tensor) -> None:
        self._returned.append(pages)
        self._num_returned += len(pages)

    def close(self) -> None:
        """Nobody will fetch from it; waits for the GPU, if that reads it."""
        if self._arena is not None:
            self._arena.close()

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

    def read_keys(self, table: torch.Tensor, tokens: range) -> torch.Tensor:
        """A copy of what was stored: [num_kv_heads, n, head_dim]; see ``write``."""
        token = torch.arange(tokens.start, tokens.stop)
        page, slot = table[:, token // self.page_tokens], token % self.page_tokens
        return self.pages[page, 0, slot]

    def check_integrity(self, owned: list[torch.Tensor]) -> None:
        """Every page is free or owned, and that once.

        Args:
            owned: pages of all who have any.
        """
        free = [*self._returned, *(pages for _, pages in self._resting)]
        ids = torch.cat([*owned, *free, torch.empty(0, dtype=torch.int64)])
        assert ids.unique().numel() == ids.numel(), "a host page has two owners"
        assert ids.numel() == self._fresh, "a host page is lost"


def tier_for(policy: Retriever, heap: Heap, share: float) -> HostTier:
    """The host tier of a worker, as its policy is set.

    Args:
        share: this worker's part of the policy's host memory.
    """
    limit = policy.host_memory_bytes or default_limit_bytes()
    return HostTier(
        int(limit * share),
        policy.host_page_tokens,
        heap.layout.head_dim,
        heap.pages.dtype,
        heap.pages.device if policy.host_fetch == "direct" else None,
    )


def default_limit_bytes() -> int:
    """Half of the memory that is free now."""
    import psutil

    return int(psutil.virtual_memory().available // 2)
