"""The key index against hnswlib, FAISS and ScaNN, at equal attention coverage.

    pip install hnswlib faiss-cpu scann
    python benchmarks/kernels/index_peers.py --model MODEL --texts DOCUMENT

Compares the DCI-tree and the compiled exact scan, each on float32 and bfloat16 keys,
with libraries that take float32 only: hnswlib (HNSW graph), FAISS (inverted lists of
keys, and of codes that are scanned in registers) and ScaNN. All maximise the inner
product. *Coverage* is the attention to the 64 keys found, divided by the attention to
the true best 64, mean over queries and heads. Each method has a setting that trades
coverage for speed (``max_visits``, ``ef``, ``nprobe``, ``leaves``). It is tuned on one
half of the queries: the smallest value that reaches the target, in steps of 2^(1/4).
The other half is timed, and its coverage is reported.

Keys and queries come from a real model, after RoPE, as in ``index.py``. Contexts longer
than ``--untiled`` are tiled, each copy with a little noise. All methods take turns
within each repetition, in random order. Before each call 64 MiB of other memory are
overwritten. A call queries all heads with all queries of a group. Our index does this
in one call. The libraries index one head at a time, so their heads are queried one
after another, or with two threads through a pool of two single-threaded searches. Not
timed: preparing the input of the libraries, and placing keys in the tree's order.

Times are **median of CPU time**, median of wall clock (10th to 90th percentile): per
query (time of a call divided by its queries), of building one head, and of adding 16
keys to one head, 64 times after the queries, with the longest time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import torch
from _engine import provenance
from _index_methods import (
    INSERTED,
    INSERTS,
    LIBRARIES,
    PACKAGES,
    GrowingLibrary,
    K,
    Ours,
    libraries,
)
from index import Timer, empty_caches, real_keys
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_kvplugins import ops
from vllm_kvplugins.index import BruteForceIndex, DCIIndex, Keys

QUERIES = 192  # per head: the last 64 tokens of three query heads


def coverage(
    queries: torch.Tensor, keys: torch.Tensor, result: torch.Tensor, exact: torch.Tensor
) -> float:
    """Attention to the slots found, divided by attention to the exact ones.

    Args:
        queries: [heads, n, head_dim]; keys: [heads, slots, head_dim].
        found, exact: int64 [heads, n, K]; -1 for none.

    Returns:
        Mean over heads and queries.
    """
    shares = []
    for query, rows, some, best in zip(queries, keys, result, exact, strict=True):
        scale = rows.shape[1] ** -0.5
        scores, top = (
            torch.einsum("nd,nkd->nk", query, rows[slots.clamp(min=0)]) * scale
            for slots in (some, best)
        )
        peak = top.amax(-1, keepdim=True)
        weights = (scores - peak).exp() * (some >= 0)
        shares.append(weights.sum(-1) / (top - peak).exp().sum(-1))
    return torch.stack(shares).mean().item()


def tune(
    method: Any, targets: list[float], share: Callable[[int], float]
) -> dict[float, tuple[int | None, float]]:
    """The smallest setting that reaches each target, and its coverage.

    The setting is None if no setting reaches the target; the coverage is then the
    largest one.
    """
    chosen: dict[float, tuple[int | None, float]] = {}
    best = 0.0
    for knob in method.knobs:
        reached = share(knob)
        best = max(best, reached)
        for target in targets:
            if reached >= target:
                chosen.setdefault(target, (knob, reached))
        if len(chosen) == len(targets):
            break
    return {target: chosen.get(target, (None, best)) for target in targets}


def spread(times: list[float]) -> list[float]:
    """Median, 10th and 90th percentile."""
    ranked = sorted(times)
    tenth = len(ranked) // 10
    return [statistics.median(ranked), ranked[tenth], ranked[-1 - tenth]]


def cell(row: dict[str, Any], what: str) -> str:
    if what + "_cpu" not in row:
        return ""
    cpu = row[what + "_cpu"][0]
    wall, low, high = (number(x) for x in row[what + "_wall"])
    return f"**{number(cpu)}**, {wall}" + (f" ({low}–{high})" if low != high else "")


def number(x: float) -> str:
    return f"{x:.3g}" if x < 999.5 else f"{x:,.0f}"


def measure(
    options: argparse.Namespace, result: dict[str, Any], count: int, heads: int
) -> list[dict[str, Any]]:
    """The rows for one number of keys."""

    def say(text: str) -> None:
        print(f"{count} keys: {text}", file=sys.stderr, flush=True)

    rounds = QUERIES // options.group
    say(f"keys of {heads} heads")
    keys, queries = real_keys(
        options.model,
        options.texts,
        heads,
        options.group,
        count,
        rounds,
        options.seed,
        options.untiled,
    )
    batches = queries.unflatten(1, (rounds, options.group))
    tuning = batches[:, : rounds // 2].flatten(1, 2)
    timed = batches[:, rounds // 2 :].unbind(1)
    checking = torch.cat(timed, 1)

    settings = {"promotion": options.promotion}
    methods: list[Any] = [
        Ours(kind, keys, getattr(torch, dtype), **(settings if kind == "tree" else {}))
        for dtype in options.dtypes
        for kind in options.kinds
    ]
    for module, kinds in LIBRARIES.items():
        if module in result:
            methods += [kind(keys, result[module], options.threads) for kind in kinds]
    timer, order = Timer(), random.Random(options.seed)
    for repeat in range(options.builds):
        for method in order.sample(methods, len(methods)):
            empty_caches()
            timer.run(f"build {method.name}", method.build)
            took = timer.wall[f"build {method.name}"][-1] / 1e3
            say(f"build {repeat + 1} of {method.name}: {took:.2f} s")

    oracle = BruteForceIndex(heads, keys.shape[2])
    oracle.build(Keys.dense(keys))
    exact = {
        id(query_batch): oracle.query_topk(
            query_batch.contiguous(), Keys.dense(keys), K
        ).slots
        for query_batch in (tuning, checking)
    }

    def share(method: Any, queries: torch.Tensor, knob: int) -> float:
        answer = method.ask(method.prepared(queries), knob)
        return coverage(queries, keys, answer, exact[id(queries)])

    rows, calls = [], {}
    for method in methods:
        method.ready()
        targets = options.targets if method.knob else [0.0]
        chosen = tune(method, targets, partial(share, method, tuning))
        for target, (knob, reached) in chosen.items():
            row = {"keys": count, "heads": heads, "method": method.name}
            row |= {"target": target, "knob": method.knob, "value": knob}
            row |= {"tuned": reached, "coverage": None, "call": None}
            if knob is not None:
                row["coverage"] = share(method, checking, knob)
                row["call"] = f"{method.name} {knob}"
                calls[row["call"]] = (method, knob)
            rows.append(row)
        say(f"{method.name}: {method.knob} {[value for value, _ in chosen.values()]}")

    for repeat in range(options.repeats + 2):
        if repeat == 2:  # the first two warm up
            timer.forget(*calls)
        query_batch = timed[repeat % len(timed)]
        for name in order.sample(list(calls), len(calls)):
            method, knob = calls[name]
            ready = method.prepared(query_batch)
            empty_caches()
            timer.run(name, partial(method.ask, ready, knob))

    growing = [each for each in methods if isinstance(each, Ours | GrowingLibrary)]
    for at in range(INSERTS):
        more = keys[:, at * INSERTED : (at + 1) * INSERTED]
        for method in order.sample(growing, len(growing)):
            empty_caches()
            timer.run(f"insert {method.name}", partial(method.insert, more))

    for row in rows:
        build, call = f"build {row['method']}", row.pop("call")
        per_query = 1e3 / (heads * options.group)  # from ms per call to µs per query
        for kind, times in (("cpu", timer.cpu), ("wall", timer.wall)):
            row[f"build_ms_{kind}"] = [x / heads for x in spread(times[build])]
            if inserts := times.get(f"insert {row['method']}"):
                row[f"insert_ms_{kind}"] = [x / heads for x in spread(inserts)]
                row[f"longest_insert_ms_{kind}"] = max(inserts) / heads
            if call is not None:
                row[f"query_us_{kind}"] = [x * per_query for x in spread(times[call])]
    return rows


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.MARKDOWN)
    for column in ("keys", "method", "target", "setting", "coverage"):
        table.add_column(column, no_wrap=True)
    table.add_column("query µs", no_wrap=True)
    table.add_column("build ms per head", no_wrap=True)
    table.add_column("insert 16 keys, ms per head", no_wrap=True)
    table.add_column("longest", no_wrap=True)
    for row in rows:
        result, setting = row["coverage"], f"{row['knob']} {row['value']}"
        table.add_row(
            f"{row['keys'] // 1024}K",
            row["method"],
            f"{row['target']}" if row["knob"] else "exact",
            setting if row["knob"] and result is not None else "–",
            f"{result:.3f}" if result is not None else f"at most {row['tuned']:.3f}",
            cell(row, "query_us"),
            cell(row, "build_ms"),
            cell(row, "insert_ms"),
            number(row["longest_insert_ms_cpu"]) if "insert_ms_cpu" in row else "",
        )
    return table


def crossovers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lengths at which the tree needs less CPU time than the other methods.

    Interpolates between the measured lengths with power laws. Ratios are other method /
    tree.
    """
    times: dict[tuple[str, float], dict[int, float]] = {}
    for row in rows:
        if "query_us_cpu" in row:
            key = row["method"], row["target"]
            times.setdefault(key, {})[row["keys"]] = row["query_us_cpu"][0]
    lines = []
    for (ours, target), tree in times.items():
        for (other, bar), theirs in times.items():
            exact = other == ours.replace("tree", "scan")
            if not ours.startswith("tree") or other.startswith("tree"):
                continue
            if not (exact or bar == target):
                continue
            sizes = sorted(tree.keys() & theirs.keys())
            if not sizes:
                continue
            gains = [math.log(theirs[size] / tree[size]) for size in sizes]
            line = {"tree": ours, "other": other, "target": target}
            line["ratios"] = {
                size: round(math.exp(gain), 2)
                for size, gain in zip(sizes, gains, strict=True)
            }
            line["faster"] = where(sizes, gains)
            lines.append(line)
    return sorted(lines, key=lambda line: line["target"])


