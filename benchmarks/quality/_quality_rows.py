"""The file of a quality run: a header, then a line per answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _quality_samples import TaskError
from _serving_rows import label_of

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """A policy at one budget: what one engine runs with.

    Attributes:
        policy: as ``parse_policy`` takes it; {} is stock.
        share: of the context that may be resident, if that was asked for.
        label: policy and settings as they were asked for, without the budget.
        problem: why it cannot run; "" if it can.
    """

    policy: Mapping[str, Any]
    share: float | None
    label: str
    problem: str = ""

    @property
    def shown(self) -> str:
        """For lines of progress."""
        return self.label if self.share is None else f"{self.label} at {self.share:g}"


def key_of(row: Mapping[str, Any]) -> tuple[str, float | None, str, str]:
    """What makes a row one and the same measurement."""
    return row["label"], row["share"], row["task"], row["sample"]


def job_of(row: Mapping[str, Any]) -> str:
    """Policy and budget of a row, for people."""
    shown = label_of(row["policy"])
    return shown if row["share"] is None else f"{shown} ({row['share']:g})"


def _lines(path: Path) -> Iterator[Row]:
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when a run was interrupted
        if isinstance(row, dict):
            yield row


def read(path: Path) -> tuple[Row, list[Row]]:
    """Header and rows of a file; of two rows for one measurement the later.

    Returns:
        The header, with the ``commands`` of all runs that wrote to the file, and rows.

    Raises:
        TaskError: it is not a file of this benchmark.
    """
    lines = list(_lines(path)) if path.exists() else []
    if not lines or "header" not in lines[0]:
        raise TaskError(f"{path} does not begin with a header of quality.py")
    rows = {key_of(row): row for row in lines if "label" in row}
    header = lines[0]["header"]
    commands = [header["source"]["command"], *(x["also"] for x in lines if "also" in x)]
    header["commands"] = list(dict.fromkeys(commands))
    return header, list(rows.values())


def open_rows(path: Path, header: Row, mix_commits: bool = False) -> list[Row]:
    """Begin a file, or go on with one of the same settings.

    Args:
        header: ``settings`` and ``source``, the latter with the ``commit``.
        mix_commits: let rows of another commit stay; every row says its own.

    Returns:
        What it has already.

    Raises:
        TaskError: its settings or its commit are others.
    """
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"header": header}) + "\n")
        return []
    before, rows = read(path)
    mine, theirs = header["settings"], before["settings"]
    differing = [
        f"{name} {theirs.get(name)!r} there, {mine.get(name)!r} now"
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    if differing:
        raise TaskError(
            f"{path} has rows of other settings: {'; '.join(differing)}. Give the same "
            "settings or another --out"
        )
    was, now = before["source"]["commit"], header["source"]["commit"]
    if was != now and not mix_commits:
        raise TaskError(
            f"{path} has rows of commit {was}, this is {now}. Give another --out, or "
            "--mix-commits"
        )
    if header["source"]["command"] not in before["commands"]:
        append(path, {"also": header["source"]["command"]})
    return rows


def append(path: Path, row: Row) -> None:
    """Add a line, after ending one that was cut off."""
    cut = path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    with path.open("a") as file:
        file.write(("\n" if cut else "") + json.dumps(row) + "\n")
