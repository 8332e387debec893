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
    """A policy at one budget: the configuration of one engine.

    Attributes:
        policy: input of ``parse_policy``; {} is stock.
        share: requested resident share of the context; None if not requested.
        label: policy and settings as the user wrote them, without the budget.
        problem: why it cannot run; "" if it can.
    """

    policy: Mapping[str, Any]
    share: float | None
    label: str
    problem: str = ""

    @property
    def shown(self) -> str:
        """Name for progress lines."""
        return self.label if self.share is None else f"{self.label} at {self.share:g}"


def key_of(row: Mapping[str, Any]) -> tuple[str, float | None, str, str]:
    """Identifies a measurement."""
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
            continue  # incomplete after an interrupted run
        if isinstance(row, dict):
            yield row


def read(path: Path) -> tuple[Row, list[Row]]:
    """Header and rows of a file; a later row replaces an earlier one.

    Returns:
        The header, with the ``commands`` of all runs that wrote to the file, and rows.

    Raises:
        TaskError: the file was not written by this benchmark.
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
    """Start a file, or resume one with the same settings.

    Args:
        path: the file.
        header: ``settings`` and ``source``, the latter with the ``commit``.
        mix_commits: accept rows of another commit; every row records its commit.

    Returns:
        The existing rows.

    Raises:
        TaskError: the file has other settings or another commit.
    """
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"header": header}) + "\n")
        return []
    before, rows = read(path)
    own_settings, file_settings = header["settings"], before["settings"]
    differing = [
        f"{name} {file_settings.get(name)!r} there, {own_settings.get(name)!r} now"
        for name in sorted({*own_settings, *file_settings})
        if own_settings.get(name) != file_settings.get(name)
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
    """Append a line; first end an incomplete one."""
    cut = path.stat().st_size and path.read_bytes()[-1:] != b"\n"
    with path.open("a") as file:
        file.write(("\n" if cut else "") + json.dumps(row) + "\n")
