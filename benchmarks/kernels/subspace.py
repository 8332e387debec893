"""The random subspace of ``ops.truncated_svd``: accuracy loss and time saved.

    OMP_NUM_THREADS=1 python benchmarks/kernels/subspace.py

Errors are of the factors' product, in percent above the optimum for the rank: maximum
and mean over matrices. Times are for one matrix, microseconds of CPU time, medians of
alternating runs: with the subspace, and at the same rank with all eigenvectors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import _path  # noqa: F401
import torch
from page_copy import machine

from vllm_kvplugins.ops import svd

CASES = ("32x64:8", "64x64:16", "80x80:32", "128x128:8", "128x128:32", "500x128:51")
KINDS = ("independent", "decaying")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--case", nargs="+", default=list(CASES), help="TOKENSxDIMENSIONS:RANK"
    )
    parser.add_argument("--matrices", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=51)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def make(kind: str, tokens: int, dim: int, generator: torch.Generator) -> torch.Tensor:
    """float32 [1, tokens, dim]; ``decaying`` scales column d by ``exp(-0.05 d)``."""
    rows = torch.randn(1, tokens, dim, generator=generator)
    return rows * torch.exp(-0.05 * torch.arange(dim)) if kind == "decaying" else rows


def decompose(rows: torch.Tensor, rank: int, energy: float = 1.0) -> svd.LowRank:
    """One matrix."""
    start, length = torch.tensor([0]), torch.tensor([rows.shape[1]])
    return svd.truncated_svd(rows, start, length, rank, energy)


def energy_of(rows: torch.Tensor, rank: int) -> float:
    """Share of the squared norm for which ``rank`` is the smallest sufficient rank."""
    squares = torch.linalg.svdvals(rows[0].double()).square()
    kept = (squares.cumsum(0) / squares.sum()).tolist()
    return (kept[rank - 1] + (kept[rank - 2] if rank > 1 else 0.0)) / 2


def loss_percent(rows: torch.Tensor, rank: int) -> float:
    """Error above the optimum for the rank, in percent."""
    factors = decompose(rows, rank)
    assert int(factors.ranks[0]) == rank
    sigma = factors.singular_values(0).double()
    again = factors.left(0).double() * sigma @ factors.right(0).double().t()
    best = torch.linalg.svdvals(rows[0].double())[rank:].square().sum().sqrt()
    return 100 * float((rows[0].double() - again).norm() / best - 1)


def microseconds(calls: dict[str, Callable[[], object]], rounds: int) -> list[float]:
    """Medians of CPU time, alternating; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time_ns()
            for _ in range(10):
                call()
            if repetition:
                times[name].append((time.process_time_ns() - start) / 10_000)
    return [statistics.median(samples) for samples in times.values()]


def main() -> None:
    """Print a Markdown table."""
    options = parse()
    torch.set_num_threads(1)
    print(machine())
    print(vars(options), end="\n\n")
    print("| matrix | rank | independent numbers | decaying | µs without | µs with |")
    print("|---|---|---|---|---|---|")
    for case in options.case:
        shape, _, rank_text = case.partition(":")
        tokens, dim = map(int, shape.split("x"))
        rank = int(rank_text)
        generator = torch.Generator().manual_seed(options.seed)
        cells = []
        for kind in KINDS:
            losses = [
                loss_percent(make(kind, tokens, dim, generator), rank)
                for _ in range(options.matrices)
            ]
            cells.append(f"{max(losses):.1f} % ({statistics.mean(losses):.1f} %)")
        rows = make("independent", tokens, dim, generator)
        whole, energy = min(tokens, dim), energy_of(rows, rank)
        assert int(decompose(rows, whole, energy).ranks[0]) == rank
        calls: dict[str, Callable[[], object]] = {
            "without": lambda rows=rows, whole=whole, energy=energy: decompose(
                rows, whole, energy
            ),
            "with": lambda rows=rows, rank=rank: decompose(rows, rank),
        }
        without, within = microseconds(calls, options.repetitions)
        losses_shown = " | ".join(cells)
        print(
            f"| {tokens} x {dim} | {rank} | {losses_shown} | {without:.0f} "
            f"| {within:.0f} |"
        )


if __name__ == "__main__":
    main()