def table_of_crossovers(sizes: list[int], lines: list[dict[str, Any]]) -> Table:
    table = Table(box=box.MARKDOWN)
    lengths = [f"{size // 1024}K" for size in sizes]
    for column in ("target", "tree", "against", *lengths, "tree is faster"):
        table.add_column(column, no_wrap=True)
    for line in lines:
        ratios = [line["ratios"].get(size, "–") for size in sizes]
        row = [line["target"], line["tree"], line["other"], *ratios, line["faster"]]
        table.add_row(*map(str, row))
    return table


def where(sizes: list[int], gains: list[float]) -> str:
    """Describe the sizes at which gains are positive, among those with both results."""
    if all(gain > 0 for gain in gains):
        return "at every length compared"
    if all(gain <= 0 for gain in gains):
        return "at none compared"
    words = []
    for i in range(len(sizes) - 1):
        if (gains[i] > 0) != (gains[i + 1] > 0):
            part = gains[i] / (gains[i] - gains[i + 1])
            at = sizes[i] * (sizes[i + 1] / sizes[i]) ** part
            words.append(f"{'up to' if gains[i] > 0 else 'from'} about {at:,.0f}")
    return ", ".join(words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder of a model that provides the keys")
    add(
        "--texts",
        default="",
        help="text to read with the model; default: generated sentences",
    )
    add("--sizes", type=int, nargs="+", default=[4096, 32768, 131072])
    add(
        "--untiled",
        type=int,
        default=6000,
        help="keys to take from the model; longer contexts repeat them with noise",
    )
    add("--heads", type=int, nargs="+", default=[8, 8, 2], help="KV heads, per size")
    add("--group", type=int, default=3, help="queries per KV head in a call")
    add(
        "--dtypes",
        nargs="+",
        default=["float32", "bfloat16"],
        help="dtypes of our index",
    )
    add(
        "--kinds",
        nargs="+",
        choices=list(Ours.kinds),
        default=["scan", "tree", "codes"],
        help="our indexes to measure",
    )
    add("--promotion", type=float, default=1 / 32, help="setting of the tree")
    add("--targets", type=float, nargs="+", default=[0.95, 0.98], help="coverage")
    add("--threads", type=int, default=1)
    add("--repeats", type=int, default=30)
    add("--builds", type=int, default=3)
    add("--seed", type=int, default=20261121)
    add("--json-out", type=Path)
    options = parser.parse_args()
    if len(options.heads) != len(options.sizes):
        parser.error("--heads needs one number for each of --sizes")
    if not 1 <= options.group <= QUERIES // 2:
        parser.error(f"--group must be from 1 to {QUERIES // 2}")
    return options


def main() -> None:
    options = parse()
    # Every library reads this once, at import: restart the process if it differs.
    if os.environ.get("OMP_NUM_THREADS") != str(options.threads):
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.manual_seed(options.seed)
    result = libraries()
    DCIIndex(1, 8)  # loads the library
    facts = provenance() | {
        "threads": str(torch.get_num_threads()),
        "kernels": ops.extension_info()["simd"],
        "load before": f"{os.getloadavg()[0]:.1f}",
    }
    for module, package in PACKAGES.items():
        if module in result:
            facts[module] = importlib.metadata.version(package)
    rows: list[dict[str, Any]] = []
    for count, heads in zip(options.sizes, options.heads, strict=True):
        rows += measure(options, result, count, heads)
    facts["load after"] = f"{os.getloadavg()[0]:.1f}"
    lines = crossovers(rows)
    console = Console(width=200)
    console.print_json(data=facts)
    console.print(table_of(rows))
    console.print(table_of_crossovers(options.sizes, lines))
    if options.json_out:
        record = facts | {"rows": rows, "crossovers": lines}
        options.json_out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
