"""Plots of a quality run: score over resident bytes, and the needle map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from _quality_rows import Row
from _quality_stats import STOCK, answered
from _serving_plots import MARKERS, prepare, save, style

MIB = 1 << 20
NEEDLE = "needle"


def draw(
    records: Sequence[dict[str, Any]], rows: Sequence[Row], folder: Path
) -> list[Path]:
    """Plot every task of a summary.

    Args:
        records: result of ``summarise`` for the rows.
        rows: the measured rows.
        folder: for the files.

    Returns:
        ``TASK-bytes`` for each task, and ``needle-map`` if there are needles, as PNG
        and SVG.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    prepare()
    figures = {}
    for task in dict.fromkeys(record["task"] for record in records):
        task_records = [record for record in records if record["task"] == task]
        if any(record["resident_bytes"] for record in task_records):
            name = task.replace(":", "-").replace("/", "-")
            figures[f"{name}-bytes"] = over_bytes(task, task_records)
    needles = [row for row in answered(rows) if row["task"] == NEEDLE]
    if needles:
        figures["needle-map"] = needle_map(needles)
    return save(figures, folder)


def over_bytes(task: str, records: Sequence[dict[str, Any]]) -> Any:
    """Score of each method over its resident bytes, with intervals; stock is dashed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axis = figure.subplots()
    methods = list(dict.fromkeys(record["method"] for record in records))
    for index, method in enumerate(m for m in methods if m != STOCK):
        points = sorted(
            (r for r in records if r["method"] == method and r["resident_bytes"]),
            key=lambda record: record["resident_bytes"],
        )
        heights = [point["score"] for point in points]
        ends = [(p["score_low"], p["score_high"]) for p in points]
        # no bar without an interval; a Wilson interval can end at the mean
        below = [
            0.0 if low is None else max(height - low, 0.0)
            for height, (low, _) in zip(heights, ends, strict=True)
        ]
        above = [
            0.0 if high is None else max(high - height, 0.0)
            for height, (_, high) in zip(heights, ends, strict=True)
        ]
        axis.errorbar(
            [point["resident_bytes"] / MIB for point in points],
            heights,
            yerr=[below, above],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            fillstyle="full" if index < len(MARKERS) else "none",
            linewidth=1.2,
            elinewidth=0.6,
            capsize=2,
            label=method,
            **style(index),
        )
    for record in records:
        if record["method"] == STOCK:
            axis.axhline(record["score"], color="0.5", linestyle="--", label=STOCK)
    axis.set(title=task, xlabel="resident KV cache (MiB per request)", ylabel="score")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def needle_map(rows: Sequence[Row]) -> Any:
    """A map of depth over length for each method and budget; lighter is better."""
    from matplotlib.figure import Figure

    lengths = sorted({row["place"]["tokens"] for row in rows})
    depths = sorted({row["place"]["depth"] for row in rows})
    labels = list(dict.fromkeys(row["label"] for row in rows))
    cells = {(row["label"], row["share"]) for row in rows}
    panels = sorted(cells, key=lambda c: (labels.index(c[0]), c[1] or 0.0))
    wide = min(len(panels), 4)
    tall = -(-len(panels) // wide)
    size = (1.2 + wide * (1.0 + 0.34 * len(lengths)), tall * (0.7 + 0.2 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(tall, wide, squeeze=False, sharex=True, sharey=True)
    image = None
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for index, ((label, share), axis) in enumerate(
        zip(panels, axes.flat, strict=False)
    ):
        grid = [
            [_mean(rows, label, share, depth, length) for length in lengths]
            for depth in depths
        ]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        shown = label if share is None else f"{label}\n{share:.0%}"
        axis.set_title(shown, fontsize=8)
        axis.set_xticks(range(len(lengths)), [f"{n:g}" for n in lengths], rotation=60)
        lowest = index + wide >= len(panels)
        axis.tick_params(labelbottom=lowest, labelsize=7)
        axis.set_yticks(range(len(depths)), [f"{100 * d:.0f}" for d in depths])
    figure.supxlabel("tokens of context", fontsize=9)
    figure.supylabel("depth of the needle (%)", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=axes, label="score", shrink=0.8)
    return figure


def _mean(
    rows: Sequence[Row], label: str, share: float | None, depth: float, length: int
) -> float:
    """Mean score of a cell; NaN if it has no answers."""
    scores = [
        row["score"]
        for row in rows
        if (row["label"], row["share"]) == (label, share)
        and row["place"]["depth"] == depth
        and row["place"]["tokens"] == length
    ]
    return mean(scores) if scores else float("nan")
