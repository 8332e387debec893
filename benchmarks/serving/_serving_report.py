"""Tables and files from the rows of ``benchmark_serving.py``."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _serving_bytes import compared_bytes, verdict
from _serving_plots import draw
from _serving_rows import STOCK, Row, label_of
from _serving_sweep import highest_rates
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
# metric: (title, factor, digits); two tables, because one would be too wide
LATENCY = {
    "p50_ttft_ms": ("TTFT p50 ms", 1.0, 0),
    "p99_ttft_ms": ("TTFT p99 ms", 1.0, 0),
    "p50_tpot_ms": ("TPOT p50 ms", 1.0, 1),
    "p50_itl_ms": ("ITL p50 ms", 1.0, 1),
    "p99_itl_ms": ("ITL p99 ms", 1.0, 1),
    "output_throughput_tokens_per_s": ("tokens/s", 1.0, 1),
    "goodput_per_min": ("goodput /min", 1.0, 1),
    "answered_share": ("answers right %", 100.0, 0),
    "accepted_draft_share": ("drafts accepted %", 100.0, 0),
}
MEMORY = {
    "mean_held_blocks": ("held blocks, mean", 1.0, 0),
    "peak_held_blocks": ("held blocks, peak", 1.0, 0),
    "preemptions": ("preemptions", 1.0, 0),
    "mean_running": ("running, mean", 1.0, 1),
    "prefix_hit_share": ("prefix hits %", 100.0, 0),
    "computed_share": ("prompt computed %", 100.0, 1),
    "server_cpu_s": ("server CPU s", 1.0, 0),
    "completed": ("done", 1.0, 0),
    "failed": ("failed", 1.0, 0),
}
COUNTS = ("completed", "failed")  # metrics without a ratio to stock
# metrics that appear in files only
OTHER = (
    *("p99_tpot_ms", "request_throughput_per_s", "peak_running", "pool_bytes"),
    *("peak_device_table_bytes", "peak_host_bytes", "peak_session_bytes"),
    *("peak_session_disk_bytes", "memory_bytes"),
    *("blocks_freed", "duration_s", "input_tokens", "output_tokens", "pool_blocks"),
    "computed_tokens",
)
FIGURES = (*LATENCY, *MEMORY, *OTHER)


def comparable(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows of the same workload and settings, in order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = json.dumps([row["workload"], row["settings"]], sort_keys=True)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def by_line(rows: Sequence[Row]) -> dict[tuple[str, float], list[Row]]:
    """Rows of each policy and rate; rates in order within a policy."""
    lines: dict[tuple[str, float], list[Row]] = {}
    labels = list(dict.fromkeys(label_of(row["policy"]) for row in rows))
    for row in sorted(rows, key=lambda row: row["rate"]):
        lines.setdefault((label_of(row["policy"]), row["rate"]), []).append(row)
    return dict(sorted(lines.items(), key=lambda item: labels.index(item[0][0])))


def ratio_to_stock(
    rows: Sequence[Row], stock: Sequence[Row], name: str
) -> float | None:
    """Median ratio of a metric to stock's, over the repetitions that both have.

    The ratio is taken per repetition, because its two runs were adjacent in time. None
    if there is no common repetition, or if stock's value is 0.
    """
    stock_figures = {row["repetition"]: row["figures"].get(name) for row in stock}
    ratios = []
    for row in rows:
        own, base = row["figures"].get(name), stock_figures.get(row["repetition"])
        if own is not None and base:
            ratios.append(own / base)
    return statistics.median(ratios) if ratios else None


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One record per policy and rate of comparable rows.

    Returns:
        Records of ``workload``, ``policy``, ``rate_per_s``, ``repetitions`` and, for
        each metric, ``FIGURE`` (the median), ``_min``, ``_max`` and ``_vs_stock``. A
        value that was not measured is None.
    """
    lines = by_line(rows)
    records = []
    for (label, rate), own in lines.items():
        record: dict[str, Any] = {"workload": own[0]["workload"], "policy": label}
        record |= {"rate_per_s": rate, "repetitions": len(own)}
        stock = lines.get((STOCK, rate), [])
        for name in FIGURES:
            values = [row["figures"].get(name) for row in own]
            measured = [value for value in values if value is not None]
            record[name] = statistics.median(measured) if measured else None
            record[f"{name}_min"] = min(measured, default=None)
            record[f"{name}_max"] = max(measured, default=None)
            against = ratio_to_stock(own, stock, name)
            record[f"{name}_vs_stock"] = None if label == STOCK else against
        records.append(record)
    return records


def show(record: dict[str, Any], name: str, factor: float, digits: int) -> str:
    """A table cell: median, range over repetitions, and ratio to stock."""
    if record[name] is None:
        return "-"
    shown = f"{factor * record[name]:.{digits}f}"
    low, high = record[f"{name}_min"], record[f"{name}_max"]
    if record["repetitions"] > 1 and low != high:
        shown += f"\n{factor * low:.{digits}f}..{factor * high:.{digits}f}"
    against = None if name in COUNTS else record[f"{name}_vs_stock"]
    return shown if against is None else f"{shown}\n×{against:.2f}"


def table_of(
    records: Sequence[dict[str, Any]], columns: dict[str, tuple[str, float, int]]
) -> Table:
    """The records as a table, one section per policy."""
    table = Table()
    for title in ("policy", "rate /s", *(title for title, _, _ in columns.values())):
        table.add_column(title, overflow="fold")  # wrap instead of cutting off
    for record, following in zip(records, [*records[1:], None], strict=True):
        last = following is None or following["policy"] != record["policy"]
        table.add_row(
            record["policy"],
            f"{record['rate_per_s']:g}",
            *(show(record, name, *how) for name, (_, *how) in columns.items()),
            end_section=last,
        )
    return table


