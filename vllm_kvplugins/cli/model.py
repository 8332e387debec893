"""``kvplugins model``: make the small default model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_kvplugins.cli.console import fail, user_errors
from vllm_kvplugins.default_model import SMOLLM2, materialise


def model(
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Target folder; default: the user's cache."
        ),
    ] = None,
) -> None:
    """Make the default model, once, and print its folder."""
    with user_errors():
        try:
            folder = materialise(out_dir)
        except OSError as error:
            fail(f"cannot write {SMOLLM2.name}: {error}; choose another --out")
    typer.echo(folder)
