"""Votes of a window on a request's slots: reading pages, or gathered keys.

    OMP_NUM_THREADS=1 python benchmarks/kernels/page_votes.py

Milliseconds of one layer, the median of interleaved repetitions and the range from the
10th to the 90th percentile:

    pages         ops.page_votes, which reads the pages directly
    dense         attention_votes.window_votes on keys that are already gathered
    gather+dense  the same, including the gathering
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import _path  # noqa: F401
import torch
from page_copy import DTYPES, machine

from vllm_kvplugins import ops
from vllm_kvplugins.scoring import attention_votes


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--q-heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def runs(options: argparse.Namespace, slots: int) -> dict[str, Callable[[], object]]:
    """The calls to time, on one request's pages."""
    generator = torch.Generator().manual_seed(options.seed)
    layout = ops.PageLayout.transposed_keys(options.block_size, options.head_dim)
    pages = -(-slots // options.block_size)
    count = options.kv_heads * pages
    heap = torch.randn(count, layout.page_elems, generator=generator)
    heap = heap.to(DTYPES[options.dtype])
    table = torch.randperm(count, generator=generator).view(options.kv_heads, pages)
    positions = torch.arange(slots).repeat(options.kv_heads, 1)
    at = positions[0, -options.window :]
    shape = (options.q_heads, options.window, options.head_dim)
    queries = torch.randn(shape, generator=generator).to(heap.dtype)
    scale = options.head_dim**-0.5
    kv = ops.PagedKV(heap, layout)
    places, vote_queries = ops.VoteSlots(table, positions), ops.VoteQueries(queries, at)
    keys = ops.gather_keys(kv, table)[:, :slots]

    def gathered() -> object:
        dense = ops.gather_keys(kv, table)[:, :slots]
        return attention_votes.window_votes(queries, dense, scale)

    return {
        "pages": lambda: ops.page_votes(kv, places, vote_queries, scale),
        "dense": lambda: attention_votes.window_votes(queries, keys, scale),
        "gather+dense": gathered,
    }


def main() -> None:
    """Print a table."""
    options = parse()
    print(machine())
    print(vars(options))
    for slots in options.slots:
        calls = runs(options, slots)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for repetition in range(options.repetitions + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if repetition:  # the first warms up
                    times[name].append(1e3 * (time.perf_counter() - start))
        for name, samples in times.items():
            deciles = statistics.quantiles(samples, n=10)
            print(
                f"{slots:7} slots  {name:13} {statistics.median(samples):8.2f} ms "
                f"({deciles[0]:.2f} to {deciles[-1]:.2f})"
            )


if __name__ == "__main__":
    main()
