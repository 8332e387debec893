"""Host memory that a simulated GPU reads directly.

The read may happen late: the data must not change between the call and the wait for it.
Refuses memory that is not pinned, pinned twice, or no longer pinned.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any, NamedTuple, cast

import torch

from vllm_kvplugins.engine.retrieval import device_selector
from vllm_kvplugins.ops import host_fetch, hot_set, torch_ops
from vllm_kvplugins.ops.layout import PagedKV, PageLayout

# Functions that SimulatedHost replaces: the module that looks each up, and its name.
HOST_SEAMS = [
    (host_fetch, "pin"),
    (host_fetch, "unpin"),
    (host_fetch, "direct_problem"),
    (hot_set, "fetch_tokens"),
    (device_selector, "fetch_rows"),
]


class Read(NamedTuple):
    """A read of host rows, with their contents at the time of the call."""

    rows: torch.Tensor
    ids: torch.Tensor
    contents: torch.Tensor


class SimulatedHost:
    """Host memory of the simulated GPU.

    Attributes:
        pinned: length of each pinned region by address, in the order of pinning.
        room: maximum number of pinned bytes; more fails like a CUDA driver.
        freed: total number of unpinned bytes.
        quick: pinning waits until this event is set.
        fetches: number of reads that were started.
    """

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.room = 1 << 40
        self.freed = self.fetches = 0
        self.quick = threading.Event()
        self.quick.set()
        self._reads: dict[int, Read] = {}
        self._lock = threading.Lock()

    def direct_problem(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"{device} is no GPU"

    def pin(self, memory: torch.Tensor, device: torch.device) -> None:
        assert device.type == "cuda"
        assert self.quick.wait(30)
        first, size = memory.data_ptr(), memory.nbytes
        assert first % mmap.PAGESIZE == size % mmap.PAGESIZE == 0
        for at, length in self.pinned.items():
            assert first + size <= at or at + length <= first, "pinned twice"
        if sum(self.pinned.values()) + size > self.room:
            raise ValueError("kvp.pin_host: cudaErrorMemoryAllocation, out of memory")
        self.pinned[first] = size

    def unpin(self, memory: torch.Tensor) -> None:
        assert not self._reads, "the GPU still reads this memory"
        assert self.pinned.pop(memory.data_ptr()) == memory.nbytes
        self.freed += memory.nbytes

    def fetch_tokens(
        self,
        kv: PagedKV,
        pages: Any,
        slots: Any,
        rows: torch.Tensor,
        key_rows: Any,
        value_rows: Any,
    ) -> None:
        places = pages.numbers, slots.numbers
        self._read(kv, places, rows, key_rows.numbers, value_rows.numbers)

    def fetch_rows(
        self, kv: PagedKV, host_pages: torch.Tensor, rows: Any, pages: Any, slots: Any
    ) -> None:
        new = rows.numbers >= 0
        keys = rows.numbers[new]
        flat = host_pages.view(-1, host_pages.shape[3])
        places = pages.numbers[new], slots.numbers[new]
        self._read(kv, places, flat, keys, keys + host_pages.shape[2])

    def _read(
        self,
        kv: PagedKV,
        places: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor,
    ) -> None:
        assert type(rows) is torch.Tensor, "rows must be on the host"
        ids = torch.cat([key_rows, value_rows])
        contents = rows[ids]
        self._require_pinned(rows, ids)
        keys, values = contents.split(len(key_rows))
        # Later operations on the heap follow in the order of the stream.
        layout, heap = kv.layout, cast(Any, kv.pages)
        own = PageLayout(layout.block_size, layout.head_dim, *tables(layout))
        torch_ops.scatter_tokens(PagedKV(heap.numbers, own), *places, keys, values)
        stream = torch.cuda.current_stream(heap.device)
        with self._lock:
            self.fetches += 1
            self._reads[self.fetches] = Read(rows, ids, contents)
            stream.reads &= set(self._reads)
            stream.reads.add(self.fetches)

    def _require_pinned(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        size = rows.shape[1] * rows.itemsize
        first = rows.data_ptr() + ids * size
        inside = torch.zeros_like(ids)
        for at, length in self.pinned.items():
            stop = (first + size).clamp(max=at + length)
            inside += (stop - first.clamp(min=at)).clamp(min=0)
        assert bool((inside == size).all()), "the GPU reads memory that is not pinned"

    def under_way(self, reads: set[int]) -> bool:
        return not reads.isdisjoint(self._reads)

    def over(self, reads: set[int]) -> None:
        """End reads that the host has waited for; their rows must not have changed."""
        with self._lock:
            for number in reads & set(self._reads):
                read = self._reads.pop(number)
                current = read.rows[read.ids]
                # Compare bits, because memory that was never written may be NaN.
                assert current.view(torch.uint8).equal(
                    read.contents.view(torch.uint8)
                ), "the host wrote to memory that the GPU was still reading"

    def finish(self) -> None:
        """End all reads."""
        self.over(set(self._reads))


def tables(layout: PageLayout) -> list[torch.Tensor]:
    """Offsets of a page layout, as CPU tensors."""
    return [
        getattr(table, "numbers", table)
        for table in (layout.k_offsets, layout.v_offsets)
    ]
