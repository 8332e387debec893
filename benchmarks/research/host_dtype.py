"""Errors of quantized host memory (``host_dtype``), on real keys, values and queries.

Reads documents once with full KV in float32 and rounds keys and values to the cache's
dtype. Quantizes and dequantizes the tokens that a retriever would offload. Reports, for
each ``host_dtype``, relative to float32:

- the error of all keys, and of all values of a layer (norm of the difference by norm),
- the error of a query's attention output over all these tokens,

each with the error that the cache's dtype has by itself. Coverage with quantized keys:
``coverage.py --policy '{"name": "icecache", "host_dtype": "int8"}'``.

    python benchmarks/research/host_dtype.py MODEL DOCUMENTS --json-out errors.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import _path  # noqa: F401
import torch
import typer
from _documents import read_documents
from _engine import provenance
from _masked_model import MaskedModel, Prompt
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

from vllm_kvplugins.ops import QuantizedRows

SINKS, WINDOW, SKIPPED = 16, 64, 2
MEASURES = ("keys", "values", "output")


def conversions(
    head_dim: int, dtype: torch.dtype
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What happens to float32 rows on their way to the host and back, by name."""

    def quantized(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
        rows = QuantizedRows(head_dim, bits)
        # The cache's dtype, before and after.
        return lambda x: rows.dequantize(rows.quantize(x.to(dtype)), dtype).float()

    return {
        "auto": lambda x: x.to(dtype).float(),
        "int8": quantized(8),
        "int4": quantized(4),
    }


def relative(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative error of each row."""
    return (actual - exact).norm(dim=-1) / exact.norm(dim=-1)


def errors(
    prompt: Prompt, dtype: torch.dtype, positions: range
) -> dict[str, dict[str, list[float]]]:
    """Errors by conversion and measure: one per layer; of outputs, one per query."""
    offloaded = slice(SINKS, prompt.tokens - WINDOW)
    converted = conversions(prompt.keys[0].shape[2], dtype)
    found = {name: {what: [] for what in MEASURES} for name in converted}
    for layer in range(SKIPPED, len(prompt.keys)):
        keys, values = (
            part[layer][:, offloaded].contiguous()
            for part in (prompt.keys, prompt.values)
        )
        heads, _, dim = keys.shape
        queries = prompt.queries[layer][:, positions.start :: positions.step]
        queries = queries.reshape(heads, -1, dim) * prompt.scales[layer]
        exact = (queries @ keys.transpose(1, 2)).softmax(-1) @ values
        for name, convert in converted.items():
            k, v = convert(keys), convert(values)
            output = (queries @ k.transpose(1, 2)).softmax(-1) @ v
            for what, actual, right in (("keys", k, keys), ("values", v, values)):
                error = relative(actual.flatten(), right.flatten())
                found[name][what].append(float(error))
            found[name]["output"] += relative(output, exact).flatten().tolist()
    return found


def main(
    model: str,
    documents: Path,
    tokens: int = 3072,
    queries: Annotated[int, typer.Option(help="queries per document and layer")] = 4,
    limit: Annotated[int, typer.Option(help="documents")] = 4,
    dtype: Annotated[str, typer.Option(help="of the cache")] = "bfloat16",
    json_out: Path | None = None,
) -> None:
    """Print and save mean errors, and the largest tenth of the outputs'."""
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(model)
    masked = MaskedModel(model)
    cache_dtype: torch.dtype = getattr(torch, dtype)
    texts = {d.name: tokenizer.encode(d.text) for d in read_documents(documents)}
    used = [name for name, ids in texts.items() if len(ids) >= tokens][:limit]
    if len(used) < limit:
        raise typer.BadParameter(
            f"{documents} has {len(used)} documents of {tokens} tokens, not {limit}"
        )
    step = WINDOW // queries
    positions = range(tokens - step * queries, tokens, step)
    total: dict[str, dict[str, list[float]]] = {}
    for name in track(used, "documents", console=console):
        prompt = masked.read(texts[name][:tokens])
        for way, by_measure in errors(prompt, cache_dtype, positions).items():
            for what, some in by_measure.items():
                total.setdefault(way, {}).setdefault(what, []).extend(some)
    table = Table("host_dtype", "bytes", *MEASURES, "output, p90")
    rows = []
    for way, measured in total.items():
        row = {what: statistics.mean(measured[what]) for what in MEASURES}
        row["output_p90"] = statistics.quantiles(measured["output"], n=10)[-1]
        width = prompt.keys[0].shape[2]
        row_bytes = width * cache_dtype.itemsize
        if way != "auto":
            row_bytes = QuantizedRows(width, 8 if way == "int8" else 4).row_bytes
        rows.append({"host_dtype": way, "row_bytes": row_bytes, **row})
        table.add_row(way, str(row_bytes), *(f"{each:.4f}" for each in row.values()))
    console.print(f"mean relative errors against float32; the cache is in {dtype}")
    console.print(table)
    result = {"rows": rows, "documents": used, **provenance()}
    console.print_json(data={k: v for k, v in result.items() if k != "rows"})
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
