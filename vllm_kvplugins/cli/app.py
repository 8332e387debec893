"""The subcommands of ``kvplugins``: one module and one line each."""

from __future__ import annotations

import typer

from vllm_kvplugins.cli import (
    calibrate,
    check_policy,
    doctor,
    explain,
    listing,
    model,
    plot,
    record,
    sessions,
    size,
    train_router,
)

app = typer.Typer(
    name="kvplugins",
    help="KV-cache policies for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("calibrate")(calibrate.calibrate)
app.command("check-policy")(check_policy.check_policy)
app.command("list")(listing.list_policies)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("model")(model.model)
app.command("record")(record.record)
app.add_typer(plot.plots)
app.add_typer(sessions.sessions)
app.command("size")(size.size)
app.command("train-router")(train_router.train_router)


def main() -> None:
    """The console script."""
    app()