def table_of_bytes(records: Sequence[dict[str, Any]]) -> Table:
    """All bytes of each server, and whether they equal the reference's."""
    table = Table()
    names = {
        "pool_bytes": "pool MiB",
        "device_table_bytes": "next to the pool MiB",
        "host_bytes": "host MiB",
        "session_bytes": "of it sessions MiB",
        "memory_bytes": "memory MiB",
        "session_disk_bytes": "on disk MiB",
    }
    for title in ("policy", *names.values(), "memory compared"):
        table.add_column(title, overflow="fold")
    for record in records:
        values = [record[name] for name in names]
        cells = ["-" if v is None else f"{v / MIB:.2f}" for v in values]
        table.add_row(record["policy"], *cells, verdict(record))
    return table


def table_of_rates(
    records: Sequence[dict[str, Any]], held: Sequence[dict[str, Any]]
) -> Table:
    """The highest rate of each policy at the service level.

    Args:
        records: of ``highest_rates``.
        held: of ``compared_bytes``: a rate stands next to its memory.
    """
    table = Table()
    titles = (
        "policy",
        "highest rate /s at the service level",
        "ratio to stock",
        "answers right",
        "memory compared",
    )
    for title in titles:
        table.add_column(title, overflow="fold")
    verdicts = {each["policy"]: verdict(each) for each in held}
    for record in records:
        rates, ratios = record["rates_per_s"], record["vs_stock"]
        bound = " or more" if record["is_bound"] else ""
        table.add_row(
            record["policy"],
            f"{record['median']:.3g}{bound} ({min(rates):.3g}..{max(rates):.3g}, "
            f"n = {len(rates)})",
            f"×{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
            if ratios and record["policy"] != STOCK
            else "",
            answered(record),
            verdicts[record["policy"]],
        )
    return table


def answered(record: dict[str, Any]) -> str:
    """Share of right answers, and the share of stock's; empty if not measured."""
    if record["answered_share"] is None:
        return ""
    shown = f"{100 * record['answered_share']:.0f} % of {record['answers']}"
    if record["policy"] == STOCK or not record["answered_vs_stock"]:
        return shown
    return f"{shown}, {100 * record['answered_vs_stock']:.0f} % of stock's"


def caption(rows: Sequence[Row]) -> str:
    """Workload and settings of comparable rows, and the machines that ran them."""
    settings = {
        name: value for name, value in rows[0]["settings"].items() if value != ""
    }
    lines = [", ".join(f"{name} {value}" for name, value in settings.items())]
    sources = [row["source"] for row in rows if "source" in row]
    lines += dict.fromkeys(
        f"{s['machine']}, torch {s['torch']}, commit {s['commit']}: {s['command']}"
        for s in sources
    )
    return "\n".join(lines)


def report(
    rows: Sequence[Row],
    console: Console,
    csv_file: Path | None = None,
    json_file: Path | None = None,
    plots: Path | None = None,
    goodput_share: float = 0.9,
    unavailable: Mapping[str, str] | None = None,
) -> None:
    """Print all rows, and write the files that the user chose.

    Args:
        rows: of one or several comparisons; each gets its own tables.
        console: prints the tables.
        csv_file: all records, one line each.
        json_file: all records, with the settings and sources of each comparison.
        plots: folder for plots.
        goodput_share: share of requests that must be within the limits at a rate.
        unavailable: why systems could not run here, by label.
    """
    missing = dict(unavailable or {})
    groups = comparable(rows)
    summaries = [summarise(group) for group in groups]
    highest = [highest_rates(group, goodput_share) for group in groups]
    compared = [compared_bytes(group) for group in groups]
    for group, records, rates, held in zip(
        groups, summaries, highest, compared, strict=True
    ):
        console.rule(group[0]["workload"])
        console.print(table_of(records, LATENCY))
        console.print(table_of(records, MEMORY))
        console.print(table_of_bytes(held))
        if rates and len({row["rate"] for row in group}) > 1:
            console.print(table_of_rates(rates, held))
        console.print(caption(group), markup=False, highlight=False)
    for label, reason in missing.items():
        line = f"{label}: cannot run here: {reason}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if csv_file:
        write_csv([record for records in summaries for record in records], csv_file)
    if json_file:
        records = [
            {
                "workload": group[0]["workload"],
                "settings": group[0]["settings"],
                "sources": list_of_sources(group),
                "records": [strict_record(record) for record in records],
                "bytes": held,
                "highest_rates": rates,
                "goodput_share": goodput_share,
                "unavailable": missing,
            }
            for group, records, rates, held in zip(
                groups, summaries, highest, compared, strict=True
            )
        ]
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(records, indent=1) + "\n")
    if plots:
        workloads = [group[0]["workload"] for group in groups]
        for index, (group, records) in enumerate(zip(groups, summaries, strict=True)):
            before = workloads[:index].count(workloads[index])
            name = workloads[index] + (f"-{before + 1}" if before else "")
            for path in draw(group, records, plots, name):
                console.print(f"drawn: {path}", markup=False, highlight=False)


def strict_record(record: dict[str, Any]) -> dict[str, Any]:
    """A record without infinity, which JSON does not have."""
    endless = record["rate_per_s"] == float("inf")
    return record | {"rate_per_s": "inf"} if endless else record


def list_of_sources(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Machines, commits and commands of rows, without duplicates."""
    return list(
        {json.dumps(r["source"]): r["source"] for r in rows if "source" in r}.values()
    )


def write_csv(records: Sequence[dict[str, Any]], path: Path) -> None:
    """One line per record; an empty cell was not measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        if records:
            writer = csv.DictWriter(file, records[0].keys())
            writer.writeheader()
            writer.writerows(records)
