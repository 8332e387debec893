"""Pass key at several depths: how often each policy's answers are right.

A key is hidden in filler or in real text (``--haystack``), with the question at the
end. Every policy gets the same prompts; stock vLLM and `random` are the bounds. Two
backends:

* ``--backend engine``: vLLM, one engine per policy and budget;
* ``--backend mask``: the model in float32 with the dropped tokens hidden. It computes
  the same result (``_masked_model.py``) but reads every prompt once for all policies.
  Supports policies that drop tokens at the prompt's end, and span policies
  (``_resolved_model.py``).

Every answer is a line of ``--out``; an interrupted run resumes from this file.

    python benchmarks/quality/needle.py MODEL --haystack ESSAYS --out needle.jsonl
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import sekv_ablations
import typer
from _engine import EngineJob, child_rows, provenance
from _pass_key import QUESTION, filler, plant, sentences
from rich.console import Console
from rich.table import Table

MAX_TOKENS = 16
# approximate tokens of the question and the chat template's closing words
QUESTION_WINDOW = 20
VOTERS = ("snapkv", "protokv", "chunkkv")


@dataclass(frozen=True, slots=True)
class Job(EngineJob):
    """One policy at one budget."""

    @property
    def label(self) -> str:
        options = self.options
        name = options.pop("name", "stock")
        options.pop("budget", None)
        return " ".join([name, *(f"{k}={v}" for k, v in options.items())])

    @property
    def budget(self) -> int | None:
        budget: int | None = self.options.get("budget")
        return budget


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings that all jobs of a run share."""

    model: str
    haystack: str  # a path, or "" for filler
    tokens: int
    depths: int
    dtype: str
    talk: int = 0  # tokens to generate before the answer
    # place of the question: before the talk (first) or after it (last)
    asked: str = "last"

    def prompts(self) -> list[tuple[str, str]]:
        """(prompt, key) per depth. The prompt includes the question unless it comes
        after a talk.
        """
        if not self.haystack:
            lines = filler(self.tokens)
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.model)

            def first_tokens(text: str, count: int) -> str:
                return str(tokenizer.decode(tokenizer.encode(text)[:count]))

            lines = sentences(Path(self.haystack), self.tokens, first_tokens)
        made = [plant(lines, depth, self.depths) for depth in range(self.depths)]
        if self.talk and self.asked == "last":
            made = [(prompt.removesuffix(QUESTION), key) for prompt, key in made]
        return made


def make_jobs(policies: list[str], budgets: list[int]) -> list[Job]:
    """Stock once, every policy at every budget; all policies by default."""
    if not policies:
        from _selection import dropping_policies  # imports transformers

        windows = [{"name": name, "window": QUESTION_WINDOW} for name in VOTERS]
        policies = [
            "{}",
            *dropping_policies(),
            *(json.dumps(window) for window in windows),
        ]
    jobs = []
    for policy in policies:
        config = json.loads(policy) if policy.startswith("{") else {"name": policy}
        fixed = not config or config["name"] == "full" or "budget" in config
        for budget in [None] if fixed else budgets:
            extra = {} if budget is None else {"budget": budget}
            jobs.append(Job(json.dumps(config | extra)))
    return jobs


