"""Means with intervals, and grouping of rows for quality reports."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from _dialogue import wilson
from _quality_rows import Row

DRAWS = 2000
STOCK = "stock"


def interval(
    values: Sequence[float], groups: Sequence[str], name: str, seed: int = 0
) -> tuple[float, float] | None:
    """95 % bootstrap interval of a mean, drawing whole groups of samples.

    Samples of one group share a context and are drawn together. If all groups are
    equal, the bootstrap has no spread; right-or-wrong scores then get Wilson's
    interval, with one sample per group.

    Args:
        values: one per sample.
        groups: the group of each sample.
        name: of the measurement; together with the seed it determines the draws.
        seed: of the draws.

    Returns:
        None if all groups are equal and scores are not only 0 and 1.
    """
    sums: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        total = sums.setdefault(group, [0.0, 0.0])
        total[0] += value
        total[1] += 1
    parts = np.array(list(sums.values()))
    means = parts[:, 0] / parts[:, 1]
    if np.ptp(means) < 1e-12:
        if set(values) <= {0.0, 1.0}:
            return wilson(float(means[0]) * len(parts), len(parts))
        return None
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    drawn = parts[generator.integers(len(parts), size=(DRAWS, len(parts)))].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(low), float(high)


def answered(rows: Sequence[Row]) -> list[Row]:
    """Rows with an answer, without failures."""
    return [row for row in rows if "score" in row]


def by_method(rows: Sequence[Row]) -> dict[tuple[str, str, float | None], list[Row]]:
    """Rows of each task, label and share; tasks and labels in order of appearance."""
    grouped: dict[tuple[str, str, float | None], list[Row]] = {}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    labels = list(dict.fromkeys(row["label"] for row in rows))
    for row in answered(rows):
        grouped.setdefault((row["task"], row["label"], row["share"]), []).append(row)
    order = sorted(
        grouped, key=lambda k: (tasks.index(k[0]), labels.index(k[1]), k[2] or 0.0)
    )
    return {key: grouped[key] for key in order}


def summarise(rows: Sequence[Row], seed: int = 0) -> list[dict[str, Any]]:
    """One record per task, method and budget.

    Returns:
        Records of ``score`` with ``_low`` and ``_high``; ``vs_stock``, the mean
        difference over samples that stock has answered too, with its interval;
        ``resident_bytes`` at decode steps, and ``resident_share`` relative to stock's
        for the same samples. A value that was not measured is None.
    """
    methods = by_method(rows)
    records = []
    for (task, label, share), own_rows in methods.items():
        stock = {row["sample"]: row for row in methods.get((task, STOCK, None), [])}
        groups = [row["group"] for row in own_rows]
        scores = [row["score"] for row in own_rows]
        name = f"{task} {label} {share}"
        low, high = interval(scores, groups, name, seed) or (None, None)
        record: dict[str, Any] = {"task": task, "method": label, "share": share}
        record |= {"samples": len(own_rows), "groups": len(set(groups))}
        record |= {"score": statistics.mean(scores)}
        record |= {"score_low": low, "score_high": high}
        record |= _against(own_rows, stock if label != STOCK else {}, name, seed)
        record |= _sizes(own_rows, stock)
        records.append(record)
    return records


def _against(
    own_rows: Sequence[Row], stock: dict[str, Row], name: str, seed: int
) -> dict[str, float | None]:
    """Mean difference to stock on the same samples."""
    both = [row for row in own_rows if row["sample"] in stock]
    if not both:
        return dict.fromkeys(("vs_stock", "vs_stock_low", "vs_stock_high"))
    gaps = [row["score"] - stock[row["sample"]]["score"] for row in both]
    mean = statistics.mean(gaps)
    # differences are not 0-or-1 scores, so no Wilson interval
    drawn = len(set(gaps)) > 1
    gap_interval = interval(gaps, [row["group"] for row in both], name + " gap", seed)
    low, high = (gap_interval if drawn else None) or (None, None)
    return {"vs_stock": mean, "vs_stock_low": low, "vs_stock_high": high}


def _sizes(own_rows: Sequence[Row], stock: dict[str, Row]) -> dict[str, float | None]:
    """Means of resident bytes, prompt lengths and answer lengths."""
    measured = [row for row in own_rows if row.get("resident_bytes")]
    pairs = [
        (row["resident_bytes"], stock[row["sample"]]["resident_bytes"])
        for row in measured
        if stock.get(row["sample"], {}).get("resident_bytes")
    ]
    ratio = sum(a for a, _ in pairs) / sum(b for _, b in pairs) if pairs else None
    shares = [row["resident_share"] for row in own_rows if "resident_share" in row]
    if shares:  # if stock has no rows, use the policy's own count
        ratio = statistics.mean(shares)
    return {
        "resident_bytes": statistics.mean(row["resident_bytes"] for row in measured)
        if measured
        else None,
        "resident_share": ratio,
        "prompt_tokens": statistics.mean(row["prompt_tokens"] for row in own_rows),
        "answer_tokens": statistics.mean(
            row.get("answer_tokens", 0) for row in own_rows
        ),
    }
