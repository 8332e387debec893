"""Span layouts, timers, and reconstruction benchmarks for ``svd.py``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import typer

from vllm_kvplugins import ops
from vllm_kvplugins.ops.layout import PageLayout

BLOCK_SIZE = 32


@dataclass(slots=True)
class Spans:
    """One division of the document into spans."""

    name: str
    starts: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def between(cls, name: str, bounds: list[int], tokens: int) -> Spans:
        """Drop boundaries beyond the tokens that are read."""
        edges = torch.tensor([b for b in bounds if b <= tokens])
        if len(edges) < 2 or (edges.diff() <= 0).any() or edges[0] < 0:
            raise typer.BadParameter(
                f"{name} must rise from 0 on and have two boundaries within the "
                f"{tokens} tokens, got {bounds[:8]}"
            )
        return cls(name, edges[:-1], edges.diff())

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def groups(self) -> list[torch.Tensor]:
        """int64 [spans, length]: token indices of the spans of each length."""
        return [
            self.starts[self.lengths == length, None] + torch.arange(length)
            for length in self.lengths.unique().tolist()
        ]


@dataclass(slots=True)
class Times:
    """Milliseconds by name: wall clock and CPU."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def run(self, name: str, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        used, took = time.process_time() - cpu, time.perf_counter() - wall
        self.wall.setdefault(name, []).append(1e3 * took)
        self.cpu.setdefault(name, []).append(1e3 * used)

    def median(self, name: str, per: float = 1.0) -> dict[str, float]:
        cpu, wall = sorted(self.cpu[name]), self.wall[name]
        return {
            "cpu_ms": statistics.median(cpu) / per,
            "cpu_ms_p10": cpu[len(cpu) // 10] / per,
            "cpu_ms_p90": cpu[-1 - len(cpu) // 10] / per,
            "wall_ms": statistics.median(wall) / per,
        }


class Zoom:
    """All spans of a layer, and the pages that receive them."""

    def __init__(self, layer: torch.Tensor, spans: Spans, rank: int) -> None:
        heads = len(layer) // 2
        cut = spans.starts, spans.lengths, rank
        self.keys = ops.truncated_svd(layer[:heads], *cut)
        self.values = ops.truncated_svd(layer[heads:], *cut)
        self.which = torch.arange(heads * len(spans.starts))
        layout = PageLayout.transposed_keys(BLOCK_SIZE, layer.shape[2])
        total = heads * spans.tokens
        num_pages = -(-total // BLOCK_SIZE)
        pages = torch.zeros(num_pages, layout.page_elems, dtype=layer.dtype)
        self.kv = ops.PagedKV(pages, layout)
        places = torch.arange(total)
        self.places = places // BLOCK_SIZE, places % BLOCK_SIZE
        inside = torch.cat([group.flatten() for group in spans.groups()])
        self.plain = [part[:, inside].flatten(0, 1) for part in layer.split(heads)]
        self.batches = [
            [self._batch(part, length) for length in spans.lengths.unique().tolist()]
            for part in (self.keys, self.values)
        ]
        read = self.keys.nbytes + self.values.nbytes
        written = 2 * total * layer.shape[2] * layer.itemsize
        self.bytes_moved = read + written
        self.operations = sum(
            2 * int((part.tokens * part.ranks).sum()) * layer.shape[2]
            for part in (self.keys, self.values)
        )

    @staticmethod
    def _batch(part: ops.LowRank, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """U diag(sigma) and V^T of the matrices of one length, padded to the largest
        rank.
        """
        matrices = (part.tokens == length).nonzero()[:, 0].tolist()
        rank = max(int(part.ranks[m]) for m in matrices)
        left = torch.zeros(len(matrices), length, rank)
        right = torch.zeros(len(matrices), rank, part.head_dim)
        for i, m in enumerate(matrices):
            own = int(part.ranks[m])
            left[i, :, :own] = part.left(m) * part.singular_values(m)
            right[i, :own] = part.right(m).t()
        return left.to(part.factors.dtype), right.to(part.factors.dtype)

    def ways(self) -> dict[str, Callable[[], object]]:
        return {
            "compiled": self._compiled,
            "torch": self._torch,
            "plain": self._plain,
        }

    def _compiled(self) -> None:
        keys = ops.reconstruct(self.keys, self.which)
        values = ops.reconstruct(self.values, self.which)
        ops.scatter_tokens(self.kv, *self.places, keys, values)

    def _torch(self) -> None:
        rows = [
            torch.cat([(left @ right).flatten(0, 1) for left, right in part])
            for part in self.batches
        ]
        ops.scatter_tokens(self.kv, *self.places, rows[0], rows[1])

    def _plain(self) -> None:
        keys, values = self.plain
        ops.scatter_tokens(self.kv, *self.places, keys, values)


class Limits:
    """Speed of this machine with the configured threads: a copy and a matrix
    product."""

    COPY, PRODUCT = "limits: copy", "limits: product"

    def __init__(self) -> None:
        self.source = torch.zeros(16 << 20, dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)
        self.square = torch.randn(512, 512)
        self.result = torch.empty(512, 512)
        self.bytes_moved = 2 * self.source.numel()
        self.operations = 2 * len(self.square) ** 3

    def ways(self) -> dict[str, Callable[[], object]]:
        return {self.COPY: self._copy, self.PRODUCT: self._product}

    def _copy(self) -> None:
        self.target.copy_(self.source)

    def _product(self) -> None:
        torch.mm(self.square, self.square, out=self.result)

    def rates(self, times: Times) -> dict[str, float]:
        """Rates from medians of CPU time: GB/s read and written, GFLOP/s."""
        return {
            "copy_gb_s": self.bytes_moved
            / statistics.median(times.cpu[self.COPY])
            / 1e6,
            "product_gflop_s": self.operations
            / statistics.median(times.cpu[self.PRODUCT])
            / 1e6,
        }
