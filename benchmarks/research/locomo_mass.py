"""Share of the attention of LoCoMo's questions that falls on kept tokens.

Every policy reads the same history in blocks and keeps the same number of tokens, as
for ``locomo.py``. The engine reports them per layer and KV head. Then the model with
full KV reads history and question. Reported is the share of the question's attention to
the history that falls on kept tokens: mean over layers, query heads and the question's
tokens, all with full KV's own queries, so that only dropped tokens count. Also
reported: the kept share of the tokens that hold the answer, and, in a second table, the
kept share of early and late parts.

    python benchmarks/research/locomo_mass.py MODEL locomo.json --budget 1024
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import torch
import typer
from _engine import child_rows, provenance
from _masked_model import Branches, MaskedModel, Prompt
from _quality_fidelity import coverage
from locomo import (
    ASK,
    METHODS,
    Job,
    Setting,
    evidence_at,
    excerpt,
    job,
    keep,
    open_model,
    parsed,
    rendered,
    spread,
)
from rich.console import Console
from rich.table import Table

PARTS = 5  # parts of the history, of equal length

# -- what the engine kept ----------------------------------------------------------


def run_engine(setting: Setting, work: Job) -> None:
    """Child: answer all questions; a JSON line per question, and one per cache."""
    # only an engine in this process gives access to its records
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    llm = open_model(setting, work.options["policy"])
    tokenizer = llm.get_tokenizer()
    history, questions = excerpt(setting, lambda text: len(tokenizer.encode(text)))
    end = len(rendered(tokenizer, history))
    llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1))
    llm.collective_rpc("kv_policy_record", args=(True,))
    guides = Guides(work, history, tokenizer) if work.label == "epicache" else None
    caches: dict[tuple[int, ...], int] = {}
    for number, question in enumerate(questions):
        guide = guides.of(question.text) if guides else ()
        extra: dict[str, Any] = {"turn_ends": [end]}
        if guides:
            extra["patched_prompt"] = list(guide)
        messages = [*history, {"role": "user", "content": ASK.format(question.text)}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        prompt = read["input_ids"]
        llm.generate(
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=1, extra_args=extra),
            use_tqdm=False,
        )
        (records,) = llm.collective_rpc("kv_policy_take_records")
        cache = caches.setdefault(guide, len(caches))
        row = {"question": number, "cache": cache, "prompt": prompt, "end": end}
        row["evidence"] = evidence_at(read["offset_mapping"], text, question)
        if records:  # the history was prefilled now, not restored
            row["kept"] = records[-1].kept_positions
        print("RESULT " + json.dumps(row), flush=True)


class Guides:
    """Patched prompts of the episodes that questions are routed to."""

    def __init__(
        self, work: Job, history: list[dict[str, str]], tokenizer: Any
    ) -> None:
        from vllm_kvplugins.config import parse_policy
        from vllm_kvplugins.episodes.encoder import load_encoder
        from vllm_kvplugins.episodes.routing import EpisodeRouter
        from vllm_kvplugins.episodes.utterances import utterances_of

        policy = parse_policy(work.options["policy"])
        routing = policy.episode_routing
        assert routing is not None, "epicache routes episodes"
        self._most, self._tokenizer = routing.patched_prompt_tokens, tokenizer
        self._router = EpisodeRouter(routing.settings, load_encoder)
        self._history = utterances_of(history)

    def of(self, question: str) -> tuple[int, ...]:
        """Tokens of the patched prompt for a question; a long one is cut to its
        middle."""
        route = self._router.route("", self._history, question)
        assert route is not None, "there is a history"
        ids = self._tokenizer.encode(route.guide, add_special_tokens=False)
        first = max(len(ids) - self._most, 0) // 2
        return tuple(ids[first : first + self._most])


def kept_masks(
    rows: Iterator[dict[str, Any]], end: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Per question, bool [layers, kv_heads, end]: history that it can attend to."""
    caches: dict[int, torch.Tensor] = {}
    for row in rows:
        if "kept" in row:
            caches[row["cache"]] = mask_of(row["kept"], end)
        yield row["question"], caches[row["cache"]]


def mask_of(kept: list[list[list[int]]], end: int) -> torch.Tensor:
    """Kept positions as bool [layers, kv_heads, end].

    Args:
        kept: positions after the last compaction, [layers][kv_heads][kept]. Tokens
            after the last of them were not compressed.
        end: length of the history.
    """
    cut = 1 + max(position for layer in kept for head in layer for position in head)
    mask = torch.zeros(len(kept), len(kept[0]), end, dtype=torch.bool)
    mask[..., cut:] = True
    for layer, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            mask[layer, head, [p for p in positions if p < end]] = True
    return mask


def by_part(kept: torch.Tensor) -> list[float]:
    """Kept share of each fifth of the history, oldest first.

    Args:
        kept: bool [layers, kv_heads, end].
    """
    parts = kept.double().tensor_split(PARTS, dim=-1)
    return [float(part.mean()) for part in parts]


