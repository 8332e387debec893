"""How much attention does SeKV's routing find, of first and of second order?

Reads each document once. Single queries at its end then rank the spans of the tokens
before them, as the policy does at a budget, without a trained router. Both orders get
the same bytes on the device: variances take room from spans and zoomed tokens.

    OMP_NUM_THREADS=1 python benchmarks/research/span_routing.py MODEL DOCUMENTS

- ``coverage``: attention to zoomed spans, as a share of the attention to all spans, of
  the query heads that share a KV head; mean and lowest tenth over layers, KV heads and
  queries. ``exact``: spans ranked by the attention that they get.
- ``output error``: of the attention output, relative to its norm. ``second-order bias``
  also adds the term of second order to the score of a mean, which the engine's kernel
  cannot do: a mean has one bias for all queries.
- ``rounded``: share of the zoomed spans that are the same if the means are rounded to
  bfloat16, as in a cache of that dtype.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _documents import read_documents
from _engine import provenance
from _masked_model import MaskedModel, Prompt
from _resolved_model import surprisals
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from vllm_kvplugins.ops import within_room
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.sekv import SeKV
from vllm_kvplugins.spans.coarse import CoarseSpans, weighted_means
from vllm_kvplugins.spans.segmentation import Segments

BLOCK_SIZE, ASKED = 32, 64
SHARES = (0.05, 0.1, 0.2)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's tokens, and its spans.

    Attributes:
        keys, values: [num_kv_heads, tokens, head_dim].
        spans: with variances.
        mean_values: float32 [num_kv_heads, spans, head_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor
    spans: CoarseSpans
    mean_values: torch.Tensor

    @staticmethod
    def of(prompt: Prompt, layer: int, segments: Segments) -> Layer:
        keys, values = prompt.keys[layer].float(), prompt.values[layer].float()
        inside = segments.positions
        spans = CoarseSpans.of(
            keys[:, inside], segments, lambda means: None, with_variance=True
        )
        return Layer(keys, values, spans, weighted_means(values[:, inside], segments))


def span_mass(weights: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Attention to each span: [num_kv_heads, spans], from [num_kv_heads, tokens]."""
    mass = torch.zeros(len(weights), segments.num_spans)
    return mass.index_add_(1, segments.span, weights[:, segments.positions])


def mixed_output(
    layer: Layer,
    segments: Segments,
    queries: torch.Tensor,
    position: int,
    zoomed: torch.Tensor,
    second_order: bool,
) -> torch.Tensor:
    """Attention output over resident and zoomed tokens and the means of other spans.

    Args:
        queries: [num_kv_heads, group, head_dim], times the scale.
        position: of the query.
        zoomed: bool [num_kv_heads, spans].
        second_order: add the term of second order to the scores of means.
    """
    spans, seen = layer.spans, position + 1
    hidden = torch.zeros(len(zoomed), seen, dtype=torch.bool)
    hidden[:, segments.positions] = ~zoomed[:, segments.span]
    tokens = queries @ layer.keys[:, :seen].mT
    tokens = tokens.masked_fill(hidden[:, None], -torch.inf)
    means = queries @ spans.keys.mT + spans.log_sizes
    if second_order:
        assert spans.key_variance is not None
        means += 0.5 * queries.square() @ spans.key_variance.float().mT
    means = means.masked_fill(zoomed[:, None], -torch.inf)
    shares = torch.cat([tokens, means], -1).softmax(-1)
    return shares[..., :seen] @ layer.values[:, :seen] + (
        shares[..., seen:] @ layer.mean_values
    )


