"""Tables of ``quality.py``: methods side by side at equal bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _quality_rows import Row
from _quality_stats import STOCK, answered, summarise
from _serving_report import write_csv
from rich.console import Console
from rich.table import Table

KIB = 1 << 10
# allowed excess over a share: rounding to whole pages, and the block being written
ROUNDING_BLOCKS = 2
# metrics for which lower is better
DISTANCES = ("fidelity:error", "fidelity:kl")
Record = dict[str, Any]


def spread(record: Record, name: str) -> str:
    """A mean, with its interval if there is one."""
    low, high = record[f"{name}_low"], record[f"{name}_high"]
    shown = f"{record[name]:.3f}"
    return shown if low is None else f"{shown} ({low:.2f}..{high:.2f})"


def at_equal_bytes(
    records: Sequence[Record], level: float, header: Row
) -> dict[str, Record]:
    """For each method, the setting that holds most, but no more than a share of stock.

    The limit allows two blocks for rounding, and the generated tokens, half of which
    exist at the median step of an answer: most policies keep all of them.

    Args:
        records: of one task.
        level: the share; settings with a larger requested share do not count.
        header: of the file, with the block size.

    Returns:
        Records by method, without methods that hold more at every setting.
    """
    closest: dict[str, Record] = {}
    token_bytes = header["block_bytes"] / header["settings"]["block_size"]
    for record in records:
        held, share = record["resident_bytes"], record["resident_share"]
        if held is None or not share or (record["share"] or 0.0) > level:
            continue
        more = ROUNDING_BLOCKS * header["block_bytes"]
        more += (record["answer_tokens"] or 0.0) / 2 * token_bytes
        if held > level * held / share + more:
            continue
        best = closest.get(record["method"])
        if best is None or held > best["resident_bytes"]:
            closest[record["method"]] = record
    return closest


def side_by_side(records: Sequence[Record], header: Row) -> list[list[str]]:
    """Rows of a table of one task: one per method, a column per share of stock's bytes.

    A cell has the score, its interval and the measured share. The first row is the
    header. A method that holds more than the largest share, such as stock, has its
    score in the last column.
    """
    levels = sorted({r["share"] for r in records if r["share"] is not None})
    cells = [at_equal_bytes(records, level, header) for level in levels]
    methods = list(dict.fromkeys(record["method"] for record in records))
    table = [["method", *(f"{level:.0%}" for level in levels), "more", "samples"]]
    for method in methods:
        own_records = [record for record in records if record["method"] == method]
        shown = [_cell(cell.get(method)) for cell in cells]
        chosen = [cell.get(method) for cell in cells]
        rest = [r for r in own_records if r["share"] is None and r not in chosen]
        more = ", ".join(_cell(record) for record in rest)
        samples = sorted({record["samples"] for record in own_records})
        table.append([method, *shown, more, "/".join(map(str, samples))])
    return table


def _cell(record: Record | None) -> str:
    if record is None:
        return "–"
    share = record["resident_share"]
    held = "" if share is None else f" @ {share:.1%}"
    return spread(record, "score") + held


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of each task, in order of appearance."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record["task"], []).append(record)
    return by_name


def refusals(rows: Sequence[Row]) -> list[str]:
    """Reasons for missing answers, by policy and budget."""
    have = {(row["label"], row["share"]) for row in answered(rows)}
    reasons = {
        (row["label"], row["share"]): row["refused"]
        for row in rows
        if "refused" in row and (row["label"], row["share"]) not in have
    }
    return [
        f"{label} at {share:g}: {problem}"
        for (label, share), problem in reasons.items()
    ]


def title_of(task: str) -> str:
    """A task's name, and whether lower is better."""
    return f"{task} (less is better)" if task in DISTANCES else task


def caption(header: Row, rows: Sequence[Row]) -> list[str]:
    """Settings, machine, commits and commands."""
    source = header["source"]
    settings = {k: v for k, v in header["settings"].items() if v not in ("", None)}
    commits = dict.fromkeys([row["commit"] for row in rows if "commit" in row])
    return [
        ", ".join(f"{name} {value}" for name, value in settings.items()),
        f"{source['machine']}, torch {source['torch']}, commit "
        f"{', '.join(commits) or source['commit']}: {'; '.join(header['commands'])}",
    ]


def markdown(header: Row, rows: Sequence[Row], records: Sequence[Record]) -> str:
    """All tables, followed by refusals and settings."""
    parts = []
    for task, own_records in by_task(records).items():
        head, *body = side_by_side(own_records, header)
        lines = [f"### {title_of(task)}", ""]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(cells) + " |" for cells in body]
        parts.append("\n".join(lines))
    parts += [f"- {line}" for line in refusals(rows)]
    settings, source = caption(header, rows)
    parts += [settings, source]
    return "\n\n".join(parts) + "\n"


def report(
    header: Row,
    rows: Sequence[Row],
    console: Console,
    csv_file: Path | None = None,
    markdown_file: Path | None = None,
    plots: Path | None = None,
) -> None:
    """Print all rows, and write the files that the user chose.

    Args:
        header: of the rows' file.
        rows: the measured rows.
        console: prints the tables.
        csv_file, markdown_file: None = do not write.
        plots: folder for plots.
    """
    records = summarise(rows, header["settings"]["seed"])
    for task, own_records in by_task(records).items():
        head, *body = side_by_side(own_records, header)
        table = Table(title=title_of(task))
        for name in head:
            table.add_column(name, overflow="fold")
        for cells in body:
            table.add_row(*(cell.replace(" @ ", "\n@ ") for cell in cells))
        console.print(table)
    for line in [*refusals(rows), *caption(header, rows)]:
        console.print(line, markup=False, highlight=False)
    if csv_file:
        write_csv(records, csv_file)
    if markdown_file:
        markdown_file.parent.mkdir(parents=True, exist_ok=True)
        markdown_file.write_text(markdown(header, rows, records))
    if plots:
        from _quality_plots import draw

        for path in draw(records, rows, plots):
            console.print(f"drawn: {path}", markup=False, highlight=False)


__all__ = ["STOCK", "at_equal_bytes", "markdown", "report", "side_by_side"]
