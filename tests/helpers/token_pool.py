"""The transfer of a worker without a pool: a request's cache is its tokens."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.sessions.commands import Tokens
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart

PAGE = 64


def snapshot(tokens: Tokens, compaction: Compaction | None) -> CacheSnapshot:
    """Pages that consist of the tokens whose cache they are."""
    part = HeapPart(
        counts=torch.zeros(1, dtype=torch.int64),
        positions=torch.zeros(1, 0, dtype=torch.int32),
        retained=torch.zeros(0, PAGE, dtype=torch.uint8),
        tail=torch.from_numpy(tokens.copy()).view(torch.uint8)[None],
        layout="l",
    )
    return CacheSnapshot(len(tokens), compaction, (part,))


class Pool:
    """The transfer of a worker, without a pool: a request's cache is its tokens.

    Attributes:
        caches: tokens of the requests that end in this step.
        restored: tokens that each request got.
    """

    def __init__(self) -> None:
        self.caches: dict[str, Tokens] = {}
        self.restored: dict[str, Tokens] = {}
        self.fails = False

    def save(self, request: str, compaction: Any, *arguments: Any) -> CacheSnapshot:
        if self.fails:
            raise MemoryError("none left")
        return snapshot(self.caches.pop(request), compaction)

    def restore(
        self, request: str, prompt: int, saved: CacheSnapshot, tokens: int, *rest: Any
    ) -> None:
        if self.fails:
            raise MemoryError("none left")
        cache = saved.parts[0].tail.reshape(-1).view(torch.int32).numpy()
        self.restored[request] = cache[:tokens].copy()

    def mismatch(self, saved: CacheSnapshot) -> str | None:
        return None

    def discard(self, saved: CacheSnapshot) -> None:
        """Nothing to free."""
