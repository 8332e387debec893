"""``kvplugins sessions``: list and remove the sessions in a ``session_dir``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vllm_kvplugins.cli.console import fail, out, user_errors
from vllm_kvplugins.errors import coded

if TYPE_CHECKING:
    from vllm_kvplugins.sessions.files import FoundFile

sessions = typer.Typer(
    name="sessions",
    help="List and remove conversations in a session_dir.",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Argument(help="session_dir of a server.", metavar="DIR")]


@sessions.command("ls")
def list_sessions(
    folder: Folder,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """List sessions, most recently used first. A running server may change them."""
    files = _files(folder)
    if as_json:
        typer.echo(json.dumps([_plain(file) for file in files], indent=2))
        return
    table = Table(title=f"{len(files)} files in {folder}")
    for heading in ("session", "last used", "tokens", "MiB", "model", "policy", ""):
        table.add_column(heading)
    for file in files:
        used = datetime.fromtimestamp(file.last_used).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            file.session_id[:12],
            used,
            str(file.tokens),
            f"{file.num_bytes / (1 << 20):.1f}",
            Path(file.facts.get("model", "")).name,
            file.facts.get("policy", "").split(" ")[0],
            file.problem or "",
        )
    out().print(table)


@sessions.command("rm")
def remove_sessions(
    folder: Folder,
    names: Annotated[
        list[str] | None, typer.Argument(help="First characters of session IDs.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Remove all sessions.")
    ] = False,
    older_than_h: Annotated[
        float | None,
        typer.Option(
            "--older-than", help="Remove sessions unused for this many hours.", min=0
        ),
    ] = None,
) -> None:
    """Remove sessions. A server that still knows them recomputes them."""
    if bool(names) + everything + (older_than_h is not None) != 1:
        message = "choose sessions: give IDs, or --all, or --older-than HOURS"
        fail(coded("KVP603", message), 2)
    files = _files(folder)
    if names:
        unknown = [n for n in names if not any(_named(f, [n]) for f in files)]
        if unknown:
            message = (
                f"{folder} has no session {', '.join(unknown)}; `kvplugins sessions "
                "ls` lists them"
            )
            fail(coded("KVP605", message))
        files = [file for file in files if _named(file, names)]
    elif older_than_h is not None:
        before = time.time() - 3600 * older_than_h
        files = [file for file in files if file.last_used < before]
    for file in files:
        file.path.unlink(missing_ok=True)
    out().print(f"removed {len({file.session_id for file in files})} sessions")


def _named(file: FoundFile, names: Iterable[str]) -> bool:
    return any(file.session_id.startswith(name) for name in names)


def _files(folder: Path) -> list[FoundFile]:
    with user_errors():
        from vllm_kvplugins.sessions.files import list_files

        if not folder.is_dir():
            message = f"{folder} is not a folder; give the session_dir of a server"
            fail(coded("KVP605", message))
        return list_files(folder)


def _plain(file: FoundFile) -> dict[str, object]:
    return {
        "session": file.session_id,
        "path": str(file.path),
        "last_used": file.last_used,
        "tokens": file.tokens,
        "num_bytes": file.num_bytes,
        "facts": file.facts,
        "problem": file.problem,
    }
