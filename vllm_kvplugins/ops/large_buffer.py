"""Large buffers on the host, read at random places."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch


def large_buffer(num_bytes: int) -> torch.Tensor:
    """An uninitialised buffer that the kernel backs with huge pages if it can.

    Memory is committed as it is first written. Reads of single rows anywhere in
    gigabytes of small pages spend much of their time on address translation. Only Linux
    takes this advice per buffer, and only where huge pages are not disabled.

    Args:
        num_bytes: 0 or more.

    Returns:
        uint8 [num_bytes] on the CPU.
    """
    if not num_bytes or sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
