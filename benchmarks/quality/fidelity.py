"""How much a policy changes the model's output, on real documents.

Reads a document once with full KV. Then feeds its true next tokens to the model once
per policy and budget, with the policy's dropped tokens hidden, and compares with full
KV:

* attention error: relative L2 distance of a layer's attention output. *Alone*: with the
  queries of full KV, so that only the layer's own loss counts. *In the model*: with the
  layer's own queries, so that losses of lower layers accumulate.
* KL: of the next token's distribution from full KV's, nats per token.
* top-1: share of positions at which both predict the same token.

    python benchmarks/quality/fidelity.py MODEL DOCUMENTS --json-out fidelity.json
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _documents import Document, read_documents
from _engine import provenance
from _masked_model import Branches, MaskedModel, Prompt, attend
from _selection import Probing, Selector, dropping_policies
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from vllm_kvplugins.config import describe, parse_policy

# Full KV token by token and in one pass may differ by rounding only.
SAME_KL = 1e-4
FIGURES = ("kl", "top1", "error_alone", "error_in_model")


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) of logits in nats over the last dimension."""
    log_p = reference.double().log_softmax(-1)
    log_q = other.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0)


def relative_error(reference: torch.Tensor, other: torch.Tensor) -> float:
    """L2 distance over the reference's L2 norm."""
    return float((other - reference).norm() / reference.norm())


class Reference:
    """One document under full KV, as the reference for policies.

    Args:
        model: runs the document.
        tokens: prompt and continuation.
        prompt_tokens: length of the prompt.
    """

    def __init__(self, model: MaskedModel, tokens: list[int], prompt_tokens: int):
        self.model = model
        self.next = torch.tensor([tokens[prompt_tokens:]])
        whole = model.read(tokens, logits=self.next.shape[1])
        self.prompt: Prompt = whole.first(prompt_tokens)
        shape = (1, len(whole.keys), whole.keys[0].shape[0], prompt_tokens)
        self.full = Branches(self.prompt, torch.ones(shape, dtype=torch.bool))
        self.logits = model.extend(self.full, self.next)[0]
        self.check = float(kl_divergence(whole.logits, self.logits).max())
        if self.check > SAME_KL:
            raise RuntimeError(f"full KV differs from one pass: KL {self.check:.2g}")

    def compare(self, kept: torch.Tensor) -> list[dict[str, Any]]:
        """Metrics of every selection.

        Args:
            kept: bool [selections, layers, kv_heads, prompt tokens].
        """
        branches = Branches(self.prompt, kept)
        logits = self.model.extend(branches, self.next.expand(len(kept), -1))
        rows = []
        for index, branch_logits in enumerate(logits):
            in_model = [
                relative_error(expected[0], branches.outputs[layer][index])
                for layer, expected in self.full.outputs.items()
            ]
            agree = branch_logits.argmax(-1) == self.logits.argmax(-1)
            alone = self._alone(kept[index])
            rows.append(
                {
                    "kl": kl_divergence(self.logits, branch_logits).mean().item(),
                    "top1": agree.double().mean().item(),
                    "error_alone": statistics.mean(alone),
                    "error_in_model": statistics.mean(in_model),
                    "error_alone_per_layer": [round(e, 5) for e in alone],
                    "error_in_model_per_layer": [round(e, 5) for e in in_model],
                    "kept_tokens": kept[index].sum(-1).double().mean().item(),
                }
            )
        return rows

    def _alone(self, kept: torch.Tensor) -> list[float]:
        """Error per layer when every layer gets full KV's queries."""
        full, prompt, errors = self.full, self.prompt, []
        for layer, expected in full.outputs.items():
            got = attend(
                full.queries[layer],
                prompt.keys[layer],
                prompt.values[layer],
                full.keys[layer],
                full.values[layer],
                kept[None, layer],
                prompt.scales[layer],
            )
            errors.append(relative_error(expected, got))
        return errors


def parse_rows(names: list[str]) -> dict[str, dict[str, Any]]:
    """Label -> policy settings; every dropping policy by default."""
    if not names:
        names = dropping_policies()
    rows = {}
    for name in names:
        config = json.loads(name) if name.startswith("{") else {"name": name}
        extra = [f"{k}={v}" for k, v in config.items() if k != "name"]
        rows[" ".join([config["name"], *extra])] = config
    return rows


