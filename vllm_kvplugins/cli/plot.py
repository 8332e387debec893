"""``kvplugins plot``: pictures of recorded runs, one subcommand each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import check_targets
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.residency.recorded_run import read_run

plots = typer.Typer(
    name="plot", help="Draw what `kvplugins record` wrote.", no_args_is_help=True
)
_KINDS = (".svg", ".png")


@plots.callback()
def _keep_subcommands() -> None:
    """Draw what `kvplugins record` wrote."""


@plots.command("hit-rate")
def hit_rate(
    run_path: Annotated[
        Path, typer.Argument(metavar="RUN.jsonl", help="What `record` wrote.")
    ],
    plot_path: Annotated[
        Path, typer.Option("--out", metavar="PLOT.svg|.png", help="Where to draw.")
    ],
) -> None:
    """Pages fetched and attention mass covered, per layer and step."""
    with user_errors():
        if plot_path.suffix.lower() not in _KINDS:
            raise KVPolicyError(
                f"cannot draw {plot_path}: its name must end in {' or '.join(_KINDS)}"
            )
        check_targets(plot_path)
        from vllm_kvplugins.cli.hit_rate import draw

        run = read_run(run_path)
        try:
            draw(run, plot_path)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise KVPolicyError(
                "plots need matplotlib, which is not installed: pip install "
                "matplotlib, or this package with its extra, pip install '.[plot]'"
            ) from error
        except OSError as error:
            raise KVPolicyError(
                f"cannot write {plot_path}: {error.strerror}; choose another place"
            ) from error
    out().print(f"wrote {escape(str(plot_path))}", soft_wrap=True)
