"""Cost, size and accuracy of low-rank factors of a real model's keys and values.

Reads a document once and cuts its keys (after RoPE) and values, in bfloat16 as in a
cache, into spans. Prints three tables for each division into spans:

- kept: energy and error by rank, and the size of the factors as a share of the rows;
- encode: the compiled decomposition, torch's batched one, and torch's one matrix at a
  time, as time per 1000 tokens and layer, and for all layers as a share of prefill;
- reconstruct: rows written into pages whose keys are columns, as vLLM's on a CPU, or
  rows, as the entries of a zoom; next to torch's products with a scatter, and a scatter
  of uncompressed rows.

    OMP_NUM_THREADS=2 python benchmarks/kernels/svd.py MODEL DOCUMENTS \\
        --json-out svd.json

All timed calls take turns within each round, one layer after the other, in random
order. 64 MiB of other memory are overwritten before each call. On a shared machine read
the CPU time. Rates (GB/s read and written, GFLOP/s) are medians of CPU time, compared
with a copy of 16 MiB and a 512 x 512 product on the same machine. Spans are chunks of
--chunk tokens, or those of --spans: a JSON object of lists of boundaries, {"entropy":
[0, 31, 90, ...]}.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _documents import read_documents
from _engine import provenance
from _masked_model import MaskedModel
from _svd_zoom import Limits, Spans, Times, Zoom
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_kvplugins import ops

RANKS = (8, 16, 32, 64)
_OTHER_DATA = torch.zeros(64 << 18)  # 64 MiB


# -- what is kept ---------------------------------------------------------------------


def kept(layers: list[torch.Tensor], spans: Spans) -> list[dict[str, Any]]:
    """One row per rank: means over spans, KV heads and layers.

    Energy is the share of the squared norm within the rank. Errors are of the rows that
    bfloat16 factors reconstruct, relative to the norm of a span.
    """
    which = torch.arange(len(layers[0]) * len(spans.starts))
    rows = []
    for rank in RANKS:
        energy, ranks, size = [], [], 0
        errors: dict[str, list[float]] = {"keys": [], "values": []}
        for layer in layers:
            exact = ops.truncated_svd(
                layer, spans.starts, spans.lengths, rank, dtype=torch.float32
            )
            stored = ops.truncated_svd(layer, spans.starts, spans.lengths, rank)
            restored = ops.reconstruct(stored, which, torch.float32)
            size += stored.nbytes
            ranks += stored.ranks.tolist()
            first = 0
            for matrix in which.tolist():
                plane, span = divmod(matrix, len(spans.starts))
                start, length = int(spans.starts[span]), int(spans.lengths[span])
                part = layer[plane, start : start + length].float()
                norm = float(part.norm())
                energy.append(float(exact.singular_values(matrix).norm() / norm) ** 2)
                half = "keys" if 2 * plane < len(layer) else "values"
                difference = restored[first : first + length] - part
                errors[half].append(float(difference.norm()) / norm)
                first += length
        plain = len(layers) * len(layers[0]) * spans.tokens * layers[0].shape[2] * 2
        rows.append(
            {
                "spans": spans.name,
                "rank": rank,
                "mean_rank": statistics.mean(ranks),
                "energy": statistics.mean(energy),
                "key_error": statistics.mean(errors["keys"]),
                "value_error": statistics.mean(errors["values"]),
                "size": size / plain,
            }
        )
    return rows


# -- encode ---------------------------------------------------------------------------


def encoders(
    layer: torch.Tensor, spans: Spans, rank: int
) -> dict[str, Callable[[], object]]:
    """Calls that decompose all spans of a layer's keys and values."""

    def batched() -> None:
        for tokens in spans.groups():
            torch.linalg.svd(layer[:, tokens].float(), full_matrices=False)

    def looped() -> None:
        for plane in layer.float():
            pairs = zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True)
            for start, length in pairs:
                torch.linalg.svd(plane[start : start + length], full_matrices=False)

    return {
        "compiled": lambda: ops.truncated_svd(layer, spans.starts, spans.lengths, rank),
        "torch, batched": batched,
        "torch, one by one": looped,
    }


# -- all of it ------------------------------------------------------------------------


def time_all(
    layers: list[torch.Tensor],
    cuts: list[Spans],
    rank: int,
    rounds: int,
    prefill: Callable[[], object],
) -> tuple[Times, dict[str, Zoom], dict[str, float]]:
    """Time everything once per layer and round, alternating; the first round warms up.

    Returns:
        Times, the zooms of the first layer of each division, and the machine's limits.
    """
    times = Times()
    limits = Limits()
    zooms = {
        spans.name: [Zoom(layer, spans, rank) for layer in layers] for spans in cuts
    }
    shuffle = random.Random(0).sample
    for number in range(rounds + 1):
        if number == 1:
            times = Times()
        times.run("prefill", prefill)
        for i, layer in enumerate(layers):
            calls = limits.ways()
            for cut in cuts:
                for name, call in encoders(layer, cut, rank).items():
                    calls[f"{cut.name}: encode: {name}"] = call
                for name, call in zooms[cut.name][i].ways().items():
                    calls[f"{cut.name}: reconstruct: {name}"] = call
            for name in shuffle(list(calls), len(calls)):
                # overwrite memory, as other layers do between two calls
                _OTHER_DATA.add_(1)
                times.run(name, calls[name])
    first = {name: of_layers[0] for name, of_layers in zooms.items()}
    return times, first, limits.rates(times)


