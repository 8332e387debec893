"""Share of the attention that retrievers find, on real keys and queries.

Reads a document once with full KV. Offloads its first tokens as the engine would.
Single later queries then request a budget of tokens from each retriever. Reports the
attention to the tokens found, summed over the queries that share a KV head, as a share
of what the exact choice of the same size gets; for compiled indices also the share of
the keys that a search scores. With ``--append-tokens`` the index gets the keys in
blocks, as with ``prefill_block``. With ``host_dtype`` the index reads quantized keys,
and attention is still that of the exact keys.

    python benchmarks/quality/coverage.py MODEL DOCUMENTS --json-out coverage.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

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

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.retrieval.row_order import RowOrder
from vllm_kvplugins.index import Keys
from vllm_kvplugins.index.compiled import CompiledIndex
from vllm_kvplugins.policies import available_policies, icecache

BUDGETS = (64, 128, 256)


VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "icecache", "fetch": "pages"},
    {"name": "icecache", "fetch": "pages", "index": "dci"},
    {"name": "arkvale", "page_tokens": 16},
    {"name": "pqcache", "subspaces": 4, "bits": 8},
)


def retrievers() -> list[dict[str, Any]]:
    """All installed retrievers, some of them also with other than default settings."""
    names = available_policies()
    result = [
        {"name": name} for name in names if parse_policy(name).retrieval is not None
    ]
    return [*result, *VARIANTS]


def keys_on_host(policy: Any, keys: torch.Tensor) -> Keys:
    """Keys [heads, n, head_dim] as the policy's host tier has them."""
    rows = policy.quantized_rows(keys.shape[2])
    if rows is None:
        return Keys.dense(keys)
    return replace(Keys.dense(rows.quantize(keys)), quantized=rows)