def measure(
    share: float, prompt: Prompt, surprisal: torch.Tensor, element_bytes: int
) -> Iterator[dict[str, float]]:
    """A row per layer, KV head and query."""
    heads, tokens, dim = prompt.keys[0].shape
    rows = len(prompt.keys) * heads
    geometry = Geometry(
        BLOCK_SIZE,
        len(prompt.keys),
        heads,
        2 * rows * dim * element_bytes,
        dim,
        element_bytes,
    )
    prefix = tokens - ASKED
    divided: list[tuple[SeKV, Segments, int]] = []
    for order in (False, True):
        policy = SeKV(budget=share, second_order=order)
        (compaction,) = policy.plan(Lengths(prefix), geometry).compactions
        stays = len(compaction.retained) * BLOCK_SIZE + prefix % BLOCK_SIZE
        segments = policy.segment(surprisal[:prefix], stays, geometry)
        room = policy.zoom_tokens(prefix, geometry)
        divided.append((policy, segments, room))
    for number in range(len(prompt.keys)):
        layers = [Layer.of(prompt, number, each[1]) for each in divided]
        for position in range(prefix, tokens, ASKED // 4):
            queries = prompt.queries[number][:, position].float()
            grouped = queries.view(heads, -1, dim)
            yield from _one_query(
                divided, layers, grouped, position, prompt.scales[number]
            )


def _one_query(
    divided: list[tuple[SeKV, Segments, int]],
    layers: list[Layer],
    queries: torch.Tensor,
    position: int,
    scale: float,
) -> Iterator[dict[str, float]]:
    seen, result = position + 1, dict[str, torch.Tensor]()
    keys, values = layers[0].keys[:, :seen], layers[0].values[:, :seen]
    weights = (queries @ keys.mT * scale).softmax(-1)
    exact = weights @ values

    def error(output: torch.Tensor) -> torch.Tensor:
        off = (output - exact).square().sum((1, 2)) / exact.square().sum((1, 2))
        return off.sqrt()

    for order, (policy, segments, room) in zip(
        ("first", "second"), divided, strict=True
    ):
        layer = layers[order == "second"]
        spans = layer.spans
        if order == "first":
            spans = replace(spans, key_variance=None)
        mass = span_mass(weights.sum(1), segments)
        zoomed = within_room(policy.gates(0, queries, spans, scale), spans.sizes, room)
        result[f"coverage, {order}"] = (mass * zoomed).sum(1) / mass.sum(1)
        asked = queries * scale
        same = layer, segments, asked, position, zoomed
        result[f"output error, {order}"] = error(mixed_output(*same, False))
        if order == "second":
            result["output error, second-order bias"] = error(mixed_output(*same, True))
            continue
        best = within_room(mass, spans.sizes, room)
        result["coverage, exact"] = (mass * best).sum(1) / mass.sum(1)
        rounded = replace(spans, keys=spans.keys.bfloat16())
        again = policy.gates(0, queries, rounded, scale)
        both = zoomed & within_room(again, spans.sizes, room)
        result["rounded"] = both.sum(1) / zoomed.sum(1).clamp(min=1)
    for head in range(len(queries)):
        yield {name: float(values[head]) for name, values in result.items()}


def main(
    model: str,
    documents: Path,
    tokens: int = 2048,
    limit: Annotated[int, typer.Option(help="documents")] = 4,
    element_bytes: Annotated[int, typer.Option(help="4: float32, 2: bfloat16")] = 4,
    json_out: Path | None = None,
) -> None:
    """Print and save a line per budget and quantity."""
    tokenizer, masked = AutoTokenizer.from_pretrained(model), MaskedModel(model)
    rows: dict[float, list[dict[str, float]]] = {share: [] for share in SHARES}
    used: list[str] = []
    for document in read_documents(documents):
        ids = tokenizer.encode(document.text)[:tokens]
        if len(ids) < tokens or len(used) == limit:
            continue
        used.append(document.name)
        prompt = masked.read(ids, logits=tokens)
        surprisal = surprisals(prompt.logits, ids)
        for share in SHARES:
            rows[share] += measure(share, prompt, surprisal, element_bytes)
    if len(used) < limit:
        raise typer.BadParameter(f"{documents} has {len(used)} documents, not {limit}")
    table, lines = Table("budget", "quantity", "mean", "lowest tenth"), []
    for share, own in rows.items():
        for name in own[0]:
            numbers = [row[name] for row in own]
            line: dict[str, Any] = {"share": share, "quantity": name}
            line["mean"] = statistics.mean(numbers)
            line["p10"] = statistics.quantiles(numbers, n=10)[0]
            lines.append(line)
            table.add_row(
                f"{share:.0%}", name, f"{line['mean']:.3f}", f"{line['p10']:.3f}"
            )
    Console().print(table)
    result = {"rows": lines, "documents": used} | provenance()
    Console().print_json(data={k: v for k, v in result.items() if k != "rows"})
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
