"""Value of a token selection that was made for other queries.

`reuse_every` reuses the selection of an anchor layer. `prefetch` queries a layer's
index with the query of the previous step or layer. As in ``coverage.py``, but with
exact selections: the share of the attention that the layer's own selection of the same
size gets.

    python benchmarks/research/other_queries.py MODEL DOCUMENTS
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import _path  # noqa: F401
import torch
import typer
from _documents import read_documents
from _engine import provenance
from _masked_model import MaskedModel
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoTokenizer

BUDGETS = (64, 128, 256)
SINKS, WINDOW, SKIPPED = 16, 64, 2


def main(
    model: str,
    documents: Path,
    tokens: int = 3072,
    limit: Annotated[int, typer.Option(help="documents")] = 4,
    every: Annotated[int, typer.Option(help="reuse_every")] = 3,
) -> None:
    """Print the mean share for every source of queries, at three budgets."""
    console = Console()
    tokenizer = AutoTokenizer.from_pretrained(model)
    masked = MaskedModel(model)
    texts = [tokenizer.encode(document.text) for document in read_documents(documents)]
    texts = [ids[:tokens] for ids in texts if len(ids) >= tokens][:limit]
    shares: dict[str, dict[int, list[float]]] = {}
    for ids in track(texts, "documents", console=console):
        prompt = masked.read(ids)
        offloaded = slice(SINKS, tokens - WINDOW)
        for layer in range(SKIPPED, len(prompt.keys)):

            def worth(
                keys_of: int,
                queries_of: int,
                position: int,
                prompt=prompt,
                offloaded=offloaded,
            ) -> torch.Tensor:
                keys = prompt.keys[keys_of][:, offloaded]
                queries = prompt.queries[queries_of][:, position].reshape(
                    len(keys), -1, keys.shape[2]
                )
                logits = queries @ keys.transpose(1, 2) * prompt.scales[keys_of]
                return logits.softmax(-1).sum(1)

            anchor = SKIPPED + (layer - SKIPPED) // every * every
            for position in range(tokens - 61, tokens, 20):
                own = worth(layer, layer, position)
                sources = {
                    f"anchor layer (reuse_every {every})": worth(
                        anchor, anchor, position
                    ),
                    "step before (prefetch step)": worth(layer, layer, position - 1),
                    "layer before (prefetch layer)": worth(layer, layer - 1, position),
                }
                for name, other in sources.items():
                    for budget in BUDGETS:
                        chosen = other.topk(budget, -1).indices
                        best = own.topk(budget, -1).values.sum(-1)
                        share = own.gather(1, chosen).sum(-1) / best
                        kept = shares.setdefault(name, {}).setdefault(budget, [])
                        kept += share.tolist()
    table = Table("asked with the query of the", *(f"{b} tokens" for b in BUDGETS))
    for name, values in shares.items():
        cells = []
        for budget in BUDGETS:
            tenth = statistics.quantiles(values[budget], n=10)[0]
            cells.append(f"{statistics.mean(values[budget]):.3f} ({tenth:.3f})")
        table.add_row(name, *cells)
    console.print(table)
    console.print_json(data=provenance())


if __name__ == "__main__":
    typer.run(main)