def selection(
    policy: Any, index: Any, keys: torch.Tensor, on_host: Keys
) -> Callable[[torch.Tensor, float, int], torch.Tensor]:
    """What selects tokens: from queries, a scale and a number of tokens.

    A policy that fetches whole pages has keys in the order of its index on the host.
    """
    pages = policy.page_selection
    if pages is None:
        return lambda queries, scale, count: index.select(
            queries, on_host, scale, count
        )
    heads, size = len(keys), pages.page_tokens
    order = RowOrder.of_arrival(heads).extended(index.order(0))
    tokens = order.tokens_at(torch.arange(keys.shape[1]).expand(heads, -1))
    stored = keys_on_host(
        policy, keys.gather(1, tokens[..., None].expand(-1, -1, keys.shape[2]))
    )

    def choose(queries: torch.Tensor, scale: float, count: int) -> torch.Tensor:
        chosen = pages.select([index], queries[None], stored, scale, count // size)[0]
        rows = chosen[..., None] * size + torch.arange(size)
        return order.tokens_at(rows.flatten(1))

    return choose


def scored_keys(
    policy: Any, index: Any, queries: torch.Tensor, on_host: Keys
) -> list[int]:
    """Keys whose scores a search for ``BUDGETS[0]`` keys computes, one per KV head.

    Codes are scored for all queries of a KV head together. Means of pages do not count.
    Empty if the index does not tell.
    """
    if not isinstance(index, CompiledIndex) or policy.page_selection is not None:
        return []
    visits = index.query_topk(queries, on_host, BUDGETS[0]).visits
    return visits.amax(-1).tolist()


def coverage(
    policy: Any,
    prompt: Prompt,
    offloaded: range,
    positions: range,
    append_tokens: int = 0,
) -> tuple[dict[int, list[float]], list[float]]:
    """Shares by budget, one per layer, KV head and query; and the shares of the keys
    that are scored.
    """
    shares: dict[int, list[float]] = {budget: [] for budget in BUDGETS}
    scored: list[float] = []
    for layer in range(policy.skip_layers, len(prompt.keys)):
        keys = prompt.keys[layer][:, offloaded.start : offloaded.stop]
        heads, _, head_dim = keys.shape
        index = policy.new_index(heads, head_dim)
        on_host = keys_on_host(policy, keys)
        rows = on_host.gather()[0]
        step = append_tokens or len(offloaded)
        for first in range(0, len(offloaded), step):
            index.append(rows[:, first : first + step].contiguous(), first)
        choose = selection(policy, index, keys, on_host)
        scale = prompt.scales[layer]
        for position in positions:
            queries = prompt.queries[layer][:, position]
            grouped = queries.reshape(heads, -1, head_dim)
            visits = scored_keys(policy, index, grouped, on_host)
            scored += [count / len(offloaded) for count in visits]
            worth = (grouped @ keys.transpose(1, 2) * scale).softmax(-1).sum(1)
            for budget in BUDGETS:
                result = choose(grouped, scale, budget)
                held = worth.gather(1, result.clamp(min=0)).masked_fill(result < 0, 0)
                best = worth.topk(budget).values.sum(1)
                shares[budget] += (held.sum(1) / best).tolist()
    return shares, scored


def main(
    model: str,
    documents: Path,
    tokens: int = 3072,
    queries: Annotated[int, typer.Option(help="queries per document and layer")] = 4,
    limit: Annotated[int, typer.Option(help="documents")] = 4,
    policy: Annotated[list[str] | None, typer.Option(help="JSON")] = None,
    append_tokens: Annotated[
        int, typer.Option(help="keys that an index gets at once; 0: all")
    ] = 0,
    segment: Annotated[
        int, typer.Option(help="tokens that icecache divides into pages together")
    ] = icecache._STORED_SEGMENT,
    json_out: Path | None = None,
) -> None:
    """Print and save the shares of every retriever at budgets 64, 128 and 256."""
    console = Console()
    icecache._STORED_SEGMENT = segment
    tokenizer = AutoTokenizer.from_pretrained(model)
    masked = MaskedModel(model)
    chosen = [json.loads(p) for p in policy] if policy else retrievers()
    shares: dict[tuple[int, int], list[float]] = {}
    scored: dict[int, list[float]] = {}
    used: list[str] = []
    for document in read_documents(documents):
        ids = tokenizer.encode(document.text)[:tokens]
        if len(ids) < tokens or len(used) == limit:
            continue
        used.append(document.name)
        prompt = masked.read(ids)
        step = 64 // queries
        positions = range(tokens - step * queries, tokens, step)
        for number, request in enumerate(track(chosen, document.name, console=console)):
            parsed = parse_policy(request)
            span = range(parsed.sinks, tokens - parsed.window)  # type: ignore[attr-defined]
            by_budget, visited = coverage(
                parsed, prompt, span, positions, append_tokens
            )
            scored.setdefault(number, []).extend(visited)
            for budget, some in by_budget.items():
                shares.setdefault((number, budget), []).extend(some)
    if len(used) < limit:
        raise typer.BadParameter(
            f"{documents} has {len(used)} documents of {tokens} tokens, not {limit}"
        )
    columns = [f"{budget} tokens" for budget in BUDGETS]
    table = Table("retriever", *columns, "scored keys")
    rows = []
    for number, request in enumerate(chosen):
        cells = []
        for budget in BUDGETS:
            all_of_them = shares[number, budget]
            tenths = statistics.quantiles(all_of_them, n=10)
            mean, low = statistics.mean(all_of_them), tenths[0]
            rows.append({"policy": request, "budget": budget, "mean": mean, "p10": low})
            cells.append(f"{mean:.3f} ({low:.3f})")
        some = scored[number]
        cells.append(f"{statistics.mean(some):.0%}" if some else "–")
        table.add_row(json.dumps(request), *cells)
    console.print("mean share of what the exact choice covers (lowest tenth below)")
    console.print(table)
    result = {"rows": rows, "documents": used, **provenance()}
    console.print_json(data={k: v for k, v in result.items() if k != "rows"})
    if json_out is not None:
        json_out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)
