"""Sessions that workers copy to free blocks before a request starts.

::

    a request waits     its session is in host memory: blocks are allocated for it
    next step           a thread of each worker begins to copy; the model computes
    later steps         all workers have acknowledged: the request starts in place
                        (``device_sessions``)

Without this, all running requests would wait for the copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_kvplugins.vllm_adapter.scheduler.device_sessions import DeviceSessions

# Smaller sessions are copied in less time than the step that would have to follow.
MIN_BYTES = 64 << 20


@dataclass(slots=True)
class _Placing:
    blocks: list[Any]
    acks_due: int
    has_failed: bool = False


class PlacedSessions:
    """Allocates blocks for sessions, and gives them to ``DeviceSessions`` when filled.

    Args:
        pool: vLLM's block pool.
        ranks: number of workers.
    """

    def __init__(self, pool: Any, ranks: int, device_sessions: DeviceSessions) -> None:
        self._pool = pool
        self._ranks = ranks
        self._device_sessions = device_sessions
        self._placing: dict[str, _Placing] = {}
        self._tried: set[str] = set()  # request IDs

    def __len__(self) -> int:
        """Number of sessions that are being copied."""
        return len(self._placing)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._placing

    def was_tried(self, request_id: str) -> bool:
        """Whether a session was placed for a request that has not started yet."""
        return request_id in self._tried

    def begin(self, session_id: str, request_id: str, num_blocks: int) -> list[int]:
        """Allocate the blocks of a session; returns their physical IDs."""
        blocks = self._pool.get_new_blocks(num_blocks)
        self._placing[session_id] = _Placing(blocks, self._ranks)
        self._tried.add(request_id)
        return [block.block_id for block in blocks]

    def acknowledge(self, session_id: str, failed: bool, is_in_memory: bool) -> None:
        """A worker has filled its part of the blocks, or has failed.

        Args:
            is_in_memory: whether the session can still be continued.
        """
        placing = self._placing[session_id]
        placing.acks_due -= 1
        placing.has_failed |= failed
        if placing.acks_due:
            return
        del self._placing[session_id]
        if placing.has_failed or not is_in_memory:
            self._pool.free_blocks(placing.blocks)
        else:
            self._device_sessions.keep(session_id, placing.blocks)

    def forget(self, request_id: str) -> None:
        """A request has started or ended."""
        self._tried.discard(request_id)