def choose(
    documents: list[Document], tokenizer: Any, tokens: int, count: int, seed: int
) -> list[tuple[str, list[int]]]:
    """The first ``count`` documents with enough tokens, in shuffled order.

    Raises:
        ValueError: there are fewer.
    """
    random.Random(seed).shuffle(documents)
    chosen = []
    for document in documents:
        if len(document.text) < tokens:  # cannot have enough tokens
            continue
        ids = tokenizer.encode(document.text)[:tokens]
        if len(ids) == tokens:
            chosen.append((document.name, ids))
        if len(chosen) == count:
            return chosen
    raise ValueError(f"only {len(chosen)} documents have {tokens} tokens")


def measure(
    reference: Reference,
    selector: Selector,
    config: dict[str, Any],
    shares: list[float],
) -> list[dict[str, Any]]:
    """One row of metrics per budget."""
    policies = [parse_policy(config | {"budget": share}) for share in shares]
    kept = torch.stack([selector.kept(policy) for policy in policies])
    rows = reference.compare(kept)
    return [
        {"budget": share, "settings": describe(policy)} | row
        for share, policy, row in zip(shares, policies, rows, strict=True)
    ]


def spread(values: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ±{deviation:.3f}"


def summary(rows: list[dict[str, Any]], shares: list[float]) -> Table:
    """Means and standard deviations over documents, lowest KL first."""
    table = Table("budget", "policy", "kept", "KL", "top-1", "error alone", "in model")
    for share in shares:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["budget"] == share:
                groups.setdefault(row["policy"], []).append(row)
        for label, policy_rows in sorted(
            groups.items(), key=lambda item: _mean_kl(item[1])
        ):
            kept = statistics.mean(row["kept_tokens"] for row in policy_rows)
            figures = [
                spread([row[figure] for row in policy_rows]) for figure in FIGURES
            ]
            table.add_row(f"{share:.0%}", label, f"{kept:.0f}", *figures)
        table.add_section()
    return table


def _mean_kl(rows: list[dict[str, Any]]) -> float:
    return statistics.mean(row["kl"] for row in rows)


def main(
    model: str,
    documents: Annotated[
        Path, typer.Argument(help="a text or JSONL file, or a folder")
    ],
    policy: Annotated[
        list[str] | None, typer.Option(help="name or JSON object; default: all")
    ] = None,
    budget: Annotated[
        list[float] | None, typer.Option(help="share of the prompt; default: 4")
    ] = None,
    prompt_tokens: int = 3072,
    next_tokens: int = 64,
    count: Annotated[int, typer.Option(help="documents")] = 5,
    block_size: int = 32,
    seed: Annotated[int, typer.Option(help="seed of the choice of documents")] = 0,
    json_out: Path | None = None,
) -> None:
    """Compare policies with full KV on the documents under DOCUMENTS."""
    from transformers import AutoTokenizer

    shares = budget or [0.05, 0.1, 0.2, 0.5]
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    console, began = Console(), time.monotonic()
    chosen_rows = parse_rows(policy or [])
    needed = prompt_tokens + next_tokens
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = choose(read_documents(documents), tokenizer, needed, count, seed)
    masked = MaskedModel(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    source = provenance() | {
        "model": Path(model).name,
        "seed": seed,
        "dtype": "float32",
    }
    rows: list[dict[str, Any]] = []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("documents", total=count * (len(chosen_rows) + 1))
        for name, ids in texts:
            progress.update(task, description=f"reading {name}")
            reference = Reference(masked, ids, prompt_tokens)
            probing = Probing(masked, ids[:prompt_tokens], encode)
            selector = Selector(
                reference.prompt,
                masked.rotary(),
                block_size,
                probing,
                masked.output_weights,
            )
            progress.console.print(f"{name}: full KV agrees, KL {reference.check:.1e}")
            progress.advance(task)
            for label, config in chosen_rows.items():
                progress.update(task, description=f"{name} {label}")
                metrics = measure(reference, selector, config, shares)
                rows += [
                    {"policy": label, "document": name} | row | source
                    for row in metrics
                ]
                kls = " ".join(f"{row['kl']:8.4f}" for row in metrics)
                seconds = time.monotonic() - began
                progress.console.print(f"{seconds:6.0f} s  {label:32} KL {kls}")
                progress.advance(task)
    console.print(summary(rows, shares))
    console.print(f"{time.monotonic() - began:.0f} s in all")
    console.print_json(data=source)
    if json_out:
        json_out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
