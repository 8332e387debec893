"""Cells, tables and the picture of ``evidence.py``."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _evidence_samples import KL, MULTIKEY, PASSKEY
from _quality_rows import Row, read
from _quality_stats import STOCK, answered, interval
from _serving_plots import prepare, save

MIB = 1 << 20
SPEED = "speed"
TITLES = {
    PASSKEY: "pass key found",
    MULTIKEY: "one key of 16 found",
    KL: "KL divergence",
}
# Tasks that the tables of all policies leave out.
OTHER_TITLES = {
    "multivalue": "four values",
    "multiquery": "four keys",
    "variables": "variables",
    "common_words": "common words",
}
MISSING = "–"
Cell = dict[str, Any]
Model = dict[str, Any]


def cells_of(file: Path, tasks: Iterable[str] = TITLES) -> Model:
    """Header and one cell per policy and share, from the rows of one model.

    Args:
        file: output of ``evidence.py run``.
        tasks: rows of other tasks are left out.

    A cell has a task only if all samples of the task are there, so that cells can be
    compared sample by sample: ``scores`` are in the order of ``model["samples"]``.
    ``model["unfinished"]`` says what is missing, ``model["mixed"]`` which cells have
    rows of several settings.
    """
    header, rows = read(file)
    groups: dict[tuple[str, float | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["share"]), []).append(row)
    source = header["source"]
    samples = {task: _samples(rows, task) for task in tasks}
    cells, unfinished, mixed = [], [], []
    for (label, share), cell_rows in groups.items():
        cell = _cell(label, share, cell_rows, samples)
        missing = _missing(cell_rows, samples) if "refused" not in cell else []
        unfinished += [f"{_shown(label, share)}: {text}" for text in missing]
        settings = {json.dumps(row["policy"]) for row in answered(cell_rows)}
        if len(settings) > 1:
            mixed.append(f"{_shown(label, share)}: {' and '.join(sorted(settings))}")
        if "refused" in cell or any(task in cell for task in samples):
            cells.append(cell)
    return {
        "model": header["settings"]["model"],
        "settings": header["settings"],
        "machine": source["machine"],
        "torch": source["torch"],
        "commands": header["commands"],
        "samples": samples,
        "unfinished": unfinished,
        "mixed": mixed,
        "cells": cells,
    }


def _samples(rows: Sequence[Row], task: str) -> list[list[str]]:
    """Sample and context of every question of a task, in the order of the samples."""
    found = {row["sample"]: row["group"] for row in answered(rows) if _of(row, task)}
    return [[sample, found[sample]] for sample in sorted(found)]


def _of(row: Row, task: str) -> bool:
    return bool(row["task"] == task)


def _missing(rows: Sequence[Row], samples: dict[str, list[list[str]]]) -> Iterator[str]:
    """Tasks without all samples, for people."""
    for task, wanted in samples.items():
        number = sum(_of(row, task) for row in answered(rows))
        if number < len(wanted):
            yield f"{title_of(task)} {number} of {len(wanted)}"


def title_of(task: str) -> str:
    """A task's name in tables."""
    return (TITLES | OTHER_TITLES)[task]


def _shown(label: str, share: float | None) -> str:
    return label if share is None else f"{label} at {percent(share)}"


def percent(share: float) -> str:
    """A share as in a text: ``5 %``."""
    return f"{100 * share:.3g} %"


