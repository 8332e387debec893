"""Value of patched prompts, by their similarity to the question.

The controlled experiment of EpiCache, figure 2.

Compresses a LoCoMo dialogue block by block under one budget, once per question and kind
of patched prompt: the question itself; the tenth of the utterances most similar to it,
the middle tenth, the least similar tenth, a random tenth; the segment of the episode
that the question is routed to; InfiniPot's instruction.

Reports per question: nats per token of the true answer, as in ``locomo.py``; the share
of the evidence's tokens that the cache still holds, over layers and heads; and the
share expected by chance, which depends on blocks and layer budgets.

``--config`` changes settings of EpiCache, as in its figure A1. Several configurations
run one after another and are compared with the first, question by question.

    python benchmarks/research/patched_prompts.py MODEL locomo.json --budget 1024
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import numpy as np
import typer
from _engine import child_rows, provenance
from locomo import (
    ASK,
    Setting,
    answers,
    evidence_at,
    evidence_in,
    excerpt,
    job,
    keep,
    nats,
    open_model,
    parsed,
    prescribed,
    rendered,
    spread,
)
from rich.console import Console
from rich.table import Table

EXACT, INSTRUCTION, EPISODE = "exact question", "instruction", "episode"
CLOSEST, MIDDLE, LEAST, RANDOM = "closest 10 %", "middle 10 %", "least 10 %", "random"
BANDS = {CLOSEST: 0.0, MIDDLE: 0.45, LEAST: 0.9}
KINDS = (EXACT, CLOSEST, MIDDLE, LEAST, RANDOM, EPISODE, INSTRUCTION)
LONGEST = 512  # tokens of a patched prompt


# -- patched prompts ------------------------------------------------------------------


def tenth(similarity: np.ndarray, above: float) -> list[int]:
    """Indices of a tenth of the utterances, in order.

    Args:
        similarity: float32 [utterances].
        above: share of the utterances that are more similar than this tenth.
    """
    count = max(len(similarity) // 10, 1)
    first = min(round(above * len(similarity)), len(similarity) - count)
    return sorted(
        np.argsort(-similarity, kind="stable")[first : first + count].tolist()
    )


def patched_texts(
    lines: list[str], question: str, similarity: np.ndarray, seed: int
) -> dict[str, str]:
    """The kinds of patched prompts that need the lines only."""
    places = {kind: tenth(similarity, above) for kind, above in BANDS.items()}
    count = len(places[CLOSEST])
    places[RANDOM] = sorted(random.Random(seed).sample(range(len(lines)), count))
    values = {kind: "\n".join(lines[i] for i in at) for kind, at in places.items()}
    return {EXACT: question} | values | {INSTRUCTION: ""}


Kept = list[list[list[int]]]  # positions, [layers][kv_heads][kept]


def end_of(kept: Kept) -> int:
    """Position of the last compaction; the newest tokens before it are always kept."""
    return 1 + max(max(head) for layer in kept for head in layer)


def evidence_kept(kept: Kept, positions: list[int]) -> float:
    """Share of positions in the cache, over layers and KV heads.

    Args:
        kept: positions after the last compaction; later tokens were not compressed.
        positions: the positions to look for.
    """
    heads, cut = [set(head) for layer in kept for head in layer], end_of(kept)
    counts = [sum(p in head or p >= cut for p in positions) for head in heads]
    return sum(counts) / len(heads) / len(positions)


def kept_by_chance(compactions: list[Kept], positions: list[int]) -> float:
    """Expected :func:`evidence_kept` of random selections of the same size.

    Each compaction keeps as many tokens of each layer and KV head as it did, but random
    ones.

    Args:
        compactions: all compactions of a cache, in order.
        positions: the positions to look for.
    """
    sizes = [[len(head) for layer in kept for head in layer] for kept in compactions]
    share = np.ones((len(positions), len(sizes[0])))
    held, before = np.zeros(len(sizes[0])), 0
    for kept, stay in zip(compactions, sizes, strict=True):
        cut = end_of(kept)
        share[np.array(positions) < cut] *= stay / (held + cut - before)
        held, before = np.array(stay), cut
    return float(share.mean())


# -- an engine ------------------------------------------------------------------------


def run_engine(setting: Setting, policy: dict[str, Any], kinds: list[str]) -> None:
    """Child: every question with every patched prompt, one JSON line each."""
    # only an engine in this process gives access to its records
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import SamplingParams

    from vllm_kvplugins.config import parse_policy
    from vllm_kvplugins.episodes.encoder import embed, load_encoder
    from vllm_kvplugins.episodes.routing import EpisodeRouter
    from vllm_kvplugins.episodes.utterances import utterances_of

    llm = open_model(setting, policy)
    tokenizer = llm.get_tokenizer()
    history, questions = excerpt(setting, lambda text: len(tokenizer.encode(text)))
    lines = history[0]["content"].split("\n")
    encoder = load_encoder()
    routing = parse_policy(policy).episode_routing
    assert routing is not None, "epicache routes episodes"
    settings = routing.settings
    router = EpisodeRouter(settings, lambda name: encoder)
    vectors = embed(encoder, lines)
    end = len(rendered(tokenizer, history))
    llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1))
    llm.collective_rpc("kv_policy_record", args=(True,))
    # a cache is built once per patched prompt
    caches: dict[tuple[int, ...], list[Kept]] = {}
    for number, question in enumerate(questions):
        (query,) = embed(encoder, [question.text])
        texts = patched_texts(lines, question.text, vectors @ query, number)
        route = router.route("", utterances_of(history), question.text)
        assert route is not None, "there is a history"
        texts[EPISODE] = route.guide
        messages = [*history, {"role": "user", "content": ASK.format(question.text)}]
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        read = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        positions = evidence_at(read["offset_mapping"], prompt, question)
        truth = tokenizer.encode(question.answer, add_special_tokens=False)
        for kind in kinds:
            patched = tokenizer.encode(texts[kind], add_special_tokens=False)[:LONGEST]
            extra = {"turn_ends": [end], "patched_prompt": patched}
            (output,) = llm.generate(
                {"prompt_token_ids": read["input_ids"]},
                SamplingParams(**prescribed(truth, extra)),
                use_tqdm=False,
            )
            (records,) = llm.collective_rpc("kv_policy_take_records")
            if records:
                caches[tuple(patched)] = [record.kept_positions for record in records]
            compactions = caches[tuple(patched)]
            row = {
                "question": number,
                "kind": kind,
                "patched_tokens": len(patched),
                "nats": nats(output.outputs[0]),
                "evidence_in": evidence_in(tokenizer.decode(patched), question),
                "evidence_kept": evidence_kept(compactions[-1], positions),
                "kept_by_chance": kept_by_chance(compactions, positions),
            }
            print("RESULT " + json.dumps(row), flush=True)


# -- tables ---------------------------------------------------------------------------


def table_of(rows: list[dict[str, Any]], full: dict[int, float]) -> Table:
    """Means over questions; differences question by question.

    Args:
        rows: of all configurations, in order.
        full: nats of stock vLLM by question.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["config"], row["kind"]), []).append(row)
    first = rows[0]["config"]
    several = any(config != first for config, _ in groups)
    table = Table("patched prompt", "questions", "tokens", "nats", "above full KV")
    table.add_column("above the exact question")
    table.add_column("evidence in it")
    table.add_column("evidence kept")
    table.add_column("by chance")
    if several:
        table.add_column("nats above the first")
        table.add_column("evidence more than the first")
    for (config, kind), values in groups.items():
        exact, same = groups.get((config, EXACT), []), groups.get((first, kind), [])
        cells = [
            f"{kind} {config}" if several else kind,
            str(len(values)),
            str(round(sum(row["patched_tokens"] for row in values) / len(values))),
            spread([row["nats"] for row in values]),
            spread([row["nats"] - full[row["question"]] for row in values]),
            above(values, exact, "nats") if kind != EXACT else "",
            mean_of(values, "evidence_in"),
            spread([row["evidence_kept"] for row in values]),
            mean_of(values, "kept_by_chance"),
        ]
        if several and config != first:
            cells += [above(values, same, name) for name in ("nats", "evidence_kept")]
        table.add_row(*cells)
    return table