def order(depths: int) -> list[int]:
    """All depths, distant ones first, so that partial results cover the whole range."""
    step = next(s for s in range(depths // 3 + 1, depths + 2) if gcd(s, depths) == 1)
    return [index * step % depths for index in range(depths)]


# -- the two ways ---------------------------------------------------------------


def ask_engine(setting: Setting, job: Job, todo: list[int]) -> Iterator[dict[str, Any]]:
    """Run one engine in a child process; yield an answer per depth."""
    request = json.dumps([vars_of(setting), job.config, todo])
    return child_rows(__file__, request, job.config)


def run_engine(setting: Setting, job: Job, todo: list[int]) -> None:
    """Child: answer the prompts at these depths, one JSON line each."""
    from _pass_key import ANSWER
    from _talk import Prescribed, conversation, render
    from vllm import LLM, SamplingParams

    config = job.options
    extra = {"additional_config": {"kv_policy": config}} if config else {}
    llm = LLM(
        setting.model,
        dtype=setting.dtype,
        enforce_eager=True,
        max_model_len=8192,
        kv_cache_memory_bytes=1 << 30,
        logits_processors=[Prescribed],
        **extra,
    )
    tokenizer = llm.get_tokenizer()
    filler_ids = tokenizer.encode(" ".join(filler(setting.talk + 2 * MAX_TOKENS)))
    made = setting.prompts()
    # a batch of concurrent requests, as on a small server
    for first in range(0, len(todo), 4):
        depths = todo[first : first + 4]
        prompts, sampling, skipped = [], [], []
        for depth in depths:
            forced: list[int] = []
            ids = render(tokenizer, [{"role": "user", "content": made[depth][0]}])
            if setting.talk and setting.asked == "first":
                forced = filler_ids[: setting.talk]
                forced = forced + tokenizer.encode(ANSWER, add_special_tokens=False)
            elif setting.talk:
                ids, forced = conversation(
                    tokenizer,
                    made[depth][0],
                    QUESTION.strip(),
                    filler_ids[: setting.talk],
                )
            prompts.append({"prompt_token_ids": ids})
            skipped.append(len(forced))
            sampling.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=len(forced) + MAX_TOKENS,
                    ignore_eos=bool(forced),
                    extra_args={"prescribed": forced} if forced else None,
                )
            )
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        for depth, output, skip in zip(depths, outputs, skipped, strict=True):
            answer = tokenizer.decode(
                output.outputs[0].token_ids[skip:], skip_special_tokens=True
            )
            outcome = {"depth": depth, "key": made[depth][1], "answer": answer}
            outcome["prompt_tokens"] = len(output.prompt_token_ids)
            print("RESULT " + json.dumps(outcome), flush=True)


