"""Do spans that end at surprising tokens compress better than other spans?

SeKV (section 3.2) says that keys and values of such spans are "often more compressible
than arbitrary token blocks". Reads each document once; surprisals come from the model's
own logits. Ways to find anchors:

- ``paper``: all tokens above mu + sigma, without spans shorter than 16 (L_min);
- ``sekv 10 %``, ``sekv 20 %``: the policy's choice at these budgets.

Each is compared with controls on the same document, at the same mean span length:

- ``surprise``: the spans themselves;
- ``shuffled``: the same tokens and lengths, in random order of lengths;
- ``chunks``: the same tokens in chunks of one length;
- ``chunks of all``: chunks that include the anchors.

    OMP_NUM_THREADS=1 python benchmarks/research/span_factors.py MODEL DOCUMENTS...

Energy and error are of all tokens together. A mean over spans would favour methods with
many short spans, which any rank approximates well.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _documents import read_documents
from _engine import provenance
from _masked_model import MaskedModel
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from vllm_kvplugins import ops
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.span_policy import SpanPolicy

RANKS = (8, 16, 32, 64)
SINKS, LEAST_SPAN, BLOCK_SIZE = 4, 16, 32
# smaller differences count as equal, because factors are rounded to bfloat16
MARGIN = 0.01
MEASURES = ("key_energy", "value_energy", "key_error", "value_error", "size")


@dataclass(frozen=True, slots=True)
class Cut:
    """One division of a document.

    Attributes:
        positions: int64 [n], tokens of spans, ascending.
        sizes: int64 [spans], consecutive runs of ``positions``.
    """

    name: str
    positions: torch.Tensor
    sizes: torch.Tensor


def plain_rule(surprisal: torch.Tensor) -> Cut:
    """Equation 1 with alpha = 1 and no limit on resident tokens."""
    surprisals = surprisal[1:]
    cuts = surprisal > surprisals.mean() + surprisals.std(correction=0)
    cuts[:SINKS] = True
    free = (~cuts).nonzero().squeeze(1)
    _, inside, sizes = cuts.cumsum(0)[free].unique_consecutive(
        return_inverse=True, return_counts=True
    )
    long = sizes >= LEAST_SPAN
    return Cut("surprise", free[long[inside]], sizes[long])


def of_policy(surprisal: torch.Tensor, policy: SpanPolicy, geometry: Geometry) -> Cut:
    """The policy's division of a prompt of this length."""
    tokens, size = surprisal.numel(), geometry.block_size
    (compaction,) = policy.plan(Lengths(tokens), geometry).compactions
    stays = len(compaction.retained) * size + tokens % size
    result = policy.segment(surprisal, stays, geometry)
    return Cut("surprise", result.positions, result.sizes)


def even_sizes(tokens: int, spans: int) -> torch.Tensor:
    """int64 [spans], as equal as possible."""
    edges = torch.arange(spans + 1) * tokens // spans
    return edges.diff()


def controls(cut: Cut, seed: int) -> Iterator[Cut]:
    """The division itself, and controls with its mean length."""
    yield cut
    spans, tokens = cut.sizes.numel(), cut.positions.numel()
    sizes = cut.sizes.tolist()
    random.Random(seed).shuffle(sizes)
    yield Cut("shuffled", cut.positions, torch.tensor(sizes))
    yield Cut("chunks", cut.positions, even_sizes(tokens, spans))
    first, last = int(cut.positions[0]), int(cut.positions[-1])
    all_of_it = torch.arange(first, last + 1)
    count = max(round(all_of_it.numel() * spans / tokens), 1)
    sizes_of_all = even_sizes(all_of_it.numel(), count)
    yield Cut("chunks of all", all_of_it, sizes_of_all)


def kept(layers: list[torch.Tensor], cut: Cut) -> list[dict[str, float]]:
    """Compression at each rank, over all layers and KV heads together.

    Args:
        layers: [2 * num_kv_heads, tokens, head_dim] each, keys and then values.
        cut: the division.

    Returns:
        Per rank: energy (share of the squared norm within the rank), error (of the rows
            that bfloat16 factors reconstruct, relative to the norm) and size (of the
            factors, as a share of the rows).
    """
    starts = cut.sizes.cumsum(0) - cut.sizes
    lost = torch.zeros(len(RANKS), 2, dtype=torch.float64)
    off, norm = torch.zeros_like(lost), torch.zeros(2, dtype=torch.float64)
    stored_bytes, plain_bytes = [0] * len(RANKS), 0
    for layer in layers:
        rows = layer[:, cut.positions].contiguous()
        plain_bytes += rows.nbytes
        norm += squared(rows)
        which = torch.arange(len(rows) * len(starts))
        for i, rank in enumerate(RANKS):
            for dtype in (torch.float32, torch.bfloat16):
                factors = ops.truncated_svd(rows, starts, cut.sizes, rank, dtype=dtype)
                restored = ops.reconstruct(factors, which, torch.float32).view_as(rows)
                if dtype == torch.bfloat16:
                    off[i] += squared(restored - rows.float())
                    stored_bytes[i] += factors.nbytes
                else:
                    lost[i] += squared(restored - rows.float())
    energy, error = 1 - lost / norm, (off / norm).sqrt()
    return [
        {
            "rank": float(rank),
            "key_energy": float(energy[i, 0]),
            "value_energy": float(energy[i, 1]),
            "key_error": float(error[i, 0]),
            "value_error": float(error[i, 1]),
            "size": stored_bytes[i] / plain_bytes,
        }
        for i, rank in enumerate(RANKS)
    ]


