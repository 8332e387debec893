"""``kvplugins sessions``: list, show and delete stored conversations."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from vllm_kvplugins.cli.console import fail, out, user_errors
from vllm_kvplugins.errors import coded

if TYPE_CHECKING:
    from vllm_kvplugins.sessions.inspection import FoundClustering, FoundFile, Item

sessions = typer.Typer(
    name="sessions",
    help="List, show and delete conversations in a session_dir or session_url.",
    no_args_is_help=True,
)
_ID_HELP = "First characters of a session ID, as `list` shows it."
Place = Annotated[
    str,
    typer.Argument(
        help="session_dir or session_url of a server.", metavar="DIR_OR_URL"
    ),
]


@sessions.command("list")
def list_sessions(
    place: Place,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.")
    ] = False,
) -> None:
    """List sessions, most recently used first. A running server may change them.

    The table also says how many clusterings of conversations there are, which `delete`
    deletes with their sessions."""
    files = _files(place)
    if as_json:
        typer.echo(json.dumps([_plain(file) for file in files], indent=2))
        return
    table = Table(title=f"{len(files)} files in {place}")
    for heading in ("session", "last used", "tokens", "MiB", "model", "policy", ""):
        table.add_column(heading)
    for file in files:
        used = datetime.fromtimestamp(file.last_used).strftime("%Y-%m-%d %H:%M")
        table.add_row(
            _short(file.session_id),
            used,
            str(file.tokens),
            f"{file.num_bytes / (1 << 20):.1f}",
            Path(file.facts.get("model", "")).name,
            file.facts.get("policy", "").split(" ")[0],
            escape(file.problem or ""),
        )
    out().print(table)
    found = _clusterings(place)
    if found:
        size = sum(each.num_bytes for each in found) / (1 << 20)
        out().print(f"{len(found)} clusterings of conversations, {size:.1f} MiB")


@sessions.command("show")
def show_session(
    place: Place,
    name: Annotated[str, typer.Argument(help=_ID_HELP)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show one session, and read its files to check their contents."""
    files = _chosen(place, [name], _files(place))
    ids = sorted({file.session_id for file in files})
    if len(ids) > 1:
        fail(coded("KVP605", f"{name} is not unique: {', '.join(ids)}; write more"))
    shown = _described(files)
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    else:
        table = Table(show_header=False, box=None)
        for key, value in shown.items():
            table.add_row(key, escape("\n".join(map(str, _as_lines(value)))))
        out().print(table)
    if shown["problems"]:
        raise typer.Exit(1)


@sessions.command("delete")
def delete_sessions(
    place: Place,
    names: Annotated[list[str] | None, typer.Argument(help=_ID_HELP)] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Delete all sessions.")
    ] = False,
    older_than_h: Annotated[
        float | None,
        typer.Option(
            "--older-than", help="Delete sessions unused for this many hours.", min=0
        ),
    ] = None,
) -> None:
    """Delete sessions, and the clusterings of their conversations. A server that still
    knows them recomputes them.

    The file of a later turn may need that of an earlier one. Deleting the earlier one
    by its ID also deletes the later one; --older-than leaves both."""
    if bool(names) + everything + (older_than_h is not None) != 1:
        message = "choose sessions: give IDs, or --all, or --older-than HOURS"
        fail(coded("KVP603", message), 2)
    every = _files(place)
    files = _chosen(place, names, every) if names else every
    found = _clusterings(place)
    if names:
        found = _of_conversations(found, files)
        files += _needing(files, every)
    if older_than_h is not None:
        before = time.time() - 3600 * older_than_h
        files = [file for file in files if file.last_used < before]
        found = [each for each in found if each.last_used < before]
        files = _not_needed(files, every)
    _delete([*files, *found])
    text = f"removed {len({file.session_id for file in files})} sessions"
    if found:
        text += f" and {len(found)} clusterings"
    out().print(text)


@sessions.command("gc")
def collect_garbage(
    place: Place,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
) -> None:
    """Delete what no server needs: leftovers of killed servers, damaged files, and
    sessions of which a rank's part is missing. Safe while servers run."""
    with _store_errors():
        from vllm_kvplugins.sessions.inspection import find_garbage, open_folders

        garbage = find_garbage(open_folders(place))
    kinds = {
        "temporary files of killed servers": garbage.leftovers,
        "damaged files": garbage.damaged,
        "files of incomplete sessions": garbage.incomplete,
    }
    items = [item for found in kinds.values() for item in found]
    for item in items:
        out().print(escape(item.location), soft_wrap=True)
    if not dry_run:
        _delete(items)
    verb = "would remove" if dry_run else "removed"
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in kinds.items())
    out().print(f"{verb} {counts}", soft_wrap=True)


