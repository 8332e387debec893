"""Answers under KV-cache policies, compared with stock vLLM at equal resident bytes.

Tasks are generated (``passkey``, ``multikey``, ``needle``) or read from published files
(``docs/benchmark-quality.md``). One engine per policy and budget answers all samples.
Every answer is a line of ``--out``; an interrupted run resumes from this file.

    python benchmarks/quality/quality.py run MODEL --tasks passkey,multikey \\
        --policies full,snapkv,sekv --budgets 0.05,0.1,0.2 --out quality.jsonl
    python benchmarks/quality/quality.py report quality.jsonl --plots plots
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median_high
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _engine import child_rows, provenance
from _quality_fit import jobs_of, read_policies
from _quality_report import report as show_report
from _quality_rows import Job, Row, append, key_of, open_rows, read
from _quality_samples import Sample, Setting, TaskError, Tokens
from _quality_stats import answered
from _quality_tasks import TASKS, samples_of
from _serving_rows import split_policies
from rich.console import Console

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.model_config import read_model_config
from vllm_kvplugins.plan.geometry import Geometry

FIDELITY = "fidelity"
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# -- one engine -------------------------------------------------------------------


def run_child(request: str) -> None:
    """Child: answer samples with one engine, one JSON line each."""
    # run the engine in this process, to read its block tables
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from _quality_engine import answers

    order = json.loads(request)
    read_policies([order["policy"]])
    setting = setting_from(order["setting"])
    todo = {(task, name) for task, name in order["todo"]}
    samples = [
        sample
        for sample in samples_of(setting, order["tasks"])
        if (sample.task, sample.name) in todo
    ]
    lengths = (order["max_model_len"], order["batch"])
    for row in answers(setting, order["policy"], samples, *lengths):
        print("RESULT " + json.dumps(row), flush=True)


def setting_from(fields: dict[str, Any]) -> Setting:
    """A setting after a round trip through JSON."""
    return Setting(**fields | {"lengths": tuple(fields["lengths"])})


# -- all of them --------------------------------------------------------------------


def run_all(
    setting: Setting,
    tasks: list[str],
    jobs: Sequence[Job],
    samples: Sequence[Sample],
    max_model_len: int,
    batch: int,
    out: Path,
    rows: list[Row],
    say: Callable[[str], None],
) -> list[str]:
    """Ask for every answer that ``out`` lacks.

    Args:
        samples: of all ``tasks``; a child creates them again from the setting.
        rows: existing rows of ``out``.

    Returns:
        Failed jobs, and why.
    """
    done = {key_of(row) for row in rows}
    source = provenance()
    shared = {"setting": asdict(setting), "tasks": tasks}
    shared |= {"max_model_len": max_model_len, "batch": batch}
    failed = []
    for job in jobs:
        common = {"policy": dict(job.policy), "share": job.share, "label": job.label}
        if job.problem:
            failed.append(f"{job.shown}: {job.problem}")
            refused = common | {"task": "", "sample": "", "refused": job.problem}
            append(out, refused | {"commit": source["commit"]})
            continue
        todo = [
            (s.task, s.name)
            for s in samples
            if (job.label, job.share, s.task, s.name) not in done
        ]
        if not todo:
            continue
        say(f"{job.shown}: {len(todo)} answers to come")
        request = json.dumps(shared | {"policy": dict(job.policy), "todo": todo})
        scores: dict[str, list[float]] = {}
        try:
            for row in child_rows(__file__, request, job.shown):
                append(out, common | row | {"commit": source["commit"]})
                scores.setdefault(row["task"], []).append(row["score"])
        except RuntimeError as error:
            if not job.policy:  # without stock there is no reference
                raise TaskError(f"stock vLLM failed: {error}") from error
            failed.append(str(error))
            say(f"{job.shown} failed")
        for task, values in scores.items():
            say(f"  {task}: {sum(values) / len(values):.3f} of {len(values)}")
    return failed


def as_before(jobs: Sequence[Job], rows: Sequence[Row]) -> list[Job]:
    """Replace budgets by those of earlier rows with the same policy and share.

    Budgets are fitted to the median prompt, which changes with the set of tasks.
    """
    had = {(row["label"], row["share"]): row["policy"] for row in answered(rows)}
    return [
        replace(job, policy=had[job.label, job.share], problem="")
        if (job.label, job.share) in had
        else job
        for job in jobs
    ]


def length_for(samples: Sequence[Sample], tokens: Tokens) -> tuple[list[int], int]:
    """Prompt tokens of each sample, and a context length that fits all."""
    lengths = [tokens.prompt(sample) for sample in samples]
    longest = max(
        count + sample.max_tokens
        for count, sample in zip(lengths, samples, strict=True)
    )
    return lengths, -(-longest // 32) * 32


# -- the command line -----------------------------------------------------------------


def read_numbers(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    """Parse comma-separated numbers."""
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise typer.BadParameter(f"{option} must be numbers, got {text!r}") from error
    if not values or min(values) <= 0:
        raise typer.BadParameter(f"{option} must be positive numbers, got {text!r}")
    return values


def read_tasks(text: str) -> list[str]:
    """Parse comma-separated task names."""
    names = [part.strip() for part in text.split(",")]
    task_names = [*TASKS, FIDELITY]
    if unknown := sorted(set(names) - set(task_names)):
        raise typer.BadParameter(f"--tasks: {unknown} is none of {task_names}")
    return list(dict.fromkeys(names))


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context, child: Annotated[str, typer.Option(hidden=True)] = ""
) -> None:
    """Measure answers under policies, and report the results."""
    if child:
        run_child(child)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="a folder or a cached id")],
    tasks: Annotated[
        str, typer.Option(help="any of " + ", ".join([*TASKS, FIDELITY]))
    ] = ("passkey,multikey"),
    policies: Annotated[
        str, typer.Option(help="names or JSON, separated by commas; stock always runs")
    ] = "full,snapkv",
    budgets: Annotated[
        str, typer.Option(help="resident shares of the context")
    ] = "0.05,0.1,0.2",
    limit: Annotated[int, typer.Option(help="maximum samples of each other task")] = 20,
    seed: int = 0,
    tokens: Annotated[int, typer.Option(help="length of a generated context")] = 2000,
    lengths: Annotated[
        str, typer.Option(help="needle: context lengths, separated by commas")
    ] = "1000,2000,4000",
    depths: Annotated[int, typer.Option(help="passkey, needle: number of depths")] = 10,
    keys: Annotated[int, typer.Option(help="multikey: keys per context")] = 16,
    questions: Annotated[int, typer.Option(help="multikey: questions per context")] = 4,
    shots: Annotated[int, typer.Option(help="gsm8k: worked examples")] = 16,
    fillers: Annotated[int, typer.Option(help="prefeval: filler turns")] = 8,
    max_prompt_tokens: Annotated[
        int, typer.Option(help="limit for texts from files; longbench cuts to it")
    ] = 3500,
    haystack: Annotated[str, typer.Option(help="texts to plant keys in")] = "",
    ruler: Annotated[str, typer.Option(help="JSONL of RULER")] = "",
    longbench: Annotated[str, typer.Option(help="JSONL of LongBench")] = "",
    longbench_config: Annotated[
        str, typer.Option(help="folder with LongBench's dataset2prompt.json")
    ] = "",
    locomo: Annotated[str, typer.Option(help="JSON of LoCoMo")] = "",
    gsm8k: Annotated[str, typer.Option(help="JSONL of GSM8K")] = "",
    longgenbench: Annotated[str, typer.Option(help="JSON of LongGenBench")] = "",
    answer_tokens: Annotated[
        int, typer.Option(help="maximum length of long answers")
    ] = 1024,
    prefeval: Annotated[str, typer.Option(help="JSON of PrefEval, or a folder")] = "",
    documents: Annotated[str, typer.Option(help="fidelity: texts")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32")] = (
        "bfloat16"
    ),
    block_size: int = 32,
    batch: Annotated[int, typer.Option(help="concurrent requests")] = 4,
    out: Path = Path("quality.jsonl"),
    mix_commits: Annotated[
        bool, typer.Option(help="accept rows of another commit")
    ] = False,
) -> None:
    """Ask every policy at every budget for the answers that OUT lacks."""
    console = Console(width=None if sys.stdout.isatty() else 140)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if dtype not in ELEMENT_BYTES:
        raise typer.BadParameter(f"--dtype {dtype!r} is none of {[*ELEMENT_BYTES]}")
    if Path(model).is_dir():
        # a local folder needs no lookup on the hub
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    setting = Setting(
        model=model,
        dtype=dtype,
        seed=seed,
        limit=limit,
        tokens=tokens,
        lengths=tuple(read_numbers(lengths, "--lengths", int)),
        depths=depths,
        keys=keys,
        questions=questions,
        shots=shots,
        fillers=fillers,
        max_prompt_tokens=max_prompt_tokens,
        block_size=block_size,
        haystack=haystack,
        ruler=ruler,
        longbench=longbench,
        longbench_config=longbench_config,
        locomo=locomo,
        gsm8k=gsm8k,
        longgenbench=longgenbench,
        answer_tokens=answer_tokens,
        prefeval=prefeval,
        documents=documents,
    )
    shares = read_numbers(budgets, "--budgets", float)
    if max(shares) > 1:
        raise typer.BadParameter(f"--budgets are shares of the context, got {budgets}")
    try:
        failed = measure(
            setting,
            read_tasks(tasks),
            split_policies(policies),
            shares,
            batch,
            out,
            mix_commits,
            say,
        )
    except (TaskError, KVPolicyError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    except KeyboardInterrupt:
        say("stopped; run the same command again to resume")
        raise typer.Exit(130) from None
    show_report(*read(out), console)
    for line in failed:
        say(line)
    if failed:
        raise typer.Exit(1)


def measure(
    setting: Setting,
    tasks: list[str],
    policies: list[dict[str, Any]],
    shares: list[float],
    batch: int,
    out: Path,
    mix_commits: bool,
    say: Callable[[str], None],
) -> list[str]:
    """Create samples and jobs, and run them.

    Returns:
        Failed jobs, and why.
    """
    read_policies(policies)
    shape = read_model_config(setting.model, setting.dtype).cache_shape()
    token_bytes = shape.bytes_per_token(ELEMENT_BYTES[setting.dtype])
    geometry = Geometry(
        setting.block_size,
        shape.num_layers,
        shape.num_kv_heads,
        token_bytes,
        shape.head_dim,
        ELEMENT_BYTES[setting.dtype],
    )
    header = {
        "settings": setting.header(),
        "block_bytes": token_bytes * setting.block_size,
        "source": provenance(),
    }
    engine_tasks = [task for task in tasks if task != FIDELITY]
    say("making samples")
    samples = samples_of(setting, engine_tasks)
    counts = [setting.tokens]
    max_model_len = setting.tokens
    if samples:
        counts, max_model_len = length_for(samples, Tokens.of(setting.model))
    jobs = list(jobs_of(policies, shares, median_high(counts), geometry))
    rows = open_rows(out, header, mix_commits)
    jobs = as_before(jobs, rows)
    say(f"{len(samples)} samples, {len(jobs)} engines, see {out}")
    failed = []
    if engine_tasks:
        failed = run_all(
            setting, engine_tasks, jobs, samples, max_model_len, batch, out, rows, say
        )
    if FIDELITY in tasks:
        from _quality_fidelity import measure_fidelity

        failed += measure_fidelity(setting, jobs, token_bytes, out, rows, say)
    return failed


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="output file of `run`")],
    csv: Annotated[Path | None, typer.Option(help="table as CSV")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="write the tables as Markdown")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="folder for PNG and SVG; needs matplotlib")
    ] = None,
) -> None:
    """Show methods side by side at equal resident bytes."""
    if plots and not find_spec("matplotlib"):  # fail now instead of after the report
        raise typer.BadParameter("--plots needs matplotlib: pip install matplotlib")
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        show_report(*read(file), console, csv, markdown, plots)
    except (TaskError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


if __name__ == "__main__":
    app()
