"""``kvplugins model``: make the small default model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_kvplugins.cli.console import user_errors
from vllm_kvplugins.default_model import SMOLLM2, materialise
from vllm_kvplugins.errors import KVPolicyError, coded


def model(
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Target folder; default: the user's cache."
        ),
    ] = None,
) -> None:
    """Make the default model if it does not exist, and print its folder."""
    with user_errors():
        try:
            folder = materialise(out_dir)
        except OSError as error:
            raise KVPolicyError(
                coded(
                    "KVP602",
                    f"cannot write {SMOLLM2.name}: {error}; choose another --out",
                )
            ) from error
    typer.echo(folder)
