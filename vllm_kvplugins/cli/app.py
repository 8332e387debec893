"""The subcommands of ``kvplugins``: one module and one line each, by help panel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from vllm_kvplugins import __version__
from vllm_kvplugins.cli import (
    calibrate,
    chat,
    check_policy,
    doctor,
    explain,
    listing,
    model,
    plot,
    rank_heads,
    recommend,
    record,
    sessions,
    size,
    train_router,
)

app = typer.Typer(
    name="kvplugins",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"vllm-kvplugins {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    """KV-cache policies for vLLM."""


# Panels of `kvplugins --help`, in this order.
_SERVING, _INSPECT, _RESEARCH = "Serving", "Inspect", "Research"

app.command("list", rich_help_panel=_SERVING)(listing.list_policies)
app.command("doctor", rich_help_panel=_SERVING)(doctor.doctor)
app.command("size", rich_help_panel=_SERVING)(size.size)
app.command("recommend", rich_help_panel=_SERVING)(recommend.recommend)
app.command("chat", rich_help_panel=_SERVING)(chat.chat)
app.command("model", rich_help_panel=_SERVING)(model.model)
app.add_typer(sessions.sessions, rich_help_panel=_SERVING)
app.command("explain", rich_help_panel=_INSPECT)(explain.explain)
app.command("check-policy", rich_help_panel=_INSPECT)(check_policy.check_policy)

research = typer.Typer(
    name="research",
    help="Measure models, train routers, record and draw runs.",
    no_args_is_help=True,
)
_RESEARCH_COMMANDS: dict[str, Callable[..., None]] = {
    "calibrate": calibrate.calibrate,
    "train-router": train_router.train_router,
    "record": record.record,
}
for _name, _command in _RESEARCH_COMMANDS.items():
    research.command(_name)(_command)
    # The old name, for one version.
    app.command(_name, hidden=True, deprecated=True)(_command)
research.command("rank-heads")(rank_heads.rank_heads)
research.add_typer(plot.plots)
app.add_typer(plot.plots, hidden=True, deprecated=True)
app.add_typer(research, rich_help_panel=_RESEARCH)


def main() -> None:
    """The console script."""
    app()
