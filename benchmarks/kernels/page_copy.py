"""Bandwidth of the page copies: compiled, torch, and memcpy as the reference.

    OMP_NUM_THREADS=1 python benchmarks/kernels/page_copy.py

Each line is bytes read plus bytes written per second: the median of interleaved
repetitions and the range from the 10th to the 90th percentile. memcpy is
``Tensor.copy_`` of the same number of contiguous bytes. The heap is far larger than the
caches and each repetition picks new pages, so pages come from memory.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import _path  # noqa: F401
import torch

from vllm_kvplugins import ops
from vllm_kvplugins.ops.layout import PageLayout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def machine() -> str:
    """Processor, threads and versions, for the report's header."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return (
        f"{model}, {os.cpu_count()} CPUs, {torch.get_num_threads()} torch thread(s), "
        f"torch {torch.__version__}"
    )


def with_backend(backend: str, call: Callable[[], object]) -> Callable[[], object]:
    """Run ``call`` under ``KVP_OPS=backend``."""

    def run() -> object:
        os.environ["KVP_OPS"] = backend
        return call()

    return run


class Workload:
    """One heap, and new arguments for every repetition."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.dtype = DTYPES[options.dtype]
        make = (
            PageLayout.natural
            if options.layout == "natural"
            else PageLayout.transposed_keys
        )
        self.layout = make(options.block_size, options.head_dim)
        page_bytes = self.layout.page_elems * self.dtype.itemsize
        self.num_pages = max(8, options.heap_mib * 2**20 // page_bytes)
        self.heap = torch.zeros(self.num_pages, self.layout.page_elems).to(self.dtype)
        self.kv = ops.PagedKV(self.heap, self.layout)
        self.random = torch.Generator().manual_seed(options.seed)
        self.pages = self.num_pages // 4
        self.tokens = self.pages * options.block_size // 2
        self.draw()

    def draw(self) -> None:
        """Draw pages to gather and tokens to move.

        The moves are those of a compaction: half the slots of sources, sorted, into the
        smallest number of free pages.
        """
        order = torch.randperm(self.num_pages, generator=self.random)
        self.table = order[: self.pages].view(1, -1)
        block_size = self.layout.block_size
        slots = torch.randperm(self.pages * block_size, generator=self.random)
        kept = slots[: self.tokens].sort().values
        new = torch.arange(self.tokens)
        free = order[self.pages :]
        self.source = order[kept // block_size], kept % block_size
        self.target = free[new // block_size], new % block_size

    def gather_keys(self) -> torch.Tensor:
        return ops.gather_keys(self.kv, self.table)

    def move_tokens(self) -> None:
        ops.move_tokens(self.kv, *self.source, *self.target)

    def gather_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.gather_tokens(self.kv, *self.source)

    def cases(self) -> dict[str, tuple[int, dict[str, Callable[[], object]]]]:
        """Name -> (bytes read and written, implementation -> call)."""
        row = self.layout.head_dim * self.dtype.itemsize
        sizes = {
            "gather_keys": 2 * self.pages * self.layout.block_size * row,
            "gather_tokens": 4 * self.tokens * row,
            "move_tokens": 4 * self.tokens * row,
        }
        out = {}
        for name, size in sizes.items():
            call = getattr(self, name)
            source = torch.zeros(size // 2, dtype=torch.uint8)
            calls = {
                "compiled": with_backend("compiled", call),
                "torch": with_backend("torch", call),
                "memcpy": source.clone,
            }
            # writes into an existing tensor, as move_tokens does
            if name == "move_tokens":
                target = torch.zeros_like(source)
                calls["memcpy"] = lambda t=target, s=source: t.copy_(s)
            out[name] = size, calls
        return out


def measure(workload: Workload, repetitions: int) -> None:
    """Time all implementations in turns, so that drift affects them equally."""
    for name, (size, calls) in workload.cases().items():
        seconds: dict[str, list[float]] = {key: [] for key in calls}
        for repetition in range(repetitions + 2):
            workload.draw()
            for key, call in calls.items():
                start = time.perf_counter()
                call()
                if repetition >= 2:  # the first two warm up
                    seconds[key].append(time.perf_counter() - start)
        for key, times in seconds.items():
            rates = sorted(size / t / 1e9 for t in times)
            low, high = rates[len(rates) // 10], rates[-1 - len(rates) // 10]
            print(
                f"{name:14} {key:9} {statistics.median(rates):7.2f} GB/s "
                f"({low:.2f} to {high:.2f})  {size / 2**20:.0f} MiB moved"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--layout", choices=["natural", "transposed"], default="transposed"
    )
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heap-mib", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := ops.extension_info()["reason"]:
        raise SystemExit(f"nothing to compare: {reason}")
    print(f"command: python {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
    print(f"machine: {machine()}")
    print(
        f"{options.dtype}, keys {options.layout}, block size {options.block_size}, "
        f"head dim {options.head_dim}, heap {options.heap_mib} MiB"
    )
    measure(Workload(options), options.repetitions)


if __name__ == "__main__":
    main()