# -- what full KV looks at ---------------------------------------------------------


class ProbeRequest:
    """One history under full KV, and the questions after it."""

    def __init__(self, model: MaskedModel) -> None:
        self._model = model
        self._read: Prompt | None = None
        self._full: dict[int, Branches] = {}

    def share(
        self, question: int, prompt: list[int], end: int, kept: torch.Tensor
    ) -> float:
        """Share of the attention of ``prompt[end:]`` to earlier tokens that is kept."""
        if self._read is None:
            read = self._model.read(prompt[:end])
            # the history's queries are large and no longer needed
            self._read = Prompt([], read.keys, read.values, read.scales)
        if question not in self._full:
            shape = (1, len(self._read.keys), len(self._read.keys[0]), end)
            full = Branches(self._read, torch.ones(shape, dtype=torch.bool))
            self._model.extend(full, torch.tensor([prompt[end:]]), logits=1)
            self._full[question] = full
        return coverage(self._full[question], kept)


# -- tables ------------------------------------------------------------------------


def table_of(rows: dict[str, list[dict[str, Any]]]) -> Table:
    """Means over questions, and differences to epicache question by question."""
    table = Table("method", "questions", "of the history kept", "of the attention kept")
    table.add_column("less than epicache")
    table.add_column("of the evidence kept")
    own = {r["question"]: r["attention_kept"] for r in rows.get("epicache", [])}
    for label, method_rows in rows.items():
        less = [
            own[r["question"]] - r["attention_kept"]
            for r in method_rows
            if r["question"] in own
        ]
        table.add_row(
            label,
            str(len(method_rows)),
            f"{sum(r['kept'] for r in method_rows) / len(method_rows):.3f}",
            spread([r["attention_kept"] for r in method_rows]),
            spread(less) if less and label != "epicache" else "",
            spread([r["evidence_kept"] for r in method_rows]),
        )
    return table


def parts_table(rows: dict[str, list[dict[str, Any]]]) -> Table:
    """Kept share of each part of the history, means over questions."""
    table = Table("method", *(f"part {i + 1}" for i in range(PARTS)))
    for label, method_rows in rows.items():
        columns = zip(*(r["kept_by_part"] for r in method_rows), strict=True)
        table.add_row(label, *(f"{sum(c) / len(method_rows):.3f}" for c in columns))
    return table


def main(
    model: Annotated[str, typer.Argument()] = "",
    path: Annotated[str, typer.Argument(help="a file of LoCoMo")] = "",
    dialogue: int = 0,
    history_tokens: Annotated[int, typer.Option(help="tokens of the dialogue")] = 6000,
    questions: Annotated[int, typer.Option(help="maximum number")] = 16,
    budget: int = 1024,
    block: Annotated[int, typer.Option(help="tokens between compressions")] = 512,
    method: Annotated[
        list[str] | None, typer.Option(help="default: all of locomo.py except stock")
    ] = None,
    config: Annotated[str, typer.Option(help="settings of epicache, as JSON")] = "{}",
    dtype: Annotated[str, typer.Option(help="dtype of the engine")] = "bfloat16",
    out: Path = Path("locomo_mass.jsonl"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure the kept share of the attention to a dialogue under several policies."""
    if child:
        fields, config_json = json.loads(child)
        run_engine(Setting(**fields), Job(config_json))
        return
    if not model or not path:
        raise typer.BadParameter("give a MODEL and a file of LoCoMo")
    names = method or [name for name in METHODS if name != "stock"]
    if unknown := set(names) - set(METHODS) | {"stock"} & set(names):
        raise typer.BadParameter(f"--method {', '.join(unknown)}: see locomo.py")
    more = parsed(config)
    setting = Setting(model, path, dialogue, history_tokens, questions, dtype)
    console, rows, source = Console(width=120), {}, provenance()
    asked_of = ProbeRequest(MaskedModel(model))
    for name in names:
        work = job(name, budget, block, more)
        request = json.dumps([asdict(setting), work.config])
        engine_rows = list(child_rows(__file__, request, name))
        prompts = {row["question"]: row["prompt"] for row in engine_rows}
        evidence = {row["question"]: row["evidence"] for row in engine_rows}
        end = engine_rows[0]["end"]
        rows[name] = []
        for question, kept in kept_masks(iter(engine_rows), end):
            share = asked_of.share(question, prompts[question], end, kept)
            row = {"question": question, "attention_kept": share}
            row["kept"] = float(kept.double().mean())
            row["kept_by_part"] = by_part(kept)
            row["evidence_kept"] = float(kept[..., evidence[question]].double().mean())
            rows[name].append(row)
            facts = {"method": name, "budget": budget, "block": block}
            keep(out, setting, facts | row | source)
        console.print(name, spread([r["attention_kept"] for r in rows[name]]))
    console.print(table_of(rows))
    console.print(parts_table(rows))
    console.print_json(data=source)


if __name__ == "__main__":
    typer.run(main)
