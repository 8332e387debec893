"""Blocks of requests that have ended, and still hold what sessions were saved from.

::

    free queue   [ empty ... | prefix cache | parked: oldest ... newest ]
    taken here ──┘                                          └── parked here

Parked blocks are free: vLLM counts them as such, and hands them out when it has none
that were given back before. A session that goes on before that gets its own back, and
nothing is copied. Its copy on the host is the truth, so they can go at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DeviceSessions:
    """Which blocks of a pool hold which sessions.

    Args:
        pool: vLLM's.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # of requests that end, and may have steps in flight that read them
        self._ending: dict[str, list[Any]] = {}
        self._lying: dict[str, list[Any]] = {}  # oldest first
        self._session_of: dict[int, str] = {}

    def add(self, session_id: str, blocks: Sequence[Any]) -> None:
        """Park a request's blocks as soon as it has given them back.

        Those that the prefix cache knows are left to it: others may share them, and
        the request that goes on would rewrite them.
        """
        if all(block.ref_cnt == 1 and block.block_hash is None for block in blocks):
            self._ending[session_id] = list(blocks)

    def settle(self) -> None:
        """Park what has been given back; call before anybody is given blocks."""
        for session_id, blocks in list(self._ending.items()):
            if any(block.ref_cnt for block in blocks):
                continue
            self._lying[session_id] = self._ending.pop(session_id)
            self._session_of.update((b.block_id, session_id) for b in blocks)
            # from the front of the queue to its end
            self._pool.touch(blocks)
            self._pool.unpin_blocks(blocks, self._reused)

    def take(self, session_id: str, count: int) -> list[Any]:
        """The first ``count`` blocks of a session, no longer free; the others hold
        nothing any more. Empty if it is not parked."""
        blocks = self._forget(session_id)
        self._pool.touch(blocks[:count])
        self._give_up(blocks[count:])
        return blocks[:count]

    def drop(self, session_id: str) -> None:
        """A session that is no longer on the host."""
        self._ending.pop(session_id, None)
        self._give_up(self._forget(session_id))

    @property
    def num_blocks(self) -> int:
        """Blocks that hold sessions."""
        return len(self._session_of)

    def check_integrity(self) -> None:
        """Each parked block is free, and holds one session."""
        blocks = [block for lying in self._lying.values() for block in lying]
        assert {b.block_id for b in blocks} == set(self._session_of), "not the same"
        assert len(blocks) == len(self._session_of), "blocks of several sessions"
        used = [block.block_id for block in blocks if block.ref_cnt]
        assert not used, f"parked blocks that somebody has: {used}"

    def _reused(self, block: Any) -> None:
        """Somebody else is given a block, or vLLM forgets all that blocks hold. Also
        called for blocks that were parked once and no longer are."""
        session_id = self._session_of.get(block.block_id)
        if session_id is not None:
            # its other blocks come next in the queue
            self._forget(session_id)

    def _forget(self, session_id: str) -> list[Any]:
        blocks = self._lying.pop(session_id, [])
        for block in blocks:
            del self._session_of[block.block_id]
        return blocks

    def _give_up(self, blocks: list[Any]) -> None:
        """To the front of the queue, before what others would miss."""
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)
