"""Plots of a serving comparison: latency over load, memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _serving_rows import Row, label_of

MIB = 1 << 20
# Okabe-Ito colours, which are safe for colour blindness. Markers and, after
# seven policies, line styles distinguish the rest.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
PANELS = {
    "p50_ttft_ms": "TTFT p50 (ms)",
    "p99_ttft_ms": "TTFT p99 (ms)",
    "p50_tpot_ms": "TPOT p50 (ms)",
    "p99_itl_ms": "ITL p99 (ms)",
    "output_throughput_tokens_per_s": "output tokens per second",
    "goodput_per_min": "goodput (requests per minute)",
}
LOADS = {"chat": "users arriving per second", "random": "requests per second"}


def style(index: int) -> dict[str, Any]:
    """Colour, marker and line style of the policy with this index, in all panels."""
    dashed = "-" if index < len(COLOURS) else "--"
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashed}


def draw(
    rows: Sequence[Row], records: Sequence[dict[str, Any]], folder: Path, name: str
) -> list[Path]:
    """Plot comparable rows and their summary.

    Args:
        rows: with their samples over time.
        records: result of ``summarise`` for these rows.
        folder: for the files.
        name: prefix of the file names.

    Returns:
        The files: ``NAME-latency`` and ``NAME-memory``, as PNG and SVG.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    prepare()
    figures = {f"{name}-latency": latency(records), f"{name}-memory": memory(rows)}
    return save(figures, folder)


def prepare() -> None:
    """Set up matplotlib without a display and with reproducible output.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise RuntimeError(
            "--plots needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    mpl.use("Agg")  # works without a display
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}


def save(figures: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write figures as PNG and SVG, named by their keys; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        for suffix in ("png", "svg"):
            path = folder / f"{name}.{suffix}"
            # no date, so that the file changes only with its content
            extra = {"metadata": {"Date": None}} if suffix == "svg" else {"dpi": 150}
            figure.savefig(path, **extra)
            written.append(path)
    return written


def latency(records: Sequence[dict[str, Any]]) -> Any:
    """One panel per metric, one line per policy over the load; shading is min to
    max."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, 3)
    policies = list(dict.fromkeys(record["policy"] for record in records))
    for axis, (what, title) in zip(axes.flat, PANELS.items(), strict=True):
        for index, policy in enumerate(policies):
            points = [
                record
                for record in records
                if record["policy"] == policy and record[what] is not None
            ]
            rates = [point["rate_per_s"] for point in points]
            low = [point[f"{what}_min"] for point in points]
            high = [point[f"{what}_max"] for point in points]
            look = style(index)
            axis.plot(
                rates,
                [point[what] for point in points],
                marker=MARKERS[index % len(MARKERS)],
                markersize=5,
                linewidth=1.2,
                label=policy,
                **look,
            )
            axis.fill_between(rates, low, high, color=look["color"], alpha=0.12, lw=0)
        axis.set(title=title, xlabel=LOADS[records[0]["workload"]])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def memory(rows: Sequence[Row]) -> Any:
    """Held blocks over time, one column per rate; host memory below if any is used.

    The first repetition is opaque, the others are faint.
    """
    from matplotlib.figure import Figure

    rates = sorted({row["rate"] for row in rows})
    policies = list(dict.fromkeys(label_of(row["policy"]) for row in rows))
    # (title, column of the samples, factor to the axis' unit)
    panels = [("held blocks", "held_blocks", 1.0)]
    if any(any(row["samples"].get("host_bytes", ())) for row in rows):
        panels.append(("host memory (MiB)", "host_bytes", 1 / MIB))
    size = (max(6.0, 3.2 * len(rates) + 1.6), 0.6 + 2.6 * len(panels))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(panels), len(rates), squeeze=False, sharey="row")
    first = min(row["repetition"] for row in rows)
    for (title, column, factor), line in zip(panels, axes, strict=True):
        for rate, axis in zip(rates, line, strict=True):
            for row in (row for row in rows if row["rate"] == rate):
                label = label_of(row["policy"])
                main = row["repetition"] == first
                axis.plot(
                    row["samples"].get("at_s", ()),
                    [factor * value for value in row["samples"].get(column, ())],
                    # a gauge keeps its value until the next sample
                    drawstyle="steps-post",
                    linewidth=1.4 if main else 0.6,
                    alpha=1.0 if main else 0.5,
                    label=label if main else None,
                    **style(policies.index(label)),
                )
            if column == "held_blocks":
                pool = max(row["figures"].get("pool_blocks", 0) for row in rows)
                axis.axhline(pool, color="0.5", linestyle=":", label="pool")
            axis.set(title=f"{rate:g} per second", xlabel="s")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        line[0].set_ylabel(title)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure
