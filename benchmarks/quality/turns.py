"""Facts from the first turns of a dialogue, requested in the last ones.

FlowKV compresses every turn once. `nested` compresses everything that remains at the
end of each turn, to the same sizes. Both, and stock vLLM, answer the same questions. A
question is one request with the whole history. The engine splits it at the turn ends,
and so keeps the same tokens as over several requests.

``--prefeval PATH`` uses preferences of PrefEval instead, and measures how likely the
model finds their words when it should repeat them. ``--rules`` gives a rule for lists
in the first turn, such as "write it in capital letters", and checks the list that the
last turn requests.

Every answer is a line of ``--out``; an interrupted run resumes from this file.

    python benchmarks/quality/turns.py MODEL --out turns.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _dialogue import (
    Sample,
    dialogue,
    is_right,
    mean_interval,
    preferences,
    rules,
    sign_test,
    wilson,
)
from _engine import EngineJob, child_rows, provenance
from rich.console import Console
from rich.table import Table

MAX_TOKENS, MAX_LIST_TOKENS = 12, 48
AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all jobs of a run share."""

    model: str
    dtype: str
    block_size: int
    sentences: int
    fillers: int
    prefeval: str = ""  # a path
    rules: bool = False

    def samples(self, seeds: int) -> list[tuple[str, Sample]]:
        """All questions by name, dialogue after dialogue."""
        if self.prefeval:
            samples = preferences(
                Path(self.prefeval), seeds, self.sentences, self.fillers
            )
            return [(f"{number}.0", sample) for number, sample in enumerate(samples)]
        made = rules if self.rules else dialogue
        return [
            (f"{seed}.{number}", sample)
            for seed in range(seeds)
            for number, sample in enumerate(made(seed, self.sentences, self.fillers))
        ]

    def shared(self) -> dict[str, Any]:
        """The settings that each row records."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        names = {"model": Path(self.model).name, "prefeval": Path(self.prefeval).name}
        return fields | names


@dataclass(frozen=True, slots=True)
class Job(EngineJob):
    """One engine."""

    @property
    def label(self) -> str:
        options = self.options
        if not options:
            return "stock"
        nested = "nested " if options["nested"] else ""
        return f"{nested}{options['base']} {options['ratio']}"


def make_jobs(bases: list[str], ratios: list[float], floor: int) -> list[Job]:
    """Stock, then every base at every ratio, isolated and nested.

    Args:
        bases: names, or JSON objects with a name and settings.
        ratios: shares of a turn to keep.
        floor: minimum tokens to keep of each turn.
    """
    jobs = [Job("{}")]
    for base in bases:
        config = json.loads(base) if base.startswith("{") else {"name": base}
        shared = {"name": "flowkv", "base": config.pop("name"), "base_config": config}
        for ratio in ratios:
            for nested in (False, True):
                sizes = {"ratio": ratio, "floor": floor, "nested": nested}
                jobs.append(Job(json.dumps(shared | sizes)))
    return jobs


# -- an engine ---------------------------------------------------------------------


def ask_engine(
    setting: Setting, job: Job, todo: list[str], seeds: int
) -> Iterator[dict[str, Any]]:
    """Yield the answers of one engine in a child process."""
    fields = {name: getattr(setting, name) for name in setting.__dataclass_fields__}
    request = json.dumps([fields, job.config, todo, seeds])
    return child_rows(__file__, request, job.label)


def run_engine(setting: Setting, job: Job, todo: list[str], seeds: int) -> None:
    """Child: answer these questions, one JSON line each."""
    from _talk import Prescribed
    from vllm import LLM

    extra = {"additional_config": {"kv_policy": job.options}} if job.options else {}
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        enforce_eager=True,
        max_model_len=4096,
        block_size=setting.block_size,
        kv_cache_memory_bytes=1 << 29,
        logits_processors=[Prescribed],
        **extra,
    )
    samples = dict(setting.samples(seeds))
    resident = _resident_tokens(llm, job) if job.options else len
    for first in range(0, len(todo), AT_A_TIME):
        names = todo[first : first + AT_A_TIME]
        chats = [samples[name].messages for name in names]
        sampling = [_sampling(llm, samples[name]) for name in names]
        outputs = llm.chat(chats, sampling, use_tqdm=False)
        for name, output in zip(names, outputs, strict=True):
            row = {
                "sample": name,
                "prompt_tokens": len(output.prompt_token_ids),
                "resident_tokens": resident(output.prompt_token_ids),
            } | _said(output.outputs[0], samples[name].forced)
            print("RESULT " + json.dumps(row), flush=True)


def _sampling(llm: Any, sample: Sample) -> Any:
    """Greedy sampling, or a forced answer with its log-probabilities."""
    from vllm import SamplingParams

    if not sample.forced:
        most = MAX_LIST_TOKENS if sample.fact.rule else MAX_TOKENS
        return SamplingParams(temperature=0, max_tokens=most)
    forced_ids = llm.get_tokenizer().encode(sample.forced, add_special_tokens=False)
    return SamplingParams(
        temperature=0,
        max_tokens=len(forced_ids),
        ignore_eos=True,
        logprobs=0,  # of the forced token
        extra_args={"prescribed": forced_ids},
    )


def _said(answer: Any, forced: str) -> dict[str, Any]:
    """The answer, or the surprisal of each forced token."""
    if not forced:
        return {"answer": answer.text}
    steps = zip(answer.token_ids, answer.logprobs, strict=True)
    nats = [-logprobs[token].logprob for token, logprobs in steps]
    return {"nats": sum(nats) / len(nats), "answer_tokens": len(nats)}


def _resident_tokens(llm: Any, job: Job) -> Any:
    """Number of a prompt's tokens that are resident at its answer, by the plan."""
    from vllm_kvplugins.plan.geometry import Lengths
    from vllm_kvplugins.vllm_adapter.config.engine_config import geometry_of, policy_of

    config = llm.llm_engine.vllm_config
    policy, geometry = policy_of(config), geometry_of(config)
    assert policy is not None, f"{job.label} was asked for and is not on"

    def count(prompt: list[int]) -> int:
        ends = policy.find_turn_ends(prompt, None)
        if not ends:
            raise RuntimeError("this model's prompts show no turns")
        blocks = policy.plan(Lengths(len(prompt), ends), geometry)
        return blocks.resident_blocks(len(prompt)) * geometry.block_size

    return count


