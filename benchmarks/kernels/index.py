"""Build, insert and query time of the key index, against exact scans.

    OMP_NUM_THREADS=1 python benchmarks/kernels/index.py --model MODEL

Compares the DCI-tree, the compiled exact scan (``scan``) and torch (``matmul`` and
``topk``; one matmul for all queries of a group). All implementations take turns within
each repetition, in random order, so that drift of the machine affects all of them
equally. Before each call 64 MiB of other memory are overwritten, as the other layers of
a model would. Times are milliseconds: **median of CPU time**, median of wall clock
(10th to 90th percentile). A query is one call for all heads. ``scan / tree`` is a ratio
of CPU times, because other users of a shared machine dominate the wall clock.

Keys are random around cluster centres. With ``--model`` they come from the middle
layers of a real model, after RoPE, on the texts of ``--texts``. Contexts longer than
the model supports are tiled, each copy with a little noise, so that no key repeats.
Recall is the share of the true top-k that is found. Mass is the attention to the keys
found, divided by the attention to the true top-k, mean over queries and heads.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _path  # noqa: F401
import torch
from _engine import ROOT, provenance

from vllm_kvplugins import ops
from vllm_kvplugins.index import BruteForceIndex, DCIIndex, Keys

sys.path.insert(0, str(ROOT / "tests" / "helpers"))

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WINDOW = 16  # keys of one insert: a page that leaves the window


def random_keys(
    heads: int, group: int, dim: int, count: int, rounds: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys around 256 centres, and queries near keys.

    Returns:
        Keys [heads, count, dim] and queries [heads, rounds * group, dim].
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(heads, 256, dim, generator=generator)
    which = torch.randint(0, 256, (heads, count, 1), generator=generator)
    keys = centres.gather(1, which.expand(-1, -1, dim))
    keys = keys + 0.5 * torch.randn(keys.shape, generator=generator)
    picks = torch.randint(0, count, (heads, rounds * group, 1), generator=generator)
    queries = keys.gather(1, picks.expand(-1, -1, dim))
    return keys, queries + 0.5 * torch.randn(queries.shape, generator=generator)


def real_keys(
    model: str,
    texts: str,
    heads: int,
    group: int,
    count: int,
    rounds: int,
    seed: int,
    untiled: int = 6000,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and queries of a real model; heads of several layers, concatenated.

    Args:
        untiled: number of keys to take from the model; more are copies with noise.
    """
    from real_keys import capture
    from texts import english

    text = Path(texts).read_text() if texts else english(seed, 4000)
    length = min(count, untiled) + 128
    layers = capture(model, text, length, 64)
    found_keys, found_queries = [], []
    for queries, keys in layers[4::2]:
        found_keys += list(keys[:, 64:-64])
        found_queries += list(queries.flatten(1, 2))
    generator = torch.Generator().manual_seed(seed)
    keys = torch.stack(found_keys[:heads])
    copies = -(-count // keys.shape[1])
    keys = keys.repeat(1, copies, 1)[:, :count]
    if copies > 1:
        keys = keys + 0.05 * keys.std() * torch.randn(keys.shape, generator=generator)
    queries = torch.stack(found_queries[:heads])
    order = torch.randperm(queries.shape[1], generator=generator)
    picks = order.repeat(-(-rounds * group // len(order)))[: rounds * group]
    return keys.contiguous(), queries[:, picks].contiguous()


_OTHER_DATA = torch.zeros(64 << 18)  # 64 MiB


def empty_caches() -> None:
    """Overwrite memory, as other layers of a model do between two calls."""
    _OTHER_DATA.add_(1)


class Timer:
    """Wall and CPU milliseconds of calls, by name."""

    def __init__(self) -> None:
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def run(self, name: str, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        took, used = time.perf_counter() - wall, time.process_time() - cpu
        self.wall.setdefault(name, []).append(1e3 * took)
        self.cpu.setdefault(name, []).append(1e3 * used)

    def forget(self, *names: str) -> None:
        for name in names:
            self.wall.pop(name, None)
            self.cpu.pop(name, None)

    def cell(self, name: str) -> str:
        times = sorted(self.wall[name])
        low, high = times[len(times) // 10], times[-1 - len(times) // 10]
        wall, cpu = statistics.median(times), self.processor(name)
        return f"**{cpu:.3g}**, {wall:.3g} ({low:.3g}–{high:.3g})"

    def processor(self, name: str) -> float:
        return statistics.median(self.cpu[name])


def placed(tree: DCIIndex, keys: torch.Tensor) -> Keys:
    """The keys in the tree's order, as a host tier would hold them."""
    shape = (len(keys), max(tree.num_pages) * tree.page_size, keys.shape[2])
    stored = torch.zeros(shape, dtype=keys.dtype)
    where = tree.places().unsqueeze(-1).expand(-1, -1, keys.shape[2])
    return Keys.dense(stored.scatter_(1, where, keys), by_page=True)


def quality(
    queries: torch.Tensor, keys: torch.Tensor, result: torch.Tensor, exact: torch.Tensor
) -> tuple[float, float]:
    """Recall and mass of slots found [heads, n, k] against the exact ones."""
    from real_keys import mass_covered

    hits = (result.unsqueeze(-1) == exact.unsqueeze(-2)).any(-1).float().mean().item()
    wide = keys.float()
    mass = mass_covered(queries, wide, result) / mass_covered(queries, wide, exact)
    return hits, mass.mean().item()


def measure(
    options: argparse.Namespace, keys: torch.Tensor, queries: torch.Tensor
) -> dict:
    """One row of the table."""
    heads, count, dim = keys.shape
    view, timer = Keys.dense(keys), Timer()
    settings = {
        "promotion": options.promotion,
        "route": options.route,
        "visit_ratio": options.visit_ratio,
    }
    scan = BruteForceIndex(heads, dim, options.page_size)
    scan.build(view)
    trees = []

    def build() -> None:
        trees[:] = [DCIIndex(heads, dim, options.page_size, **settings)]
        trees[0].build(view)

    for _ in range(options.builds):
        timer.run("build", build)
    tree = trees[0]
    by_page = placed(tree, keys)
    rounds = queries.unflatten(1, (-1, options.group)).unbind(1)
    flat = keys.transpose(1, 2)

    def by_torch(query: torch.Tensor) -> object:
        return (query.to(keys.dtype) @ flat).topk(options.k)

    visits, k = options.visits, options.k
    calls = {
        "scan": lambda query: scan.query_topk(query, view, k),
        "tree": lambda query: tree.query_topk(query, by_page, k, visits),
        "order": lambda query: tree.query_topk(query, view, k, visits),
        "torch": by_torch,
    }
    order = random.Random(options.seed)
    for repeat, query in enumerate(rounds):
        if repeat == 2:  # the first two warm up
            timer.forget(*calls)
        batch = query.contiguous()
        for name in order.sample(list(calls), len(calls)):
            empty_caches()
            timer.run(name, partial(calls[name], batch))
    sample = queries[:, :32].contiguous()
    exact = scan.query_topk(sample, view, options.k).slots
    result = tree.query_topk(sample, by_page, options.k, visits).slots
    hits, mass = quality(sample, keys, result, exact)
    new = Keys.dense(keys[:, :WINDOW])
    for _ in range(options.builds * 4):
        timer.run("insert", lambda: tree.insert(new))
    memory = tree.memory_bytes / (heads * count * dim * keys.element_size())
    return {
        "keys": f"{count // 1024}K",
        "dim": dim,
        "dtype": str(keys.dtype).removeprefix("torch."),
        "tree ms": timer.cell("tree"),
        "tree, token order": timer.cell("order"),
        "scan ms": timer.cell("scan"),
        "torch ms": timer.cell("torch"),
        "scan / tree": f"{timer.processor('scan') / timer.processor('tree'):.2f}",
        f"recall@{options.k}": f"{hits:.3f}",
        "mass": f"{mass:.3f}",
        "build ms": timer.cell("build"),
        f"insert {WINDOW} ms": timer.cell("insert"),
        "memory / keys": f"{memory:.2f}",
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model", help="folder of a model that provides the keys; default: random keys"
    )
    add(
        "--texts",
        default="",
        help="text to read with the model; default: generated sentences",
    )
    add("--sizes", type=int, nargs="+", default=[4096, 16384, 36864, 65536])
    add(
        "--dims",
        type=int,
        nargs="+",
        default=[64, 128],
        help="dimensions of random keys",
    )
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    add("--heads", type=int, default=8)
    add("--group", type=int, default=1, help="queries per KV head")
    add("--k", type=int, default=64)
    add("--visits", type=int, default=2048, help="max_visits of the tree")
    add("--page-size", type=int, default=32)
    add("--promotion", type=float, default=1 / 32)
    add("--visit-ratio", type=float, default=1.0, help="below 1: prioritized DCI")
    add("--route", choices=["mean", "parent"], default="mean")
    add("--repeats", type=int, default=40)
    add("--builds", type=int, default=3)
    add("--seed", type=int, default=20261121)
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    for name, value in provenance().items():
        print(f"- {name}: {value}")
    DCIIndex(1, 8)  # loads the library
    kernels = ops.extension_info()["simd"]
    print(f"- threads: {torch.get_num_threads()}, kernels: {kernels}")
    shape = f"{options.heads} KV heads, {options.group} queries each"
    print(f"- {shape}, k {options.k}, at most {options.visits} visits\n")
    rounds, header = options.repeats + 2, False
    for dim in [64] if options.model else options.dims:
        for name in options.dtypes:
            for count in options.sizes:
                sizes = options.heads, options.group
                if options.model:
                    data = real_keys(
                        options.model,
                        options.texts,
                        *sizes,
                        count,
                        rounds,
                        options.seed,
                    )
                else:
                    data = random_keys(*sizes, dim, count, rounds, options.seed)
                row = measure(options, data[0].to(DTYPES[name]), data[1])
                if not header:
                    print("| " + " | ".join(row) + " |")
                    print("|---" * len(row) + "|")
                    header = True
                print("| " + " | ".join(str(x) for x in row.values()) + " |")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
