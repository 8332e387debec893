"""Decode attention over pages, against the stock CPU kernel and a plain read.

    python benchmarks/kernels/decode_attention.py --json-out decode.json

Both kernels attend to the same pages of one heap, one query token per row, in random
order. Before each call the benchmark overwrites other memory to empty the caches, as
the other layers of a model would. Each repetition picks new pages. The lower bound is a
torch sum over the same number of contiguous bytes, which reads each byte once.

The stock kernel's schedule is prepared before the timer starts, because an engine
prepares it once per step. Our time includes argument checks on every call. The stock
kernel has no coarse entries; calls with coarse entries are compared with our own calls
without them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _engine import kernel_provenance
from gather import MIB, cell, memory, spread
from rich.console import Console
from rich.table import Table
from vllm import _custom_ops as custom_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_kvplugins import ops
from vllm_kvplugins.ops.layout import PageLayout

BLOCK = 32
WARM_UP = 2


class Case:
    """Rows of equal length over random pages of a heap."""

    def __init__(
        self,
        heap: torch.Tensor,
        shape: tuple[int, int, int, int],
        tokens: int,
        coarse: int,
        seed: int,
    ) -> None:
        rows, self.kv_heads, group, dims = shape
        self.heap, self.sequences, self.group = heap, rows * self.kv_heads, group
        self.random = torch.Generator().manual_seed(seed)
        self.layout = PageLayout.transposed_keys(BLOCK, dims)
        self.kv = ops.PagedKV(heap, self.layout)
        self.scale = dims**-0.5
        self.lengths = torch.full((self.sequences,), tokens, dtype=torch.int32)
        self.queries = torch.randn(
            rows, self.kv_heads * group, dims, generator=self.random
        ).to(heap.dtype)
        self.flat = self.queries.view(self.sequences, group, dims)
        self.start = torch.arange(self.sequences + 1, dtype=torch.int32)
        kv = heap.view(len(heap), 1, 2 * BLOCK, dims)
        self.halves = kv.chunk(2, dim=2)
        self.out = torch.empty_like(self.flat)
        entries = coarse * self.sequences
        self.coarse = ops.CoarseEntries(
            torch.randn(entries, dims, generator=self.random).to(heap.dtype),
            torch.randn(entries, dims, generator=self.random).to(heap.dtype),
            torch.full((entries,), math.log(16)),
            torch.arange(self.sequences) * coarse,
            torch.full((self.sequences,), coarse),
        )
        self.read_bytes = self.sequences * tokens * 2 * dims * heap.itemsize
        self.draw()

    def draw(self) -> None:
        per = -(-int(self.lengths[0]) // BLOCK)
        order = torch.randperm(len(self.heap), generator=self.random)
        self.table = order[: self.sequences * per].view(self.sequences, per).int()
        isa = _get_attn_isa(self.heap.dtype, BLOCK, self.flat.shape[2])
        self.schedule = custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=self.sequences,
            num_heads=self.group,
            num_kv_heads=1,
            head_dim=self.flat.shape[2],
            seq_lens=self.lengths,
            dtype=self.heap.dtype,
            query_start_loc=self.start,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )

    def ours(self, coarse: bool = False) -> torch.Tensor:
        return ops.attend_mixed(
            self.queries,
            self.kv,
            self.table,
            self.lengths,
            self.scale,
            self.coarse if coarse else None,
        )[0]

    def ours_with_coarse(self) -> torch.Tensor:
        return self.ours(coarse=True)

    def stock(self) -> torch.Tensor:
        custom_ops.cpu_attention_with_kv_cache(
            query=self.flat,
            key_cache=self.halves[0],
            value_cache=self.halves[1],
            output=self.out,
            query_start_loc=self.start,
            seq_lens=self.lengths,
            scale=self.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.table,
            softcap=0,
            scheduler_metadata=self.schedule,
            s_aux=None,
        )
        return self.out.view(self.queries.shape)

    def read(self) -> torch.Tensor:
        flat = self.heap.view(-1).view(torch.float32)
        return flat[: self.read_bytes // 4].sum()

    def check(self) -> float:
        """Largest difference between the outputs of the two kernels."""
        return float((self.ours().float() - self.stock().float()).abs().max())


def measure(
    case: Case, calls: dict[str, Callable[[], Any]], repeats: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of every call, as (wall, cpu) lists."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"wall": [], "cpu": []} for name in calls
    }
    order = random.Random(seed)
    other = memory(96 * MIB)
    for repetition in range(repeats + WARM_UP):
        case.draw()
        for name in order.sample(list(calls), len(calls)):
            other.add_(1)
            wall, cpu = time.perf_counter(), time.process_time()
            calls[name]()
            took = time.perf_counter() - wall, time.process_time() - cpu
            if repetition >= WARM_UP:
                seconds[name]["wall"].append(took[0])
                seconds[name]["cpu"].append(took[1])
    return seconds


def record(
    case: Case, seconds: dict[str, dict[str, list[float]]], against: str
) -> dict[str, Any]:
    """Medians and spreads; ratios are taken within a repetition."""
    row: dict[str, Any] = {}
    for name, samples in seconds.items():
        pairs = list(zip(seconds[against]["wall"], samples["wall"], strict=True))
        row[name] = {
            "wall_ms": spread([1e3 * t for t in samples["wall"]]),
            "cpu_ms": spread([1e3 * t for t in samples["cpu"]]),
            "rate": spread([case.read_bytes / t / 1e9 for t in samples["wall"]]),
            f"{against} / this": spread([a / b for a, b in pairs]),
        }
    return row


def main(
    rows: Annotated[list[int] | None, typer.Option()] = None,
    heads: Annotated[list[str] | None, typer.Option(help="KV heads x group")] = None,
    tokens: Annotated[list[int] | None, typer.Option()] = None,
    dtypes: Annotated[list[str] | None, typer.Option()] = None,
    threads: Annotated[list[int] | None, typer.Option()] = None,
    coarse: Annotated[int, typer.Option(help="entries per row and KV head")] = 0,
    head_dim: int = 64,
    heap_mib: Annotated[int, typer.Option(help="skip larger cases")] = 1100,
    repeats: int = 11,
    seed: int = 20261121,
    json_out: Path | None = None,
) -> None:
    """Print and save times by shape, type and number of threads."""
    if reason := ops.extension_info()["reason"]:
        raise typer.BadParameter(f"nothing to compare: {reason}")
    console, load, found = Console(width=130), os.getloadavg()[0], []
    heap: torch.Tensor | None = None
    columns = ("shape", "call", "ms", "CPU ms", "GB/s", "stock / this")
    names = dtypes or ["bfloat16", "float32"]
    shapes = itertools.product(
        threads or [1, 2],
        heads or ["3x3", "8x4"],
        tokens or [512, 4096, 32768],
        rows or [1, 4, 8],
    )
    for dtype_name, (count, pair, length, many) in itertools.product(names, shapes):
        dtype = getattr(torch, dtype_name)
        page = 2 * BLOCK * head_dim
        if heap is None or heap.dtype != dtype:
            heap = None  # only one of them in memory at a time
            pages = heap_mib * MIB // (page * dtype.itemsize)
            heap = torch.empty(pages, page, dtype=dtype).normal_()
        kv_heads, group = map(int, pair.split("x"))
        name = f"{dtype_name} {count}t {many}x{kv_heads}x{group} {length}"
        if many * kv_heads * length > len(heap) * BLOCK:
            console.print(f"left out: {name} is more than the heap")
            continue
        torch.set_num_threads(count)
        case = Case(heap, (many, kv_heads, group, head_dim), length, coarse, seed)
        calls: dict[str, Callable[[], Any]] = {
            "ours": case.ours,
            "stock": case.stock,
            "read": case.read,
        }
        if coarse:
            calls[f"ours, {coarse} coarse"] = case.ours_with_coarse
        off = case.check()
        row = record(case, measure(case, calls, repeats, seed), "stock")
        found.append({"case": name, "difference": off, "calls": row})
        table = Table(*columns)
        for call, values in row.items():
            keys = ("wall_ms", "cpu_ms", "rate", "stock / this")
            table.add_row(name, call, *(cell(values[key]) for key in keys))
        console.print(table)
    facts = kernel_provenance(load, repeats)
    console.print_json(data=facts)
    if json_out is not None:
        json_out.write_text(json.dumps({"rows": found, **facts}, indent=1))


if __name__ == "__main__":
    typer.run(main)