# -- rows ----------------------------------------------------------------------------


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies a measurement."""
    fields = (*Setting.__dataclass_fields__, "config", "sample")
    row = {"rules": False} | row  # older rows do not have it
    return tuple(row[field] for field in fields)


def read_rows(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of an earlier run, without an incomplete last line."""
    rows = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[key_of(row)] = row
    return rows


def rate(rows: list[dict[str, Any]]) -> str:
    """Right answers and the 95 % interval of their share; or nats per token."""
    if rows and "nats" in rows[0]:
        return spread([row["nats"] for row in rows])
    right = sum(row["right"] for row in rows)
    low, high = wilson(right, len(rows))
    return f"{right}/{len(rows)} ({low:.0%}..{high:.0%})"


def spread(values: list[float]) -> str:
    """Mean and its 95 % interval."""
    mean, low, high = mean_interval(values)
    return f"{mean:.3f} ({low:.3f}..{high:.3f})"


def disagreement(
    isolated: list[dict[str, Any]], nested: list[dict[str, Any]]
) -> tuple[int, int]:
    """Number of questions that only the first, and that only the second, has right."""
    first = {row["sample"]: row["right"] for row in isolated}
    pairs = [
        (first[row["sample"]], row["right"]) for row in nested if row["sample"] in first
    ]
    return pairs.count((True, False)), pairs.count((False, True))


def difference(isolated: list[dict[str, Any]], nested: list[dict[str, Any]]) -> str:
    """Difference over the same questions."""
    if isolated and "nats" in isolated[0]:
        first = {row["sample"]: row["nats"] for row in isolated}
        return "nested - flowkv: " + spread(
            [row["nats"] - first[row["sample"]] for row in nested]
        )
    a, b = disagreement(isolated, nested)
    return f"only flowkv {a}, only nested {b} (p {sign_test(a, b):.2g})"


