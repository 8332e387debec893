"""Tables and files of the rows of ``quality.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _quality_rows import Row
from _quality_stats import summarise
from rich.console import Console
from rich.table import Table

KIB = 1 << 10


def spread(record: dict[str, Any], name: str) -> str:
    """A mean with its interval."""
    low, high = record[f"{name}_low"], record[f"{name}_high"]
    return f"{record[name]:.3f} ({low:.2f}..{high:.2f})"


def table_of(records: Sequence[dict[str, Any]]) -> Table:
    """All records, a section per task."""
    table = Table(
        "task", "method", "asked", "samples", "score", "resident KiB", "share"
    )
    for record, following in zip(records, [*records[1:], None], strict=True):
        held, share = record["resident_bytes"], record["resident_share"]
        table.add_row(
            record["task"],
            record["method"],
            "" if record["share"] is None else f"{record['share']:g}",
            str(record["samples"]),
            spread(record, "score"),
            "-" if held is None else f"{held / KIB:.0f}",
            "-" if share is None else f"{share:.3f}",
            end_section=following is None or following["task"] != record["task"],
        )
    return table


def report(
    header: Row,
    rows: Sequence[Row],
    console: Console,
) -> None:
    """Show all rows."""
    console.print(table_of(summarise(rows, header["settings"]["seed"])))
    source = header["source"]
    console.print(
        f"{source['machine']}, torch {source['torch']}, commit {source['commit']}: "
        f"{source['command']}",
        markup=False,
        highlight=False,
    )
