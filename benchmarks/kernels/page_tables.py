"""Time of building a step's page tables, of this version and optionally another one.

    OMP_NUM_THREADS=1 python benchmarks/kernels/page_tables.py [OTHER_CHECKOUT]

Decode rows of a model with 32 layers of 8 KV heads and blocks of 16 tokens. Cases: one
budget for all layers (1 scope) or one per layer (32), with or without pages of a
compaction before the tail. Milliseconds of CPU time, medians (10th to 90th percentile).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _engine import ROOT, provenance
from rich.console import Console
from rich.table import Table

LAYERS, HEADS, SIZE, BLOCKS = 32, 8, 16, 40000
CASES = [
    {"scopes": scopes, "pages": pages, "retained": retained}
    for scopes in (1, LAYERS)
    for pages in (64, 2048)
    for retained in (False, True)
]


def main(
    other: Annotated[
        Path | None, typer.Argument(help="another checkout to compare with")
    ] = None,
    rows: Annotated[int, typer.Option(help="requests of a step")] = 16,
    repeats: int = 21,
) -> None:
    """Print a table."""
    checkouts = {"here": ROOT} | ({} if other is None else {"other": other.resolve()})
    children = {name: child(path, rows) for name, path in checkouts.items()}
    console = Console()
    console.print(provenance() | {"load": f"{os.getloadavg()[0]:.2f}"}, highlight=False)
    table = Table(*CASES[0], *(f"{name}, ms" for name in checkouts))
    for case in CASES:
        took: dict[str, list[float]] = {name: [] for name in children}
        for _ in range(repeats):
            for name, process in children.items():
                took[name].append(ask(process, case))
        table.add_row(*map(str, case.values()), *map(spread, took.values()))
    console.print(table)
    for process in children.values():
        process.communicate()


def child(checkout: Path, rows: int) -> subprocess.Popen[str]:
    """A child process that measures one version."""
    return subprocess.Popen(
        [sys.executable, __file__, "--child", str(rows)],
        env=os.environ | {"PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: subprocess.Popen[str], case: dict[str, Any]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def spread(seconds: list[float]) -> str:
    low, *_, high = statistics.quantiles(seconds, n=10)
    middle = statistics.median(seconds)
    return f"{1e3 * middle:.3f} ({1e3 * low:.3f}-{1e3 * high:.3f})"


def measure(rows: int) -> None:
    """Read cases from standard input and answer with seconds."""
    for line in sys.stdin:
        build = builder(rows, **json.loads(line))
        with torch.inference_mode():
            build()
            calls, began = 0, time.process_time()
            while calls < 3 or time.process_time() - began < 0.05:
                build()
                calls += 1
            took = time.process_time() - began
        print(took / calls, flush=True)


def builder(rows: int, scopes: int, pages: int, retained: bool) -> Any:
    """A call that builds the tables of rows with ``pages`` pages.

    With ``retained``, half of the pages belong to a retained region.
    """
    from vllm_kvplugins.engine.page_table import PageTables

    random = torch.Generator().manual_seed(1)
    cpu = torch.device("cpu")
    tables = PageTables(LAYERS, HEADS, BLOCKS, SIZE, scopes == 1, cpu)
    slot_indices, tokens = [0] * rows, [pages * SIZE - 3] * rows
    if retained:
        kept, heads = pages // 2, LAYERS * HEADS
        slot_indices = []
        for _ in range(rows):
            counts = torch.full((heads,), kept)
            if scopes > 1:
                counts = torch.randint(kept // 2, kept + 1, (heads,), generator=random)
            listed = torch.randint(0, BLOCKS, (heads, kept), generator=random)
            slot_indices.append(tables.assign(listed, counts, 10))
        tokens = [(10 + pages - kept) * SIZE - 3] * rows
    blocks = torch.randint(0, BLOCKS, (rows, 8192), generator=random).int()
    lengths = torch.tensor(tokens, dtype=torch.int32)
    return lambda: tables.build(slot_indices, lengths, blocks, tokens)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure(int(sys.argv[2]))
    else:
        typer.run(main)
