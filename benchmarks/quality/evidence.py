"""The evidence behind the verdicts: every policy, two questions and one distance.

For each policy at 5, 10 and 20 % of the context: pass keys found, one key of sixteen
found, KL divergence from full KV; next to them device bytes, host bytes, time to first
token and tokens per second of the same configuration. Runs the engine, resumes an
interrupted run, and writes one JSON file with a row per cell.

    python benchmarks/quality/evidence.py run MODEL --texts TEXTS --out rows.jsonl
    python benchmarks/quality/evidence.py run MODEL --texts TEXTS --speed 3 \\
        --out rows.jsonl
    python benchmarks/quality/evidence.py collect rows.jsonl --out RESULTS.json
    python benchmarks/quality/evidence.py report RESULTS.json --plots docs/img

Two models take two files; `collect` and `report` accept several.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import child_rows, provenance
from _evidence_samples import (
    RULER,
    TASKS,
    Prompt,
    order,
    prompts_of,
    reference_file,
    setting_of,
)
from _evidence_speed import SPEED, SpeedRounds
from _prefill_store import PrefillStore
from _quality_fit import jobs_of, read_policies
from _quality_rows import Job, Row, append, key_of, open_rows
from _quality_samples import Setting, TaskError
from _serving_rows import split_policies

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.model_config import read_model_config
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.registry import available_policies

SHARES = (0.05, 0.1, 0.2)
# A retriever keeps its first layers whole by default, more than 5 % of the context.
RETRIEVAL_SETTINGS = {"skip_layers": 0}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def all_policies() -> list[dict[str, Any]]:
    """Every policy of the package with its defaults; retrievers offload all layers."""
    return [with_settings({"name": name}) for name in available_policies()]


def with_settings(policy: dict[str, Any]) -> dict[str, Any]:
    """The policy as it is measured where only its name is given."""
    if set(policy) != {"name"} or parse_policy(policy).retrieval is None:
        return policy
    return policy | RETRIEVAL_SETTINGS


def run_child(request: str) -> None:
    """Child: measure one policy with one engine, one JSON line per row."""
    # The engine runs in this process, so that the watch can read its block tables.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from _evidence_engine import measure_policy

    given = json.loads(request)
    fields = given["setting"]
    setting = Setting(**fields | {"lengths": tuple(fields["lengths"])})
    todo = {(task, name) for task, name in given["todo"]}
    prompts = order(prompts_of(setting, given["tasks"]), setting.seed)
    rows = measure_policy(
        setting,
        given["policy"],
        [prompt for prompt in prompts if (prompt.task, prompt.name) in todo],
        given["max_model_len"],
        given["batch"],
        Path(given["references"]),
        Path(given["prefills"]) if given["prefills"] else None,
    )
    for row in rows:
        print("RESULT " + json.dumps(row), flush=True)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context, child: Annotated[str, typer.Option(hidden=True)] = ""
) -> None:
    """Measure every policy, collect the rows, and draw them."""
    if child:
        run_child(child)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="a folder or a cached id")],
    texts: Annotated[Path, typer.Option(help="texts to plant keys in")],
    out: Annotated[Path, typer.Option(help="rows; resumes if it exists")],
    policies: Annotated[
        str, typer.Option(help="names or JSON, separated by commas; default: all")
    ] = "",
    samples: Annotated[int, typer.Option(help="samples of each cell")] = 20,
    tokens: Annotated[int, typer.Option(help="length of each context")] = 2000,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = (
        "bfloat16"
    ),
    tasks: Annotated[str, typer.Option(help="separated by commas")] = ",".join(TASKS),
    shares: Annotated[
        str, typer.Option(help="shares of the context to keep, separated by commas")
    ] = ",".join(map(str, SHARES)),
    speed: Annotated[
        int, typer.Option(help="rounds of the speed measurement, instead of answers")
    ] = 0,
    prefills: Annotated[
        Path | None,
        typer.Option(help="compute each prompt once and keep its KV here, some GB"),
    ] = None,
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="concurrent requests")] = 4,
    minutes: Annotated[
        float, typer.Option(help="start no further policy after this time; 0: no limit")
    ] = 0.0,
) -> None:
    """Measure the rows that OUT lacks."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    setting = setting_of(model, texts, dtype, samples, tokens, seed)
    chosen = all_policies()
    if policies:
        chosen = [with_settings(policy) for policy in split_policies(policies)]
    names = tasks.split(",")
    known = [*TASKS, *RULER]
    if unknown := sorted(set(names) - set(known)):
        raise typer.BadParameter(f"--tasks: {unknown} is none of {known}")
    deadline = time.monotonic() + 60 * minutes if minutes else None
    try:
        failed = measure(
            setting,
            names,
            chosen,
            read_shares(shares),
            batch,
            out,
            speed,
            prefills,
            deadline,
        )
    except (TaskError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    for line in failed:
        typer.echo(line)


def read_shares(given: str) -> list[float]:
    """The shares that ``--shares`` lists.

    Raises:
        ValueError: one is not measured by this benchmark.
    """
    chosen = [float(share) for share in given.split(",")]
    if unknown := sorted(set(chosen) - set(SHARES)):
        raise ValueError(f"--shares: {unknown} is none of {list(SHARES)}")
    return chosen


def measure(
    setting: Setting,
    tasks: Sequence[str],
    policies: Sequence[dict[str, Any]],
    shares: Sequence[float],
    batch: int,
    out: Path,
    speed: int,
    prefills: Path | None,
    deadline: float | None,
) -> list[str]:
    """Run one engine per policy and share.

    Args:
        speed: measure this many rounds of speed instead of answers; 0 = answers.
        prefills: folder of recorded prompts; None = every engine computes them.

    Returns:
        Policies and shares that could not run, and why.
    """
    read_policies(list(policies))
    shape = read_model_config(setting.model, setting.dtype).cache_shape()
    element_bytes = 4 if setting.dtype == "float32" else 2
    token_bytes = shape.bytes_per_token(element_bytes)
    geometry = Geometry(
        setting.block_size,
        shape.num_layers,
        shape.num_kv_heads,
        token_bytes,
        shape.head_dim,
        element_bytes,
    )
    source = provenance()
    header = {
        "settings": setting.header(),
        "block_bytes": token_bytes * setting.block_size,
        "source": source,
    }
    done = {key_of(row) for row in open_rows(out, header, mix_commits=True)}
    prompts = prompts_of(setting, tasks)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    jobs = list(jobs_of(list(policies), list(shares), max(lengths), geometry))
    max_model_len = -(-(max(lengths) + 600) // 32) * 32
    references = out.with_suffix(".stock")
    common = {
        "setting": asdict(setting),
        "tasks": list(tasks),
        "max_model_len": max_model_len,
        "batch": batch,
        "references": str(references),
        "prefills": str(prefills or ""),
    }
    store = PrefillStore(prefills, setting.model, setting.dtype) if prefills else None
    if speed:
        prompt = order(prompts, setting.seed)[0]
        with SpeedRounds(setting, prompt, max_model_len) as rounds:
            works = [
                Work(job, "rounds", todo, partial(rounds.of, job.policy, todo))
                for job in jobs
                for todo in [missing_rounds(job, speed, done)]
            ]
            return carry_out(works, out, source, done, deadline)
    works = [
        Work(job, "answers", todo, partial(answers_of, job, common | {"todo": todo}))
        for job in jobs
        for todo in [missing_prompts(job, prompts, done, references, store)]
    ]
    return carry_out(works, out, source, done, deadline)


@dataclass(frozen=True, slots=True)
class Work:
    """What is missing of one policy and share.

    Attributes:
        unit: what ``todo`` lists, for people.
        rows: measures it.
    """

    job: Job
    unit: str
    todo: Sequence[Any]
    rows: Callable[[], Iterator[Row]]


def answers_of(job: Job, request: dict[str, Any]) -> Iterator[Row]:
    """Rows of an engine in a process of its own."""
    request = request | {"policy": dict(job.policy)}
    return child_rows(__file__, json.dumps(request), job.shown)


def carry_out(
    works: Sequence[Work],
    out: Path,
    source: dict[str, str],
    done: set[Any],
    deadline: float | None,
) -> list[str]:
    """Append the missing rows. Returns what could not run, and why."""
    failed = []
    for work in works:
        job = work.job
        if deadline is not None and time.monotonic() > deadline:
            failed.append(f"{job.shown}: not reached within --minutes")
            continue
        if job.problem:
            failed.append(f"{job.shown}: {job.problem}")
            if (job.label, job.share, "", "") not in done:
                append(out, _common(job, source) | _refusal(job.problem))
        if job.problem or not work.todo:
            continue
        count = f"{len(work.todo)} {work.unit} to measure"
        typer.echo(f"{time.strftime('%H:%M:%S')} {job.shown}: {count}")
        try:
            for row in work.rows():
                append(out, _common(job, source) | row)
        except RuntimeError as error:
            if not job.policy:
                raise TaskError(f"stock vLLM failed: {error}") from error
            failed.append(str(error))
    return failed


def missing_prompts(
    job: Job,
    prompts: Sequence[Prompt],
    done: set[Any],
    references: Path,
    store: PrefillStore | None = None,
) -> list[list[str]]:
    """Prompts without a row; for stock also those without its files.

    Rows may come from another machine. Log-probabilities and recorded prompts are too
    large to come with them, so stock computes them again.
    """

    def lacks_files(prompt: Prompt) -> bool:
        file = reference_file(references, prompt.name)
        unrecorded = store and not store.path(prompt.token_ids).exists()
        return bool(unrecorded or (prompt.forced and not file.exists()))

    return [
        [prompt.task, prompt.name]
        for prompt in prompts
        if (job.label, job.share, prompt.task, prompt.name) not in done
        or (not job.policy and lacks_files(prompt))
    ]


def missing_rounds(job: Job, speed: int, done: set[Any]) -> list[int]:
    """Numbers of the rounds of speed without a row.

    Stock vLLM has no rounds of its own: it takes part in those of the policies.
    """
    return [
        number
        for number in range(speed if job.policy else 0)
        if (job.label, job.share, SPEED, f"round {number}") not in done
    ]


def _common(job: Job, source: dict[str, str]) -> Row:
    return {
        "policy": dict(job.policy),
        "share": job.share,
        "label": job.label,
        "commit": source["commit"],
    }


def _refusal(problem: str) -> Row:
    return {"task": "", "sample": "", "refused": problem}


@app.command()
def collect(
    files: Annotated[list[Path], typer.Argument(help="outputs of `run`")],
    out: Annotated[Path, typer.Option(help="JSON with a row per cell")],
) -> None:
    """Summarise rows of one or more models in one JSON file."""
    from _evidence_report import cells_of

    result = [cells_of(file) for file in files]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(f"{sum(len(model['cells']) for model in result)} cells in {out}")


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="output of `collect`")],
    markdown: Annotated[Path | None, typer.Option(help="write the tables")] = None,
    plots: Annotated[Path | None, typer.Option(help="folder for the picture")] = None,
    min_samples: Annotated[
        int, typer.Option(help="leave out cells with fewer pass keys")
    ] = 0,
) -> None:
    """Print the tables, and draw the picture."""
    from _evidence_report import complete, draw, tables

    models = [complete(model, min_samples) for model in json.loads(file.read_text())]
    text = tables(models)
    if markdown:
        markdown.write_text(text)
    else:
        typer.echo(text)
    if plots:
        for path in draw(models, plots):
            typer.echo(f"wrote {path}")


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="output of `run`")],
    reference: Annotated[str, typer.Option(help="label of the row to compare with")],
) -> None:
    """Print a table of settings against one of them, with paired tests."""
    from _evidence_compare import comparison
    from _evidence_report import OTHER_TITLES, TITLES, cells_of

    try:
        model = cells_of(file, [*TITLES, *OTHER_TITLES])
        typer.echo(comparison(model, reference))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def others(
    file: Annotated[Path, typer.Argument(help="output of `run` with other tasks")],
) -> None:
    """Print scores on tasks like RULER's, and their mean as a share of stock's."""
    from _evidence_report import OTHER_TITLES, cells_of
    from _evidence_tasks import other_tasks

    typer.echo(other_tasks(cells_of(file, OTHER_TITLES)))


if __name__ == "__main__":
    app()
