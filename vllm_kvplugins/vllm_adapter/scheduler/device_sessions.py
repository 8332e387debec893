"""Device-resident sessions: free blocks that still hold the pages of a session.

::

    vLLM's free queue   [ empty ... | prefix cache | kept here: oldest ... newest ]
    next allocation ────┘                                          └── newly freed

vLLM counts these blocks as free and allocates them after all blocks that were freed
earlier. A request that continues the session before then gets the blocks back, without
a copy. The session itself is in host memory, so vLLM can reuse the blocks at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DeviceSessions:
    """Records which free blocks hold which session.

    A session is first *pending*: its request has ended, but steps in flight may still
    read its blocks. Then it is *kept*: its blocks are free.

    Args:
        pool: vLLM's block pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._pending: dict[str, list[Any]] = {}
        self._kept: dict[str, list[Any]] = {}  # oldest first
        self._session_of: dict[int, str] = {}  # of kept blocks, by block id

    @staticmethod
    def can_keep(blocks: Sequence[Any]) -> bool:
        """Whether only the ending request uses these blocks.

        Blocks in the prefix cache are not kept: other requests may share them, and the
        request that continues the session would rewrite them.
        """
        return all(block.ref_cnt == 1 and block.block_hash is None for block in blocks)

    def add(self, session_id: str, blocks: Sequence[Any]) -> None:
        """Keep a request's blocks as soon as they are free, if they can be kept."""
        if self.can_keep(blocks):
            self._pending[session_id] = list(blocks)

    def keep_freed_blocks(self) -> None:
        """Keep the pending blocks that are free now.

        Call before vLLM allocates blocks in a step.
        """
        for session_id, blocks in list(self._pending.items()):
            if any(block.ref_cnt for block in blocks):
                continue
            self._kept[session_id] = self._pending.pop(session_id)
            self._session_of.update((b.block_id, session_id) for b in blocks)
            # Move them from the front of the free queue to its end.
            self._pool.touch(blocks)
            self._pool.unpin_blocks(blocks, self._on_block_reused)

    def __contains__(self, session_id: str) -> bool:
        """Whether blocks hold a session, or will when its steps in flight end."""
        return session_id in self._kept or session_id in self._pending

    def keep(self, session_id: str, blocks: Sequence[Any]) -> None:
        """Keep blocks that workers have filled; the caller has allocated them."""
        self._kept[session_id] = list(blocks)
        self._session_of.update((block.block_id, session_id) for block in blocks)
        self._pool.unpin_blocks(blocks, self._on_block_reused)

    def take(self, session_id: str, count: int) -> list[Any]:
        """Allocate the first ``count`` blocks of a kept session and forget it.

        Returns:
            The blocks; empty if the session is not kept.
        """
        blocks = self._forget(session_id)
        self._pool.touch(blocks[:count])
        self._free_first(blocks[count:])
        return blocks[:count]

    def drop(self, session_id: str) -> None:
        """Forget a session that has left host memory."""
        self._pending.pop(session_id, None)
        self._free_first(self._forget(session_id))

    @property
    def session_ids(self) -> list[str]:
        """Kept sessions, oldest first."""
        return list(self._kept)

    @property
    def num_blocks(self) -> int:
        """Free blocks that hold sessions."""
        return len(self._session_of)

    def check_integrity(self) -> None:
        """Each kept block is free and belongs to one session."""
        blocks = [block for kept in self._kept.values() for block in kept]
        assert {b.block_id for b in blocks} == set(self._session_of), "blocks differ"
        assert len(blocks) == len(self._session_of), "a block is in several sessions"
        used = [block.block_id for block in blocks if block.ref_cnt]
        assert not used, f"kept blocks that a request holds: {used}"

    def _on_block_reused(self, block: Any) -> None:
        """Forget a session when vLLM reuses one of its blocks or resets its cache.

        vLLM also calls this for blocks that are no longer kept.
        """
        session_id = self._session_of.get(block.block_id)
        if session_id is not None:
            # Its other blocks are the next ones in the free queue.
            self._forget(session_id)

    def _forget(self, session_id: str) -> list[Any]:
        blocks = self._kept.pop(session_id, [])
        for block in blocks:
            del self._session_of[block.block_id]
        return blocks

    def _free_first(self, blocks: list[Any]) -> None:
        """Move free blocks to the front of the queue; their pages are not needed."""
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)