def encode_rows(
    times: Times, cuts: list[Spans], num_layers: int, tokens: int
) -> list[dict[str, Any]]:
    prefill = times.median("prefill", tokens / 1e3)
    rows = []
    for spans in cuts:
        for name in ("compiled", "torch, batched", "torch, one by one"):
            cost = times.median(f"{spans.name}: encode: {name}", spans.tokens / 1e3)
            share = num_layers * cost["cpu_ms"] / prefill["cpu_ms"]
            rows.append({"spans": spans.name, "way": name, **cost, "of_prefill": share})
    return rows


def reconstruct_rows(
    times: Times, cuts: list[Spans], zooms: dict[str, Zoom], limits: dict[str, float]
) -> list[dict[str, Any]]:
    """Rates of median calls, also as shares of the machine's limits."""
    rows = []
    for spans in cuts:
        zoom = zooms[spans.name]
        for name in zoom.ways():
            label = f"{spans.name}: reconstruct: {name}"
            cost = times.median(label, spans.tokens / 1e3)
            seconds = statistics.median(times.cpu[label]) / 1e3
            row: dict[str, Any] = {"spans": spans.name, "way": name, **cost}
            if name != "plain":
                row["gflop_s"] = zoom.operations / seconds / 1e9
            if name.startswith("compiled"):
                row["gb_s"] = zoom.bytes_moved / seconds / 1e9
                row["of_product"] = row["gflop_s"] / limits["product_gflop_s"]
                row["of_copy"] = row["gb_s"] / limits["copy_gb_s"]
            rows.append(row)
    return rows


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    table = Table(*columns, title=title)
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(*(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    console.print(table)


def main(
    model: str,
    documents: Path,
    tokens: int = 2048,
    rank: Annotated[int, typer.Option(help="rank of the timed factors")] = 32,
    chunk: Annotated[list[int] | None, typer.Option(help="16, 32 and 64")] = None,
    spans: Annotated[Path | None, typer.Option(help="JSON: boundaries by name")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="1 and 2")] = None,
    timed_layers: Annotated[int, typer.Option(help="evenly spread")] = 3,
    rounds: int = 7,
    json_out: Path | None = None,
) -> None:
    """Print and save the three tables."""
    console = Console(width=140)
    if reason := ops.extension_info()["reason"]:
        raise typer.BadParameter(f"nothing to measure: {reason}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    read = (tokenizer.encode(doc.text)[:tokens] for doc in read_documents(documents))
    ids = next(
        (tokens_read for tokens_read in read if len(tokens_read) == tokens), None
    )
    if ids is None:
        raise typer.BadParameter(f"{documents} has no document of {tokens} tokens")
    prompt = MaskedModel(model).read(ids)
    layers = [
        torch.cat(pair).bfloat16()
        for pair in zip(prompt.keys, prompt.values, strict=True)
    ]
    given = json.loads(spans.read_text()) if spans else {}
    if not given:
        given = {str(n): list(range(0, tokens + 1, n)) for n in chunk or [16, 32, 64]}
    cuts = [Spans.between(name, bounds, tokens) for name, bounds in given.items()]
    # commit and machine of the loaded code, before the measurement
    report: dict[str, Any] = dict(provenance())
    report["kept"] = [row for cut in cuts for row in kept(layers, cut)]
    show(console, "kept", report["kept"])
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.no_grad()
    def prefill() -> object:
        return stock(torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    step = max(1, len(layers) // timed_layers)
    for count in threads or [1, 2]:
        torch.set_num_threads(count)
        times, zooms, limits = time_all(layers[::step], cuts, rank, rounds, prefill)
        timed = {
            "encode": encode_rows(times, cuts, len(layers), tokens),
            "reconstruct": reconstruct_rows(times, cuts, zooms, limits),
            "prefill": times.median("prefill", tokens / 1e3),
            "limits": limits,
        }
        report[f"threads {count}"] = timed
        show(console, f"encode, {count} thread(s), per 1000 tokens", timed["encode"])
        show(console, f"reconstruct, {count} thread(s)", timed["reconstruct"])
        console.print({name: timed[name] for name in ("prefill", "limits")})
    console.print_json(data={k: v for k, v in report.items() if isinstance(v, str)})
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    typer.run(main)