def mean_of(values: list[dict[str, Any]], figure: str) -> str:
    return f"{sum(row[figure] for row in values) / len(values):.3f}"


def above(
    values: list[dict[str, Any]], other: list[dict[str, Any]], figure: str
) -> str:
    """Mean difference of a figure, over the questions that both have."""
    there = {row["question"]: row[figure] for row in other}
    both = [
        row[figure] - there[row["question"]]
        for row in values
        if row["question"] in there
    ]
    return spread(both) if both else ""


def policy_of(budget: int, block: int, episodes: int, config: str) -> dict[str, Any]:
    """EpiCache's settings.

    Args:
        budget: tokens to keep per KV head.
        block: tokens between compressions.
        episodes: of the dialogue.
        config: a JSON object; overrides the other settings.

    Raises:
        typer.BadParameter: ``config`` is not a JSON object.
    """
    policy = {"name": "epicache", "budget": budget, "prefill_block": block}
    policy |= {"session_memory": "2GiB", "longest_patched_prompt": LONGEST}
    return policy | {"episodes": episodes} | parsed(config)


def rows_of(
    setting: Setting, policy: dict[str, Any], kinds: list[str]
) -> Iterator[dict[str, Any]]:
    """Rows of an engine in a child process, as they arrive."""
    request = json.dumps([asdict(setting), policy, kinds])
    return child_rows(__file__, request, "patched prompts")