def _cell(
    label: str,
    share: float | None,
    rows: Sequence[Row],
    samples: dict[str, list[list[str]]],
) -> Cell:
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
    complete_rows = []
    for task, wanted in samples.items():
        cell_rows = sorted((r for r in measured if r["task"] == task), key=_by_sample)
        if wanted and len(cell_rows) == len(wanted):
            cell[task] = _score(task, label, share, cell_rows)
            complete_rows += cell_rows
    held = [row for row in complete_rows if row.get("resident_bytes")]
    if held:
        cell["device_bytes"] = round(
            statistics.mean(row["resident_bytes"] for row in held)
        )
        cell["peak_device_bytes"] = max(row["peak_bytes"] for row in held)
        # Rows of the divergence do not count host memory.
        hosted = [row["host_bytes"] for row in held if "host_bytes" in row]
        if hosted:
            cell["host_bytes"] = round(statistics.mean(hosted))
    rounds = [row for row in measured if row["task"] == SPEED]
    if rounds:
        cell["tokens_per_s"] = [row["score"] for row in rounds]
        cell["first_token_ms"] = [row["first_token_ms"] for row in rounds]
        for field, own in (("tokens_per_s", "score"), ("first_token_ms",) * 2):
            cell[f"{field}_ratio"] = [
                row[own] / row[f"stock_{field}"] for row in rounds
            ]
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
    """The model without cells of fewer samples per task; refused ones stay."""
    cells = [
        cell
        for cell in model["cells"]
        if "refused" in cell
        or all(cell[task]["samples"] >= min_samples for task in TITLES if task in cell)
    ]
    return model | {"cells": cells}


# -- tables -------------------------------------------------------------------------


def name_of(cell: Cell) -> str:
    """The policy of a cell; ``stock`` is vLLM without a policy."""
    return str(cell["policy"].get("name", STOCK))


def shares_of(model: Model) -> list[float]:
    """The shares of the context that cells were measured at, ascending."""
    return sorted({cell["share"] for cell in model["cells"] if cell["share"]})


def by_policy(model: Model) -> dict[str, dict[float | None, Cell]]:
    """Cells of each label by share: stock, then the best label first.

    Labels are ordered by pass keys found over all shares, then by the mean divergence.
    """
    labels: dict[str, dict[float | None, Cell]] = {}
    for cell in model["cells"]:
        labels.setdefault(cell["label"], {})[cell["share"]] = cell

    def worth(label: str) -> tuple[Any, ...]:
        cells = [cell for cell in labels[label].values() if "refused" not in cell]
        found = [cell[PASSKEY]["mean"] for cell in cells if PASSKEY in cell]
        far = [cell[KL]["mean"] for cell in cells if KL in cell]
        return (
            label != STOCK,
            not cells,
            -statistics.mean(found or [0.0]),
            statistics.mean(far or [9.0]),
            label,
        )

    return {label: labels[label] for label in sorted(labels, key=worth)}


def tables(models: Sequence[Model]) -> str:
    """Per model: scores, memory and speed, a line per policy; what is missing."""
    return "\n\n".join("\n".join(_section(model)) for model in models) + "\n"


def _section(model: Model) -> Iterator[str]:
    shares = shares_of(model)
    at = " · ".join(percent(share) for share in shares)
    counts = ", ".join(
        f"{len(samples)} × {TITLES[task]}"
        + (f" ({contexts} contexts)" if contexts < len(samples) else "")
        for task, samples in model["samples"].items()
        if (contexts := len({group for _, group in samples}))
    )
    yield from (f"### {model['model']}", "", f"At {at} of the context.", "")
    counts_of = [len(model["samples"][task]) for task in (PASSKEY, MULTIKEY)]
    keys = (f"pass key, of {counts_of[0]}", f"key of 16, of {counts_of[1]}")
    scores = (*keys, "KL, nats", "device MiB", "host MiB")
    speeds = ("first token / stock's", "tokens/s / stock's")
    rows = [
        (label, *_values(cells, shares)) for label, cells in by_policy(model).items()
    ]
    yield from table(("policy", *scores, *speeds), rows)
    yield ""
    yield from _remarks(model)
    commits = ", ".join(sorted({c for cell in model["cells"] for c in cell["commits"]}))
    yield (
        f"- Samples: {counts}. {model['settings']['dtype']}, {model['machine']}, torch "
        f"{model['torch']}, commits {commits}."
    )


def speed_tables(models: Sequence[Model]) -> str:
    """Per model and share: first token and tokens per second, also next to stock's."""
    parts = [
        "\n".join(lines)
        for model in models
        for share in shares_of(model)
        if (lines := list(_speed_table(model, share)))
    ]
    return "\n\n".join(parts) + "\n"