def ask_masks(
    setting: Setting, jobs: list[Job], todo: dict[Job, list[int]]
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield the answers of all jobs, depth by depth."""
    from _masked_needle import Answers

    answers = Answers(setting.model, MAX_TOKENS)
    made = setting.prompts()
    for depth in order(setting.depths):
        prompt, key = made[depth]
        due = [job for job in jobs if depth in todo[job]]
        if due:
            texts, length = answers.ask(prompt, [job.options for job in due])
            for job, answer in zip(due, texts, strict=True):
                outcome = {"depth": depth, "key": key, "answer": answer}
                yield job, outcome | {"prompt_tokens": length}


# -- rows -----------------------------------------------------------------------


def vars_of(setting: Setting) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in Setting.__dataclass_fields__}


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Identifies a measurement."""
    names = ("backend", "model", "haystack", "tokens", "depths", "dtype", "config")
    talk = (row.get("talk", 0), row.get("asked", "last"))
    return (*(row[name] for name in (*names, "depth")), *talk)


def read_rows(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of an earlier run, without an incomplete last line."""
    rows = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[key_of(row)] = row | {"right": says(row["answer"], row["key"])}
    return rows


def says(answer: str, key: str) -> bool:
    """Whether the answer contains the key, not as part of a longer number."""
    return re.search(rf"(?<!\d){key}(?!\d)", answer) is not None


def marks(rows: list[dict[str, Any]]) -> str:
    """One character per depth: + found, . not found."""
    ordered = sorted(rows, key=lambda row: row["depth"])
    return "".join("+" if row["right"] else "." for row in ordered)


def summary(jobs: list[Job], rows: dict[Job, list[dict[str, Any]]]) -> Table:
    budgets = list(dict.fromkeys(job.budget for job in jobs if job.budget))
    table = Table("policy", *(f"budget {budget}" for budget in budgets))
    for label in dict.fromkeys(job.label for job in jobs):
        outcome = {job.budget: rows[job] for job in jobs if job.label == label}
        if None in outcome:
            outcome = dict.fromkeys(budgets or [0], outcome[None])
        signs = [marks(outcome.get(budget, [])) for budget in budgets]
        table.add_row(label, *(f"{s.count('+')}/{len(s)} {s}" for s in signs))
    return table


def measure(setting: Setting, jobs: list[Job], backend: str, out: Path) -> None:
    """Ask for every answer that ``out`` lacks, then show all."""
    console = Console()
    shared = {"backend": backend} | vars_of(setting)
    shared["model"] = Path(setting.model).name
    earlier = read_rows(out)
    if out.exists() and not out.read_text().endswith("\n"):
        with out.open("a") as file:  # ends an incomplete last line
            file.write("\n")
    rows: dict[Job, list[dict[str, Any]]] = {job: [] for job in jobs}
    todo: dict[Job, list[int]] = {}
    for job in jobs:
        for depth in order(setting.depths):
            row = earlier.get(key_of(shared | {"config": job.config, "depth": depth}))
            if row is None:
                todo.setdefault(job, []).append(depth)
            else:
                rows[job].append(row)
    console.print(f"{sum(map(len, todo.values()))} answers to come, see {out}")
    for job in jobs:
        todo.setdefault(job, [])
    if backend == "mask":
        answers = ask_masks(setting, jobs, todo)
    else:
        open_jobs = [job for job in jobs if todo[job]]
        answers = (
            (job, outcome)
            for job in open_jobs
            for outcome in ask_engine(setting, job, todo[job])
        )
    source = provenance()
    for job, outcome in answers:
        right = says(outcome["answer"], outcome["key"])
        row = shared | {"config": job.config} | outcome | {"right": right} | source
        rows[job].append(row)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        answer = repr(outcome["answer"])[:30]
        sign = "+" if right else "."
        budget = job.budget or "all"
        console.print(
            f"{sign} depth {outcome['depth']}  {job.label:24} {budget:>5}  {answer}",
            markup=False,
            highlight=False,
        )
    console.print(summary(jobs, rows))
    console.print_json(data=source)


def main(
    model: Annotated[str, typer.Argument()] = "",
    policies: Annotated[
        list[str] | None,
        typer.Argument(help="names or JSON; {} is stock; default: all"),
    ] = None,
    haystack: Annotated[
        Path | None, typer.Option(help="texts to plant the key in; default: filler")
    ] = None,
    budget: Annotated[list[int] | None, typer.Option(help="tokens; default: 3")] = None,
    tokens: int = 2900,
    depths: int = 10,
    dtype: Annotated[str, typer.Option(help="dtype of the engine")] = "bfloat16",
    backend: Annotated[str, typer.Option(help="engine or mask")] = "engine",
    talk: Annotated[
        int, typer.Option(help="tokens to generate before the answer; engine only")
    ] = 0,
    asked: Annotated[
        str,
        typer.Option(
            help="place of the question: before the talk (first) or after it (last)"
        ),
    ] = "last",
    out: Path = Path("needle.jsonl"),
    child: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Ask every policy for the key at ``depths`` depths."""
    sekv_ablations.register()
    if child:
        shared, config, todo = json.loads(child)
        run_engine(Setting(**shared), Job(config), todo)
        return
    if not model or backend not in ("engine", "mask"):
        raise typer.BadParameter("give a MODEL, and a backend: engine or mask")
    if backend == "mask":
        dtype = "float32"
        if talk:
            raise typer.BadParameter("a talk needs the engine: --backend engine")
    if asked not in ("first", "last"):
        raise typer.BadParameter(f"--asked is first or last, not {asked}")
    setting = Setting(model, str(haystack or ""), tokens, depths, dtype, talk, asked)
    measure(setting, make_jobs(policies or [], budget or [128, 256, 512]), backend, out)


if __name__ == "__main__":
    typer.run(main)
