"""Cells, tables and the picture of ``evidence.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _evidence_samples import KL, MULTIKEY, PASSKEY
from _quality_rows import Row, read
from _quality_stats import STOCK, answered, interval
from _serving_plots import MARKERS, prepare, save, style

MIB = 1 << 20
SPEED = "speed"
TITLES = {
    PASSKEY: "pass key found",
    MULTIKEY: "one key of 16 found",
    KL: "KL divergence",
}
Cell = dict[str, Any]
Model = dict[str, Any]


def cells_of(file: Path) -> Model:
    """Header and one cell per policy and share, from the rows of one model."""
    header, rows = read(file)
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["share"]), []).append(row)
    source = header["source"]
    return {
        "model": header["settings"]["model"],
        "settings": header["settings"],
        "machine": source["machine"],
        "torch": source["torch"],
        "commands": header["commands"],
        "cells": [
            _cell(label, share, cell_rows)
            for (label, share), cell_rows in groups.items()
        ],
    }


def _cell(label: str, share: float | None, rows: Sequence[Row]) -> Cell:
    measured = answered(rows)
    cell: Cell = {
        "label": label,
        "share": share,
        "commits": sorted({row["commit"] for row in rows}),
        "policy": rows[-1]["policy"],
    }
    refused = [row["refused"] for row in rows if "refused" in row]
    if refused and not measured:
        return cell | {"refused": refused[-1]}
    for task in TITLES:
        cell_rows = sorted((r for r in measured if r["task"] == task), key=_by_sample)
        if cell_rows:
            cell[task] = _score(task, label, share, cell_rows)
    held = [row for row in measured if row.get("resident_bytes")]
    if held:
        cell["device_bytes"] = round(
            statistics.mean(row["resident_bytes"] for row in held)
        )
        cell["peak_device_bytes"] = max(row["peak_bytes"] for row in held)
        cell["host_bytes"] = round(statistics.mean(row["host_bytes"] for row in held))
    rounds = [row for row in measured if row["task"] == SPEED]
    if rounds:
        cell["tokens_per_s"] = [row["score"] for row in rounds]
        cell["first_token_ms"] = [row["first_token_ms"] for row in rounds]
    return cell


def _by_sample(row: Row) -> str:
    return str(row["sample"])


def _score(
    task: str, label: str, share: float | None, rows: Sequence[Row]
) -> dict[str, Any]:
    scores = [row["score"] for row in rows]
    groups = [row["group"] for row in rows]
    # Equal right-or-wrong scores get Wilson's interval; equal divergences get none.
    spread = task != KL or len(set(scores)) > 1
    name = f"{task} {label} {share}"
    low, high = (interval(scores, groups, name) if spread else None) or (None, None)
    return {
        "samples": len(scores),
        "mean": round(statistics.mean(scores), 5),
        "low": None if low is None else round(low, 5),
        "high": None if high is None else round(high, 5),
        "scores": [round(score, 5) for score in scores],
    }


def complete(model: Model, min_samples: int) -> Model:
    """The model without cells of an unfinished run; refused ones stay."""
    cells = [
        cell
        for cell in model["cells"]
        if "refused" in cell or cell[PASSKEY]["samples"] >= min_samples
    ]
    return model | {"cells": cells}


# -- tables -------------------------------------------------------------------------

HEAD = (
    *("policy", "share", "pass key", "key of 16", "KL", "device MiB", "host MiB"),
    *("first token ms", "tokens/s"),
)


def tables(models: Sequence[Model]) -> str:
    """One Markdown table per model."""
    parts = []
    for model in models:
        lines = [
            f"### {model['model']}",
            "",
            "| " + " | ".join(HEAD) + " |",
            "|---" * len(HEAD) + "|",
        ]
        lines += ["| " + " | ".join(cells) + " |" for cells in _lines(model)]
        commits = sorted({c for cell in model["cells"] for c in cell["commits"]})
        lines += [
            "",
            f"{model['machine']}, torch {model['torch']}, {', '.join(commits)}.",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _lines(model: Model) -> Iterator[list[str]]:
    for cell in model["cells"]:
        share = "–" if cell["share"] is None else f"{cell['share']:.0%}"
        if "refused" in cell:
            yield [cell["label"], share, f"refused: {cell['refused']}", *[""] * 6]
            continue
        yield [
            cell["label"],
            share,
            *(_found(cell.get(task)) for task in (PASSKEY, MULTIKEY)),
            _divergence(cell.get(KL)),
            f"{cell['device_bytes'] / MIB:.1f}" if "device_bytes" in cell else "–",
            f"{cell['host_bytes'] / MIB:.1f}" if "host_bytes" in cell else "–",
            _spread(cell.get("first_token_ms"), "{:.0f}"),
            _spread(cell.get("tokens_per_s"), "{:.1f}"),
        ]


def _found(score: dict[str, Any] | None) -> str:
    if score is None:
        return "–"
    return f"{round(score['mean'] * score['samples'])} of {score['samples']}"


def _divergence(score: dict[str, Any] | None) -> str:
    if score is None:
        return "–"
    if score["low"] is None:
        return f"{score['mean']:.3f}"
    return f"{score['mean']:.3f} ({score['low']:.3f}..{score['high']:.3f})"


def _spread(values: Sequence[float] | None, pattern: str) -> str:
    if not values:
        return "–"
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return f"{pattern.format(statistics.median(values))} ({low}..{high})"


# -- the picture ----------------------------------------------------------------------


def draw(models: Sequence[Model], folder: Path) -> list[Path]:
    """Scores over device bytes: one row per model, one column per task."""
    prepare()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4 * len(models) + 0.6), layout="constrained")
    axes = figure.subplots(len(models), len(TITLES), squeeze=False)
    labels = list(
        dict.fromkeys(
            cell["policy"].get("name", STOCK)
            for model in models
            for cell in model["cells"]
        )
    )
    for row, model in zip(axes, models, strict=True):
        for axis, (task, title) in zip(row, TITLES.items(), strict=True):
            _panel(axis, model, task, labels)
            axis.set(title=f"{title}, {model['model']}", xlabel="device MiB")
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside right center",
        frameon=False,
        fontsize=8,
    )
    return save({"evidence": figure}, folder)


def _panel(axis: Any, model: Model, task: str, labels: Sequence[str]) -> None:
    for index, label in enumerate(labels):
        points = sorted(
            (cell["device_bytes"] / MIB, cell[task]["mean"])
            for cell in model["cells"]
            if cell["policy"].get("name", STOCK) == label
            and task in cell
            and "device_bytes" in cell
        )
        if not points:
            continue
        if label == STOCK:
            axis.axhline(points[0][1], color="0.5", linestyle="--", label=STOCK)
            continue
        axis.plot(
            *zip(*points, strict=True),
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            fillstyle="full" if index < len(MARKERS) else "none",
            linewidth=1.1,
            label=label,
            **style(index),
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.3)
