"""The transfer of a worker without a pool: a request's cache is its tokens."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.commands import Tokens
from vllm_kvplugins.sessions.deltas import Lineage
from vllm_kvplugins.sessions.page_tokens import PageFormat
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart

BLOCK = 4  # tokens of a page
_ID_BYTES = 4


def snapshot(
    tokens: Tokens, compaction: Compaction | None, copies: int = 1
) -> CacheSnapshot:
    """Pages that consist of the tokens whose cache they are, each several times.

    A compaction keeps everything, but in another order, as compactions do.
    """
    kept = len(compaction.retained) * BLOCK if compaction else 0
    order = torch.from_numpy(np.random.default_rng(len(tokens)).permutation(kept))
    padded = np.zeros(-(-len(tokens) // BLOCK) * BLOCK, np.int32)
    padded[: len(tokens)] = tokens
    cache = torch.from_numpy(padded.repeat(copies)).view(torch.uint8)
    cache = cache.view(-1, copies * _ID_BYTES)
    part = HeapPart(
        counts=torch.tensor([kept // BLOCK]),
        positions=order.int()[None],
        retained=cache[:kept][order].reshape(-1, BLOCK * copies * _ID_BYTES),
        tail=cache[kept:].reshape(-1, BLOCK * copies * _ID_BYTES).clone(),
        layout="l",
    )
    return CacheSnapshot(len(tokens), compaction, (part,))


def num_bytes(tokens: Tokens, copies: int = 1) -> int:
    """Bytes of a snapshot."""
    return -(-len(tokens) // BLOCK) * BLOCK * copies * _ID_BYTES


def tokens_of(saved: CacheSnapshot) -> Tokens:
    """The tokens of which a snapshot consists."""
    (part,) = saved.parts
    kept = part.positions.shape[1]
    cache = torch.cat([part.retained.flatten(), part.tail.flatten()])
    cache = cache.view(-1, part.retained.shape[1] // BLOCK)
    found = cache.clone()
    found[part.positions[0].long()] = cache[:kept]
    copies = found.view(torch.int32)[: saved.tokens]
    assert (copies == copies[:, :1]).all(), "parts of different tokens"
    ids: Tokens = copies[:, 0].numpy()
    return ids


class CopiedCache:
    """A cache that a store takes when it has time.

    Args:
        pool: the copy waits for it, and fails if it has no memory then.
    """

    def __init__(self, saved: CacheSnapshot, pool: Pool | None = None) -> None:
        self.saved, self._pool = saved, pool
        self.num_bytes = saved.num_bytes

    def finish(self) -> CacheSnapshot:
        if self._pool is not None:
            assert self._pool.may_copy.wait(60)
            if self._pool.fails:
                raise MemoryError("none left")
        return self.saved


class PlacedCache:
    """A cache that a store copies to blocks when it has time."""

    def __init__(self, saved: CacheSnapshot, blocks: tuple[int, ...], pool: Pool):
        self._saved, self._blocks, self._pool = saved, blocks, pool

    def finish(self) -> tuple[torch.Tensor, ...]:
        assert self._pool.may_copy.wait(60)
        if self._pool.fails:
            raise MemoryError("none left")
        pages = len(self._saved.parts[0].retained)
        return (torch.tensor(self._blocks[:pages], dtype=torch.int64),)


class Pool:
    """The transfer of a worker, without a pool: a request's cache is its tokens.

    Args:
        copies: how often each token is in the cache. With a few, the tables of a
            reduced session are small beside it, as they are beside keys and values.

    Attributes:
        caches: tokens of the requests that end in this step.
        restored: tokens that each request got.
        continued: what each request has continued.
    """

    def __init__(self, copies: int = 1) -> None:
        self.copies = copies
        self.caches: dict[str, Tokens] = {}
        self.restored: dict[str, Tokens] = {}
        self.continued: dict[str, Lineage] = {}
        self.fails = False
        self.may_copy = threading.Event()  # otherwise copies take time
        self.may_copy.set()

    def save(self, request: str, compaction: Any, *arguments: Any) -> CopiedCache:
        if self.fails:
            raise MemoryError("none left")
        saved = snapshot(self.caches.pop(request), compaction, self.copies)
        saved.lineage = self.continued.pop(request, None)
        return CopiedCache(saved, self)

    def restore(
        self, request: str, prompt: int, saved: CacheSnapshot, tokens: int, *rest: Any
    ) -> None:
        if self.fails:
            raise MemoryError("none left")
        self.restored[request] = tokens_of(saved)[:tokens].copy()
        slots = tuple(part.slots for part in saved.parts)
        self.continued[request] = Lineage(
            saved.file, tokens, saved.tokens, saved.compaction, slots
        )

    def place(
        self, saved: CacheSnapshot, tokens: int, blocks: tuple[int, ...]
    ) -> PlacedCache:
        return PlacedCache(saved, blocks, self)

    def page_formats(self) -> tuple[PageFormat, ...]:
        elements = torch.arange(BLOCK * self.copies * _ID_BYTES).view(BLOCK, -1)
        return (PageFormat("l", elements),)

    def mismatch(self, saved: CacheSnapshot) -> str | None:
        return None

    def discard(self, saved: CacheSnapshot) -> None:
        """Nothing to free."""
