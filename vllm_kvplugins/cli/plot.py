"""``kvplugins plot``: pictures of recorded runs, one subcommand each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from vllm_kvplugins.cli.console import out, user_errors
from vllm_kvplugins.cli.inputs import check_targets
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.residency.recorded_run import read_run

plots = typer.Typer(
    name="plot", help="Draw what was recorded or measured.", no_args_is_help=True
)
_KINDS = (".svg", ".png")


@plots.callback()
def _keep_subcommands() -> None:
    """Draw what was recorded or measured."""


PlotPath = Annotated[
    Path, typer.Option("--out", "-o", metavar="PLOT.svg|.png", help="Where to draw.")
]


@plots.command("hit-rate")
def hit_rate(
    run_path: Annotated[
        Path, typer.Argument(metavar="RUN.jsonl", help="What `record` wrote.")
    ],
    plot_path: PlotPath,
) -> None:
    """Pages fetched and attention mass covered, per layer and step."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.cli.hit_rate import draw

        run = read_run(run_path)
        _save(lambda: draw(run, plot_path), plot_path)


@plots.command("retention")
def retention(
    file_path: Annotated[
        Path,
        typer.Argument(
            metavar="RETENTION.json", help="What benchmarks/retention.py wrote."
        ),
    ],
    plot_path: PlotPath,
) -> None:
    """Attention to the first turn that is still covered, turn by turn."""
    with user_errors():
        _check_plot(plot_path)
        from vllm_kvplugins.cli.retention import draw, read_retention

        found = read_retention(file_path)
        _save(lambda: draw(found, plot_path), plot_path)


def _check_plot(path: Path) -> None:
    """Refuse a place that cannot be written, or that says no format."""
    if path.suffix.lower() not in _KINDS:
        raise KVPolicyError(
            f"cannot draw {path}: its name must end in {' or '.join(_KINDS)}"
        )
    check_targets(path)


def _save(draw: Callable[[], None], path: Path) -> None:
    """Draw, and say in one line what is missing if that fails."""
    try:
        draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise KVPolicyError(
            "plots need matplotlib, which is not installed: pip install "
            "matplotlib, or this package with its extra, pip install '.[plot]'"
        ) from error
    except OSError as error:
        raise KVPolicyError(
            f"cannot write {path}: {error.strerror}; choose another place"
        ) from error
    out().print(f"wrote {escape(str(path))}", soft_wrap=True)