def _speed_table(model: Model, share: float) -> Iterator[str]:
    """Median and range of the rounds; nothing if there are none."""
    rows = [
        (label, *_speeds(cell))
        for label, cells in by_policy(model).items()
        for at, cell in cells.items()
        if "tokens_per_s" in cell and at in (None, share)
    ]
    if not rows:
        return
    yield from (f"### {model['model']}, {percent(share)} of the context", "")
    head = ("policy", "first token ms", "/ stock's", "tokens/s", "/ stock's")
    yield from table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def _values(cells: dict[float | None, Cell], shares: Sequence[float]) -> Iterator[str]:
    for task in (PASSKEY, MULTIKEY):
        yield _joined(cells, shares, lambda cell, task=task: _found(cell.get(task)))
    yield _joined(cells, shares, lambda cell: _divergence(cell.get(KL)))
    for field in ("device_bytes", "host_bytes"):
        yield _joined(cells, shares, lambda cell, field=field: _mib(cell.get(field)))
    for field in ("first_token_ms_ratio", "tokens_per_s_ratio"):
        yield _joined(cells, shares, lambda cell, field=field: _median(cell.get(field)))


def _speeds(cell: Cell) -> Iterator[str]:
    for field, form in (("first_token_ms", "{:.0f}"), ("tokens_per_s", "{:.1f}")):
        yield _spread(cell[field], form)
        yield _spread(cell[f"{field}_ratio"], "{:.2f}")


def _joined(
    cells: dict[float | None, Cell],
    shares: Sequence[float],
    value: Callable[[Cell], str],
) -> str:
    """One value, or one per share; equal values of all shares once."""
    keys = [None] if None in cells else shares
    values = [value(cells[key]) if key in cells else MISSING for key in keys]
    return values[0] if len(set(values)) == 1 else " · ".join(values)


def _remarks(model: Model) -> Iterator[str]:
    refused: dict[tuple[str, str], list[float]] = {}
    for cell in model["cells"]:
        if "refused" in cell:
            reason = cell["refused"].partition(", more than")[0]
            refused.setdefault((cell["label"], reason), []).append(cell["share"])
    for (label, reason), shares in refused.items():
        at = f" at {', '.join(map(percent, shares))}" if None not in shares else ""
        yield f"- `{label}` cannot run{at}: it {reason}."
    for text in model["mixed"]:
        yield f"- Rows of several settings: {text}."
    if model["unfinished"]:
        yield f"- Not finished, and left out: {'; '.join(model['unfinished'])}."


def _found(score: dict[str, Any] | None) -> str:
    if score is None:
        return MISSING
    return str(round(score["mean"] * score["samples"]))


def _divergence(score: dict[str, Any] | None) -> str:
    return MISSING if score is None else f"{score['mean']:.3f}"


def _mib(num_bytes: float | None) -> str:
    if num_bytes is None:
        return MISSING
    return f"{num_bytes / MIB:.1f}" if num_bytes else "0"


def _median(values: Sequence[float] | None) -> str:
    return MISSING if not values else f"{statistics.median(values):.2f}"


def _spread(values: Sequence[float], pattern: str) -> str:
    low, high = pattern.format(min(values)), pattern.format(max(values))
    return f"{pattern.format(statistics.median(values))} ({low}..{high})"


# -- the picture ----------------------------------------------------------------------

# Safe for the colour-blind.
SHADES = ("#E69F00", "#009E73", "#0072B2", "#CC79A7")
ROW_INCHES = 0.3