# Old names, for one version.
sessions.command("ls", hidden=True, deprecated=True)(list_sessions)
sessions.command("rm", hidden=True, deprecated=True)(delete_sessions)


def _delete(items: Iterable[Item]) -> None:
    """Delete files; ends the command at the first that cannot be deleted."""
    for item in items:
        try:
            item.delete()
        except OSError as error:
            fail(coded("KVP608", f"{item.location} cannot be deleted: {error}"))


@contextmanager
def _store_errors() -> Iterator[None]:
    """End the command without a traceback if the folder or the store fails."""
    with user_errors():
        try:
            yield
        except OSError as error:
            fail(coded("KVP608", str(error)))


def _chosen(place: str, names: list[str], files: list[FoundFile]) -> list[FoundFile]:
    """Files of the sessions whose IDs begin with ``names``."""
    unknown = [n for n in names if not any(_named(f, [n]) for f in files)]
    if unknown:
        message = (
            f"{place} has no session {', '.join(unknown)}; `kvplugins sessions list` "
            "shows them"
        )
        fail(coded("KVP605", message))
    return [file for file in files if _named(file, names)]


def _described(files: list[FoundFile]) -> dict[str, object]:
    """One session: what its files say, and what is wrong with them."""
    from vllm_kvplugins.sessions.inspection import verify
    from vllm_kvplugins.sessions.tensor_file import SessionFileError

    problems, about = [], dict[str, str]()
    for file in files:
        try:
            with _store_errors():
                about = verify(file)
        except SessionFileError as error:
            problems.append(str(error))
        else:
            problems += [file.problem] if file.problem else []
    used = max(file.last_used for file in files)
    return {
        "session": files[0].session_id,
        "files": [file.location for file in files],
        "num_bytes": sum(file.num_bytes for file in files),
        "last_used": datetime.fromtimestamp(used).isoformat(" ", "seconds"),
        "tokens": max(file.tokens for file in files),
        "compaction": json.loads(about.get("compaction", "null")),
        "owner": about.get("owner"),
        "facts": files[0].facts,
        "needs": sorted({source for file in files for source in file.sources}),
        "problems": problems,
    }


def _as_lines(value: object) -> list[object]:
    if isinstance(value, list):
        return value or ["none"]
    if isinstance(value, dict):
        return [f"{key}: {each}" for key, each in value.items()]
    return ["none" if value is None else value]


def _named(file: FoundFile, names: Iterable[str]) -> bool:
    found = file.session_id
    return any(
        found.startswith(name) or _tail(found).startswith(name) for name in names
    )


def _tail(session_id: str) -> str:
    """The random part of an ID; in a shared store, other conversations begin alike."""
    return session_id.rpartition("-")[2]


def _short(session_id: str) -> str:
    """What a table shows of an ID, and what is enough to name the session."""
    return _tail(session_id)[:12]


def _files(place: str) -> list[FoundFile]:
    with _store_errors():
        from vllm_kvplugins.sessions.inspection import list_files, open_folders

        return list_files(open_folders(place))


def _needing(chosen: list[FoundFile], files: list[FoundFile]) -> list[FoundFile]:
    """Files that cannot be loaded without the chosen ones."""
    from vllm_kvplugins.sessions.inspection import needing

    return needing(chosen, files)


def _not_needed(chosen: list[FoundFile], files: list[FoundFile]) -> list[FoundFile]:
    """The chosen files without those that another file needs."""
    from vllm_kvplugins.sessions.inspection import not_needed

    return not_needed(chosen, files)


def _clusterings(place: str) -> list[FoundClustering]:
    with _store_errors():
        from vllm_kvplugins.sessions.inspection import list_clusterings, open_folders

        return list_clusterings(open_folders(place))


def _of_conversations(
    found: list[FoundClustering], files: list[FoundFile]
) -> list[FoundClustering]:
    """Those that belong to the conversations of sessions."""
    with _store_errors():
        from vllm_kvplugins.sessions.inspection import clusterings_of

        return clusterings_of(found, files)


def _plain(file: FoundFile) -> dict[str, object]:
    return {
        "session": file.session_id,
        "path": file.location,
        "last_used": file.last_used,
        "tokens": file.tokens,
        "num_bytes": file.num_bytes,
        "facts": file.facts,
        "problem": file.problem,
    }
