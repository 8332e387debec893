"""Bandwidth of copying many pages: in bulk, one by one, and memcpy as the reference.

    python benchmarks/kernels/gather.py --json-out gather.json

Each repetition picks random pages of a large arena. All implementations copy the same
number of bytes, in random order, so that drift of the machine affects all of them
equally. Before each call the benchmark overwrites other memory to empty the caches.
Every copied byte counts once, although it is read and written.

The reference is the C library's memcpy on the same number of contiguous bytes, one part
per thread. Shares of it are taken within a repetition. The arena does not use huge
pages, because an engine's memory rarely does.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _engine import kernel_provenance
from rich.console import Console
from rich.table import Table

from vllm_kvplugins import ops
from vllm_kvplugins.ops.layout import PageLayout

HEAD_DIM = 64
DTYPE = torch.bfloat16
WARM_UP = 2
MIB = 2**20


def memory(size: int) -> torch.Tensor:
    """`size` bytes of resident memory: unwritten pages would all map to one zero
    page."""
    return torch.empty(size, dtype=torch.uint8).fill_(1)


class Workload:
    """An arena of equal pages, a staging buffer, and the pages to copy."""

    def __init__(
        self, arena: torch.Tensor, page_bytes: int, total: int, threads: int, seed: int
    ) -> None:
        self.arena = arena.view(DTYPE).view(-1, page_bytes // DTYPE.itemsize)
        self.count = total // page_bytes
        self.threads = threads
        self.staging = memory(total).view(DTYPE).view(self.count, -1)
        self.dense = memory(total).view(DTYPE).view(self.count, -1)
        self.pool = ThreadPoolExecutor(threads)
        self.random = torch.Generator().manual_seed(seed)
        block_size = page_bytes // (2 * HEAD_DIM * DTYPE.itemsize)
        self.layout = PageLayout.natural(block_size, HEAD_DIM)
        self.kv = ops.PagedKV(self.arena, self.layout)
        self.draw()

    def draw(self) -> None:
        order = torch.randperm(len(self.arena), generator=self.random)
        self.ids = order[: self.count].contiguous()
        self.numbers = self.ids.tolist()
        block_size = self.layout.block_size
        self.token_pages = self.ids.repeat_interleave(block_size)
        self.token_slots = torch.arange(block_size).repeat(self.count)

    def memcpy(self) -> None:
        size = self.dense.numel() * DTYPE.itemsize
        step = -(-size // self.threads)
        parts = [
            (
                self.staging.data_ptr() + start,
                self.dense.data_ptr() + start,
                min(step, size - start),
            )
            for start in range(0, size, step)
        ]
        if len(parts) == 1:
            ctypes.memmove(*parts[0])
        else:
            list(self.pool.map(lambda part: ctypes.memmove(*part), parts))

    def torch_copy(self) -> None:
        self.staging.copy_(self.dense)

    def bulk_in_order(self) -> None:
        ops.copy_pages(self.staging, None, self.dense, None)

    def bulk_gather(self) -> None:
        ops.copy_pages(self.staging, None, self.arena, self.ids)

    def bulk_scatter(self) -> None:
        ops.copy_pages(self.arena, self.ids, self.staging, None)

    def index_select(self) -> None:
        torch.index_select(self.arena, 0, self.ids, out=self.staging)

    def one_by_one(self) -> None:
        for slot, page in zip(self.staging, self.numbers, strict=True):
            slot.copy_(self.arena[page])

    def gather_tokens(self) -> None:
        ops.gather_tokens(self.kv, self.token_pages, self.token_slots)

    def calls(self) -> dict[str, Callable[[], None]]:
        return {
            "memcpy": self.memcpy,
            "torch copy_, contiguous": self.torch_copy,
            "copy_pages, contiguous": self.bulk_in_order,
            "copy_pages, gather": self.bulk_gather,
            "copy_pages, scatter": self.bulk_scatter,
            "torch index_select": self.index_select,
            "one by one (Python)": self.one_by_one,
            "gather_tokens, all tokens": self.gather_tokens,
        }


def measure(
    work: Workload, repeats: int, seed: int, other: torch.Tensor
) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of every call of every implementation."""
    calls = work.calls()
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in calls
    }
    order = random.Random(seed)
    for repetition in range(repeats + WARM_UP):
        work.draw()
        for name in order.sample(list(calls), len(calls)):
            other.add_(1)
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if repetition >= WARM_UP:
                seconds[name]["wall"].append(took[0])
                seconds[name]["cpu"].append(took[1])
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the 10th and 90th percentile."""
    ordered = sorted(values)
    tenth = len(ordered) // 10
    return {
        "median": statistics.median(ordered),
        "p10": ordered[tenth],
        "p90": ordered[-1 - tenth],
    }


def cell(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['p10']:.2f}..{values['p90']:.2f})"


def main(
    sizes: Annotated[list[int] | None, typer.Option(help="KiB per page")] = None,
    threads: Annotated[list[int] | None, typer.Option()] = None,
    total_mib: Annotated[int, typer.Option(help="bytes that one call copies")] = 64,
    arena_mib: int = 1024,
    caches_mib: Annotated[
        int, typer.Option(help="bytes to overwrite before each call")
    ] = 96,
    repeats: int = 21,
    seed: int = 20261121,
    json_out: Path | None = None,
) -> None:
    """Print and save bandwidths by page size and number of threads."""
    if reason := ops.extension_info()["reason"]:
        raise typer.BadParameter(f"nothing to compare: {reason}")
    console = Console()
    arena, other = memory(arena_mib * MIB), memory(caches_mib * MIB)
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    for count in threads or [1, 2]:
        torch.set_num_threads(count)
        for size in sizes or [2, 4, 8, 16, 64]:
            work = Workload(arena, size * 1024, total_mib * MIB, count, seed)
            copied = work.count * size * 1024
            seconds = measure(work, repeats, seed, other)
            table = Table("", "GB/s", "share of memcpy", "of its CPU time", "CPU ms")
            table.title = f"{count} thread(s), {work.count} pages of {size} KiB"
            bar = seconds["memcpy"]
            for name, samples in seconds.items():
                row = {
                    "threads": count,
                    "page_kib": size,
                    "name": name,
                    "rate": spread([copied / t / 1e9 for t in samples["wall"]]),
                    "cpu_ms": spread([1e3 * t for t in samples["cpu"]]),
                }
                for clock in ("wall", "cpu"):
                    pairs = zip(bar[clock], samples[clock], strict=True)
                    row[f"share_{clock}"] = spread([a / b for a, b in pairs])
                rows.append(row)
                cells = [row[key] for key in ("rate", "share_wall", "share_cpu")]
                cpu = f"{row['cpu_ms']['median']:.1f}"
                table.add_row(name, *(cell(values) for values in cells), cpu)
            console.print(table)
    facts = kernel_provenance(load, repeats)
    console.print_json(data=facts)
    if json_out is not None:
        json_out.write_text(json.dumps({"rows": rows, **facts}, indent=1))


if __name__ == "__main__":
    typer.run(main)
