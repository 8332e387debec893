"""CPU time of saving and loading the pages of a session, by ``session_dtype``.

OMP_NUM_THREADS=1 python benchmarks/kernels/stored_pages.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import _path  # noqa: F401
import torch
import typer
from _engine import provenance
from rich.console import Console
from rich.table import Table

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.sessions.stored_pages import stored_pages

BLOCK = 32


def fastest_ms(work: Callable[[], Any], rounds: int) -> float:
    """CPU time of the fastest round; others share the caches with more processes."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times) * 1e3


def main(
    tokens: int = 1024,
    layers: int = 30,
    kv_heads: int = 3,
    head_dim: int = 64,
    rounds: int = 20,
) -> None:
    """Print milliseconds and bytes; the defaults are the shape of SmolLM2-135M."""
    table = Table("cache", "session_dtype", "save, ms", "load, ms", "bytes")
    count = -(-tokens // BLOCK)
    layout = PageLayout.transposed_keys(BLOCK, head_dim)
    for dtype in (torch.bfloat16, torch.float32):
        pages = torch.randn(layers * kv_heads * count, layout.page_elems).to(dtype)
        heap = Heap(pages, layout, layers, count, kv_heads)
        ids = heap.page_ids(torch.randperm(count)).reshape(-1)
        for name in ("auto", "int8", "int4"):
            stored = stored_pages(heap, name)
            saved = stored.copy_out(ids)
            save_ms = fastest_ms(partial(stored.copy_out, ids), rounds)
            load_ms = fastest_ms(partial(stored.copy_in, ids, saved), rounds)
            cache = str(dtype).removeprefix("torch.")
            figures = f"{save_ms:.1f}", f"{load_ms:.1f}", str(saved.nbytes)
            table.add_row(cache, name, *figures)
    console = Console()
    console.print(table)
    console.print_json(data=provenance())


if __name__ == "__main__":
    typer.run(main)
