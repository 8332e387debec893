"""Memory of the host that a GPU reads by itself: pinned piece by piece, as it fills."""

from __future__ import annotations

import logging
import mmap
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm_kvplugins.ops import host_fetch
from vllm_kvplugins.ops.device import Reads

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")

CHUNK_BYTES = 128 << 20


class PinnedArena:
    """Bytes of the host whose first ones are pinned, as many as are needed.

    Pinning gives memory its physical pages, so pinning all of it at once would cost a
    server the whole of its limit at start-up. The chunk behind those that are needed is
    pinned beside what follows, on a thread of its own.

    Args:
        num_bytes: how many, at most.
        device: the GPU.

    Attributes:
        memory: uint8 [num_bytes], at a border of the operating system's pages.
        reads: what the GPU still reads of it.
        complete: whether all that is needed is pinned; once it is not, it stays so.

    Raises:
        RuntimeError: the device cannot read the host's memory, or already the first
            chunk cannot be pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        problem = host_fetch.direct_problem(device)
        if problem is not None:
            raise RuntimeError(f"host memory cannot be read directly: {problem}")
        border = mmap.PAGESIZE
        whole = -(-num_bytes // border) * border
        room = torch.empty(whole + border, dtype=torch.uint8)
        start = -room.data_ptr() % border
        room = room[start : start + whole]
        self.memory = room[:num_bytes]
        self.reads = Reads(device)
        self.complete = True
        self._device = device
        self._chunks = room.split(CHUNK_BYTES) if whole else ()
        self._pinned: list[torch.Tensor] = []
        self._coming: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvp-pin")
        # Not __del__: when the interpreter ends, torch may be gone before it.
        self._let_go = weakref.finalize(
            self, _let_go, self._pinned, self.reads, self._thread
        )
        problem = self._cover(1)
        if problem is not None:
            self.close()
            raise RuntimeError(f"host memory cannot be pinned: {problem}")

    def cover(self, num_bytes: int) -> None:
        """Have so many first bytes pinned, and the next chunk soon."""
        problem = self._cover(-(-num_bytes // CHUNK_BYTES)) if self.complete else None
        if problem is None:
            return
        # What is pinned stays so: another thread may be ordering a read of it.
        self.complete = False
        logger.warning(
            "KV policy: %d MiB of host memory are pinned and no more can be (%s); from "
            "now on tokens are fetched as with host_fetch 'staged'",
            sum(map(len, self._pinned)) >> 20,
            problem,
        )

    def _cover(self, count: int) -> str | None:
        """So many chunks; the problem, if there is one."""
        count = min(count, len(self._chunks))
        while len(self._pinned) < count or self._coming_is_over():
            coming, self._coming = self._coming or self._begin(), None
            try:
                coming.result()
            except (ValueError, RuntimeError) as error:
                return str(error)
        if self._coming is None and len(self._pinned) == count < len(self._chunks):
            self._coming = self._begin()
        return None

    def _coming_is_over(self) -> bool:
        return self._coming is not None and self._coming.done()

    def _begin(self) -> Future[None]:
        chunk = self._chunks[len(self._pinned)]
        return self._thread.submit(_pin, chunk, self._device, self._pinned)

    def close(self) -> None:
        """Unpin all, behind everything that still reads it; then it is plain memory. A
        second call does nothing."""
        self.complete = False
        self._let_go()


def _pin(chunk: torch.Tensor, device: torch.device, pinned: list[torch.Tensor]) -> None:
    host_fetch.pin(chunk, device)
    pinned.append(chunk)


def _let_go(
    pinned: list[torch.Tensor], reads: Reads, thread: ThreadPoolExecutor
) -> None:
    thread.shutdown()
    reads.wait()
    while pinned:
        host_fetch.unpin(pinned.pop())