def draw(models: Sequence[Model], folder: Path) -> list[Path]:
    """One line of dots per policy, best first; one column per measured value."""
    prepare()
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    policies = [by_policy(model) for model in models]
    heights = [len(labels) + 1.5 for labels in policies]
    figure = Figure(
        figsize=(12, ROW_INCHES * sum(heights) + 0.9 * len(models)),
        layout="constrained",
    )
    columns = len(TITLES) + 2
    axes = figure.subplots(
        len(models), columns, squeeze=False, sharey="row", height_ratios=heights
    )
    for row, model, labels in zip(axes, models, policies, strict=True):
        shares = shares_of(model)
        for axis, (task, title) in zip(row, TITLES.items(), strict=False):
            _dots(axis, labels, shares, partial(_score_point, task))
            _stock_line(axis, labels, task)
            unit = ", nats: less is better" if task == KL else ""
            axis.set_title(f"{title}{unit}", fontsize=9)
            if task != KL:
                axis.set(xlim=(-0.04, 1.04))
        if any(KL in cell for cells in labels.values() for cell in cells.values()):
            row[list(TITLES).index(KL)].set_xscale("log")
        for axis, field in zip(row[-2:], ("device_bytes", "host_bytes"), strict=True):
            _dots(axis, labels, shares, partial(_memory_point, field))
            where = "device" if field == "device_bytes" else "host"
            axis.set_title(f"{where} MiB per request", fontsize=9)
        row[-2].set_xscale("log")
        row[-2].xaxis.set_major_formatter("{x:g}")
        row[-2].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        row[-2].xaxis.set_minor_formatter("")
        _mark_refused(row[0], labels)
        row[0].set_yticks(range(len(labels)), list(labels), fontsize=8)
        row[0].set_ylim(len(labels) - 0.4, -0.6)
        row[0].set_ylabel(model["model"], fontsize=10)
        for axis in row:
            for line in range(0, len(labels), 2):
                axis.axhspan(line - 0.5, line + 0.5, color="0.96", zorder=0)
            axis.grid(alpha=0.3)
            axis.tick_params(axis="x", labelsize=8)
    _legend(figure, sorted({share for model in models for share in shares_of(model)}))
    return save({"evidence": figure}, folder)


Point = tuple[float, float | None, float | None]


def _score_point(task: str, cell: Cell) -> Point | None:
    if task not in cell:
        return None
    score = cell[task]
    return score["mean"], score["low"], score["high"]


def _memory_point(field: str, cell: Cell) -> Point | None:
    return (cell[field] / MIB, None, None) if cell.get(field) is not None else None


def _dots(
    axis: Any,
    labels: dict[str, dict[float | None, Cell]],
    shares: Sequence[float],
    point_of: Callable[[Cell], Point | None],
) -> None:
    """One dot per label and share, with its interval; refused cells get none."""
    for line, cells in enumerate(labels.values()):
        for share, cell in cells.items():
            point = None if "refused" in cell else point_of(cell)
            if point is None:
                continue
            number = shares.index(share) if share else None
            shift = 0.0 if number is None else 0.24 * (number - (len(shares) - 1) / 2)
            colour = "0.25" if number is None else SHADES[number % len(SHADES)]
            value, low, high = point
            axis.plot(value, line + shift, "o", markersize=4.5, color=colour, zorder=3)
            if low is not None:
                bar = (line + shift, line + shift)
                axis.plot((low, high), bar, "-", color=colour, linewidth=1, alpha=0.6)


def _mark_refused(axis: Any, labels: dict[str, dict[float | None, Cell]]) -> None:
    """Say so where a policy cannot hold as little as any share."""
    for line, cells in enumerate(labels.values()):
        if all("refused" in cell for cell in cells.values()):
            text = "cannot hold so little"
            axis.text(
                0.5, line, text, va="center", ha="center", fontsize=7, color="0.4"
            )


def _stock_line(
    axis: Any, labels: dict[str, dict[float | None, Cell]], task: str
) -> None:
    stock = labels.get(STOCK, {}).get(None, {})
    if task in stock and task != KL:
        axis.axvline(stock[task]["mean"], color="0.5", linestyle="--", linewidth=1)


def _legend(figure: Any, shares: Sequence[float]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", linestyle="", color=colour, label=label)
        for colour, label in [
            *(
                (SHADES[number % len(SHADES)], f"{percent(share)} of the context")
                for number, share in enumerate(shares)
            ),
            ("0.25", "all tokens"),
        ]
    ]
    handles.append(Line2D([], [], color="0.5", linestyle="--", label="stock vLLM"))
    handles.append(Line2D([], [], color="0.25", label="95 % interval"))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