def squared(rows: torch.Tensor) -> torch.Tensor:
    """float64 [2]: squared norms of keys and of values."""
    return rows.double().square().view(2, -1).sum(1)


def measure(
    name: str, layers: list[torch.Tensor], surprisal: torch.Tensor
) -> list[dict[str, Any]]:
    """One row per anchor rule, control and rank."""
    planes, _, dim = layers[0].shape
    heads = planes // 2
    geometry = Geometry(BLOCK_SIZE, len(layers), heads, 4 * dim * heads * len(layers))
    cuts = {"paper": plain_rule(surprisal)}
    for share in (0.1, 0.2):
        policy = parse_policy({"name": "sekv", "budget": share})
        cuts[f"sekv {share:.0%}"] = of_policy(surprisal, policy, geometry)
    rows = []
    for way, cut in cuts.items():
        for control in controls(cut, seed=0):
            lengths = control.sizes.double()
            facts = {
                "document": name,
                "anchors": way,
                "spans": control.name,
                "num_spans": control.sizes.numel(),
                "mean_span": float(lengths.mean()),
                "longest_span": float(lengths.max()),
                "tokens": control.positions.numel(),
            }
            rows += [facts | row for row in kept(layers, control)]
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means and standard deviations over documents.

    Also the number of documents with smaller, and with larger, errors than the spans
    between surprising tokens.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["anchors"], row["rank"], row["spans"]), []).append(row)
    result = []
    for (anchors, rank, spans), group in groups.items():
        line: dict[str, Any] = {"anchors": anchors, "rank": int(rank), "spans": spans}
        line["mean_span"] = f"{statistics.mean(r['mean_span'] for r in group):.0f}"
        for measure_name in MEASURES:
            values = [row[measure_name] for row in group]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            line[measure_name] = f"{statistics.mean(values):.3f} ± {spread:.3f}"
        own = groups[anchors, rank, "surprise"]
        pairs = list(zip(group, own, strict=True))
        for half in ("key", "value"):
            ratios = [a[f"{half}_error"] / b[f"{half}_error"] for a, b in pairs]
            better = sum(ratio < 1 - MARGIN for ratio in ratios)
            worse = sum(ratio > 1 + MARGIN for ratio in ratios)
            line[f"{half}s better, worse"] = f"{better}, {worse}"
        result.append(line)
    return result


def main(
    model: str,
    documents: Annotated[list[Path], typer.Argument(help="files or folders")],
    each: Annotated[
        int, typer.Option(help="number of documents of each; takes the first ones")
    ] = 2,
    tokens: int = 2048,
    json_out: Path | None = None,
) -> None:
    """Print and save the table."""
    if reason := ops.extension_info()["reason"]:
        raise typer.BadParameter(f"factors come from the extension: {reason}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    masked = MaskedModel(model)
    rows: list[dict[str, Any]] = []
    for path in documents:
        read = (
            (d.name, tokenizer.encode(d.text)[:tokens]) for d in read_documents(path)
        )
        long = [(name, ids) for name, ids in read if len(ids) == tokens][:each]
        if len(long) < each:
            raise typer.BadParameter(
                f"{path} has {len(long)} documents of {tokens} tokens, not {each}"
            )
        for name, ids in long:
            prompt = masked.read(ids, logits=tokens)
            result = prompt.logits[:-1].log_softmax(-1)
            losses = -result.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            pairs = zip(prompt.keys, prompt.values, strict=True)
            layers = [torch.cat(pair).bfloat16() for pair in pairs]
            rows += measure(name, layers, torch.cat([torch.zeros(1), losses]))
    lines = summary(rows)
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(str, line.values()))
    console = Console(width=180)
    console.print(table)
    console.print_json(data=provenance())
    if json_out is not None:
        data = {"rows": rows, "summary": lines} | provenance()
        json_out.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    typer.run(main)
