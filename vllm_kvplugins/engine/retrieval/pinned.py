"""Host memory that a GPU reads directly: pinned chunk by chunk, as it fills."""

from __future__ import annotations

import logging
import mmap
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm_kvplugins.errors import coded
from vllm_kvplugins.ops import host_fetch
from vllm_kvplugins.ops.device import Reads

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")

CHUNK_BYTES = 128 << 20


class PinnedArena:
    """A byte buffer on the host whose used part is pinned.

    Pinning commits physical memory, so pinning the whole buffer would take the full
    limit at start-up. A thread pins the next chunk in advance.

    Args:
        num_bytes: size of the buffer.
        device: the GPU.

    Attributes:
        memory: uint8 [num_bytes], aligned to the operating system's pages.
        reads: the reads that the GPU has not finished.
        complete: whether the whole used part is pinned. Never becomes true again.

    Raises:
        RuntimeError: the device cannot read host memory, or the first chunk cannot be
            pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        problem = host_fetch.direct_problem(device)
        if problem is not None:
            raise RuntimeError(f"host memory cannot be read directly: {problem}")
        page_bytes = mmap.PAGESIZE
        whole = -(-num_bytes // page_bytes) * page_bytes
        room = torch.empty(whole + page_bytes, dtype=torch.uint8)
        start = -room.data_ptr() % page_bytes
        room = room[start : start + whole]
        self.memory = room[:num_bytes]
        self.reads = Reads(device)
        self.complete = True
        self._device = device
        self._chunks = room.split(CHUNK_BYTES) if whole else ()
        self._pinned: list[torch.Tensor] = []
        self._next: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvp-pin")
        # Not __del__: at interpreter exit, torch may be unloaded first.
        self._release = weakref.finalize(
            self, _release, self._pinned, self.reads, self._thread
        )
        problem = self._cover(1)
        if problem is not None:
            self.close()
            raise RuntimeError(f"host memory cannot be pinned: {problem}")

    def cover(self, num_bytes: int) -> None:
        """Pin the first ``num_bytes`` bytes, and start to pin the next chunk."""
        problem = self._cover(-(-num_bytes // CHUNK_BYTES)) if self.complete else None
        if problem is None:
            return
        # Pinned chunks stay pinned: another thread may be queueing a read of one.
        self.complete = False
        logger.warning(
            "KV policy: cannot pin more than %d MiB of host memory (%s); tokens are "
            "fetched as with host_fetch 'staged' from now on",
            sum(map(len, self._pinned)) >> 20,
            problem,
        )

    def cover_all(self) -> None:
        """Pin the whole buffer, before anything reads it.

        Raises:
            RuntimeError: it cannot be pinned; the buffer is closed.

        Cost: allocates the physical memory of the whole buffer.
        """
        problem = self._cover(len(self._chunks))
        if problem is not None:
            self.close()
            raise RuntimeError(
                coded(
                    "KVP033",
                    f"{len(self.memory) >> 20} MiB of host memory cannot be pinned: "
                    f"{problem}; lower host_memory, allow this process to lock more "
                    "memory (ulimit -l), or let the host select tokens",
                )
            )

    def _cover(self, count: int) -> str | None:
        """Pin the first ``count`` chunks; return the problem, if any."""
        count = min(count, len(self._chunks))
        while len(self._pinned) < count or self._next_is_pinned():
            pinning, self._next = self._next or self._pin_next(), None
            try:
                pinning.result()
            except (ValueError, RuntimeError) as error:
                return str(error)
        if self._next is None and len(self._pinned) == count < len(self._chunks):
            self._next = self._pin_next()
        return None

    def _next_is_pinned(self) -> bool:
        return self._next is not None and self._next.done()

    def _pin_next(self) -> Future[None]:
        chunk = self._chunks[len(self._pinned)]
        return self._thread.submit(_pin, chunk, self._device, self._pinned)

    def close(self) -> None:
        """Unpin all chunks after their last read. Further calls do nothing."""
        self.complete = False
        self._release()


def _pin(chunk: torch.Tensor, device: torch.device, pinned: list[torch.Tensor]) -> None:
    host_fetch.pin(chunk, device)
    pinned.append(chunk)


def _release(
    pinned: list[torch.Tensor], reads: Reads, thread: ThreadPoolExecutor
) -> None:
    thread.shutdown()
    reads.wait()
    while pinned:
        host_fetch.unpin(pinned.pop())
