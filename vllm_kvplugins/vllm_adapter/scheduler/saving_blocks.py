"""Blocks of ended requests that workers still copy to host memory.

::

    a request ends      the scheduler holds its blocks, and sends the command to save
    next step           a thread of each worker begins to copy; the model computes
    later steps         all workers have acknowledged: the blocks are free
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class SavingBlocks:
    """Keeps blocks from being reused until all workers have copied them.

    Args:
        pool: vLLM's block pool.
        ranks: number of workers.
    """

    def __init__(self, pool: Any, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._blocks: dict[str, list[Any]] = {}
        self._acks_due: dict[str, int] = {}

    def __len__(self) -> int:
        """Number of sessions that are being saved."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[str]:
        """IDs of these sessions."""
        return iter(self._blocks)

    def hold(self, session_id: str, blocks: Sequence[Any]) -> None:
        """Hold blocks, besides the request that will free them."""
        self._pool.touch(blocks)
        self._blocks[session_id] = list(blocks)
        self._acks_due[session_id] = self._ranks

    def acknowledge(self, session_id: str) -> None:
        """A worker has copied its part, or has failed. Others are ignored."""
        if session_id not in self._acks_due:
            return
        self._acks_due[session_id] -= 1
        if not self._acks_due[session_id]:
            self.release(session_id)

    def release(self, session_id: str) -> None:
        """The blocks of a session can be reused, even if workers still read them.

        It must have left the directory, so that nobody continues it.
        """
        del self._acks_due[session_id]
        # As vLLM frees a request: the end of a cached prefix is evicted first.
        self._pool.free_blocks(reversed(self._blocks.pop(session_id)))