def summary(jobs: list[Job], rows: dict[Job, list[dict[str, Any]]]) -> Table:
    """Isolated next to nested, per base and ratio."""
    table = Table("base", "ratio", "resident", "flowkv", "nested", "side by side")
    table.add_row("full", "", "100%", rate(rows[jobs[0]]), "", "")
    for isolated, nested in zip(jobs[1::2], jobs[2::2], strict=True):
        first, second = rows[isolated], rows[nested]
        kept = sum(row["resident_tokens"] for row in first)
        share = kept / max(sum(row["prompt_tokens"] for row in first), 1)
        options = isolated.options
        table.add_row(
            " ".join([options["base"], *map(str, options["base_config"].items())]),
            str(options["ratio"]),
            f"{share:.0%}",
            rate(first),
            rate(second),
            difference(first, second),
        )
    return table


def measure(setting: Setting, jobs: list[Job], seeds: int, limit: int, out: Path):
    """Ask for every answer that ``out`` lacks, then show all."""
    console, earlier = Console(), read_rows(out)
    if out.exists() and not out.read_text().endswith("\n"):
        with out.open("a") as file:  # ends an incomplete last line
            file.write("\n")
    source, samples = provenance(), setting.samples(seeds)[: limit or None]
    rows: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    for job in jobs:
        shared = setting.shared() | {"config": job.config}
        figures = {
            name: earlier.get(key_of(shared | {"sample": name})) for name, _ in samples
        }
        rows[job] += [row for row in figures.values() if row]
        todo = [name for name, row in figures.items() if row is None]
        facts = {name: sample.fact for name, sample in samples}
        for answer in ask_engine(setting, job, todo, seeds) if todo else ():
            row = shared | answer | source
            if "answer" in answer:
                fact = facts[answer["sample"]]
                row["right"] = is_right(answer["answer"], fact)
                row["value"] = fact.value
            rows[job].append(row)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        console.print(f"{job.label:28} {rate(rows[job])}", highlight=False)
    console.print(summary(jobs, rows))
    console.print_json(data=source)


def main(
    model: Annotated[str, typer.Argument()] = "",
    base: Annotated[
        list[str] | None, typer.Option(help="compressor, by name or as JSON")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option(help="shares; default: 5")
    ] = None,
    seeds: Annotated[
        int, typer.Option(help="dialogues: three facts, or all rules")
    ] = 10,
    limit: Annotated[int, typer.Option(help="questions per engine; 0: all")] = 0,
    floor: Annotated[
        int, typer.Option(help="minimum tokens to keep of each turn")
    ] = 32,
    sentences: Annotated[int, typer.Option(help="sentences of a filler answer")] = 12,
    fillers: Annotated[int, typer.Option(help="number of filler turns")] = 4,
    prefeval: Annotated[
        Path | None, typer.Option(help="PrefEval's JSON file or folder")
    ] = None,
    given_rules: Annotated[
        bool, typer.Option("--rules", help="rules for lists instead of facts")
    ] = False,
    block_size: int = 32,
    dtype: str = "bfloat16",
    out: Path = Path("turns.jsonl"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Ask stock vLLM, FlowKV and the nested baseline the same questions."""
    if child:
        fields, config, todo, all_seeds = json.loads(child)
        run_engine(Setting(**fields), Job(config), todo, all_seeds)
        return
    if not model:
        raise typer.BadParameter("give a MODEL")
    prefeval_path = str(prefeval or "")
    if prefeval and given_rules:
        raise typer.BadParameter("give --prefeval or --rules, not both")
    setting = Setting(
        model, dtype, block_size, sentences, fillers, prefeval_path, given_rules
    )
    # the shortest turn has no more queries for a window
    bases = base or ['{"name": "snapkv", "window": 8}']
    ratios = ratio or [0.1, 0.3, 0.5, 0.7, 0.9]
    measure(setting, make_jobs(bases, ratios, floor), seeds, limit, out)


if __name__ == "__main__":
    typer.run(main)
