"""Model-free fidelity: how a policy changes the model's output, on real documents.

Uses ``fidelity.py``'s masks and metrics, with the rows and report of ``quality.py``:
one row per document and metric. For policies that drop tokens at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _documents import read_documents
from _engine import provenance
from _masked_model import Branches, MaskedModel
from _quality_rows import Job, Row, append, key_of
from _quality_samples import Setting, TaskError
from _selection import Probing, Selector
from fidelity import Reference, choose

from vllm_kvplugins.config import parse_policy

NEXT_TOKENS = 64
# metric of ``Reference.compare``: its name here
FIGURES = {"error_alone": "error", "kl": "kl", "top1": "top1"}
COVERAGE = "coverage"


def coverage(full: Branches, kept: torch.Tensor) -> float:
    """Share of the attention to the prompt that falls on kept tokens.

    Uses full KV's own queries; mean over layers, query heads and next tokens.

    Args:
        full: a continuation that saw the whole prompt.
        kept: bool [layers, kv_heads, prompt tokens].
    """
    prompt, covered = full.prompt, []
    for layer, queries in full.queries.items():
        keys = prompt.keys[layer]
        grouped = queries[0].unflatten(0, (len(keys), -1))  # by KV head
        logits = grouped.flatten(1, 2) @ keys.mT * prompt.scales[layer]
        shares = logits.softmax(-1)
        covered.append(float((shares * kept[layer][:, None]).sum(-1).mean()))
    return sum(covered) / len(covered)


def measure_fidelity(
    setting: Setting,
    jobs: Sequence[Job],
    token_bytes: int,
    out: Path,
    rows: Sequence[Row],
    say: Callable[[str], None],
) -> list[str]:
    """Measure the rows that ``out`` lacks.

    Args:
        token_bytes: bytes of K and V of one token in the engine, all layers and KV
            heads.

    Returns:
        Jobs that cannot be measured, and why.
    """
    from transformers import AutoTokenizer

    if not setting.documents:
        raise TaskError("give --documents")
    todo, refused = split(jobs)
    done = {key_of(row) for row in rows}
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    needed = setting.tokens + NEXT_TOKENS
    texts = choose(
        read_documents(Path(setting.documents)),
        tokenizer,
        needed,
        setting.limit,
        setting.seed,
    )
    model: MaskedModel | None = None
    commit = provenance()["commit"]
    last = f"fidelity:{COVERAGE}"  # appended after the other rows
    for name, ids in texts:
        due = [job for job in todo if (job.label, job.share, last, name) not in done]
        if not due:
            continue
        model = model or MaskedModel(setting.model)
        say(f"fidelity: {name}, {len(due)} policies")
        for job, row in of_document(model, tokenizer, setting, ids, due):
            common = {
                "policy": dict(job.policy),
                "share": job.share,
                "label": job.label,
            }
            common |= {"sample": name, "group": name, "commit": commit}
            common["resident_bytes"] = round(row["kept_tokens"] * token_bytes)
            common["resident_share"] = row["kept_tokens"] / setting.tokens
            common["prompt_tokens"] = setting.tokens
            for figure in (*FIGURES.values(), COVERAGE):
                append(
                    out, common | {"task": f"fidelity:{figure}", "score": row[figure]}
                )
    return refused


def split(jobs: Sequence[Job]) -> tuple[list[Job], list[str]]:
    """Jobs whose policy drops tokens at the prompt's end; reasons for the others."""
    able, refused = [], []
    for job in jobs:
        if not job.policy or job.problem:
            continue
        policy: Any = type(parse_policy(dict(job.policy)))
        if policy.compresses:
            able.append(job)
        elif hasattr(policy, "model_fields") and "budget" in policy.model_fields:
            refused.append(
                f"{job.shown}: fidelity hides tokens, and this policy drops none at "
                "the prompt's end"
            )
    return able, refused


def of_document(
    model: MaskedModel,
    tokenizer: Any,
    setting: Setting,
    ids: list[int],
    jobs: Sequence[Job],
) -> list[tuple[Job, dict[str, float]]]:
    """Metrics of every policy on one document, from one pass over it."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    reference = Reference(model, ids, setting.tokens)
    probing = Probing(model, ids[: setting.tokens], encode)
    selector = Selector(
        reference.prompt,
        model.rotary(),
        setting.block_size,
        probing,
        model.output_weights,
    )
    scored = []
    for job in jobs:
        kept = selector.kept(parse_policy(dict(job.policy)))
        (row,) = reference.compare(kept[None])
        figures = {
            own_name: row[their_name] for their_name, own_name in FIGURES.items()
        }
        figures |= {COVERAGE: coverage(reference.full, kept)}
        scored.append((job, figures | {"kept_tokens": row["kept_tokens"]}))
    return scored