def main(
    model: Annotated[str, typer.Argument()] = "",
    path: Annotated[str, typer.Argument(help="a file of LoCoMo")] = "",
    dialogue: int = 0,
    history_tokens: Annotated[int, typer.Option(help="tokens of the dialogue")] = 4000,
    questions: Annotated[int, typer.Option(help="maximum number")] = 8,
    budget: int = 1024,
    block: Annotated[int, typer.Option(help="tokens between compressions")] = 512,
    episodes: Annotated[int, typer.Option(help="episodes of the dialogue (E)")] = 4,
    kind: Annotated[
        list[str] | None, typer.Option(help="default: " + ", ".join(KINDS))
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            help="settings of epicache, as JSON; compare several with the first"
        ),
    ] = None,
    dtype: str = "bfloat16",
    out: Path = Path("patched_prompts.jsonl"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Ask questions with caches that different patched prompts have compressed."""
    if child:
        fields, policy, kinds = json.loads(child)
        run_engine(Setting(**fields), policy, kinds)
        return
    if not model or not path:
        raise typer.BadParameter("give a MODEL and a file of LoCoMo")
    kinds = kind or list(KINDS)
    if unknown := set(kinds) - set(KINDS):
        raise typer.BadParameter(
            f"--kind {', '.join(unknown)}: give {', '.join(KINDS)}"
        )
    setting = Setting(model, path, dialogue, history_tokens, questions, dtype)
    policies = {
        text: policy_of(budget, block, episodes, text) for text in config or ["{}"]
    }
    source, rows = provenance(), []
    stock = answers(setting, job("stock", budget, block, {}))
    full = {row["question"]: row["nats"] for row in stock}
    for text, policy in policies.items():
        for values in rows_of(setting, policy, kinds):
            row = values | {"config": text, "full_nats": full[values["question"]]}
            rows.append(row)
            facts = {"budget": policy["budget"], "block": policy["prefill_block"]}
            facts["episodes"] = policy["episodes"]
            keep(out, setting, facts | row | source)
    console = Console(width=200)
    console.print(table_of(rows, full))
    console.print_json(data=source)


if __name__ == "__main__":
    typer.run(main)
