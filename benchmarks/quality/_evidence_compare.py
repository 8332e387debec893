"""A table of settings against one of them, on the same samples.

For sweeps and ablations: each row says how many keys are found and how far the answers
are from full KV, both with the paired difference from the reference. The tests are not
corrected for their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from _evidence_report import (
    MISSING,
    OTHER_TITLES,
    Cell,
    Model,
    percent,
    table,
)
from _evidence_samples import KL, MULTIKEY, PASSKEY
from _evidence_verdicts import MIN_CONTEXTS, Comparison, compared
from _quality_stats import STOCK, interval

MIB = 1 << 20
TITLES = {PASSKEY: "pass keys", MULTIKEY: "keys of sixteen"} | OTHER_TITLES


def comparison(model: Model, reference: str) -> str:
    """Markdown: one table per share, in the order of measurement.

    Args:
        reference: label of a cell, such as ``snapkv window=64``.

    Raises:
        ValueError: no cell has this label.
    """
    cells = [c for c in model["cells"] if "refused" not in c and c["label"] != STOCK]
    if reference not in {cell["label"] for cell in cells}:
        known = ", ".join(dict.fromkeys(cell["label"] for cell in cells))
        raise ValueError(f"no row is labelled {reference!r}; there are {known}")
    lines: list[str] = []
    for share in dict.fromkeys(cell["share"] for cell in cells):
        own = [cell for cell in cells if cell["share"] == share]
        base = next((cell for cell in own if cell["label"] == reference), None)
        if base is not None:
            lines += [f"At {percent(share)}, against `{reference}`:", ""]
            lines += [*_table(model, own, base), "", _shows(model, base), ""]
    return "\n".join(lines)


def _shows(model: Model, base: Cell) -> str:
    """The smallest difference that the sign test can show, per task.

    p is below 0.05 from ``MIN_CONTEXTS`` contexts on that differ in one direction.
    """
    contexts = {
        task: len({group for _, group in model["samples"][task]})
        for task in (*TITLES, KL)
        if task in base
    }
    tested = [
        f"{TITLES.get(task, 'KL')} {MIN_CONTEXTS} of {count} contexts "
        f"({100 * MIN_CONTEXTS / count:.0f} points)"
        for task, count in contexts.items()
        if count >= MIN_CONTEXTS
    ]
    if not tested:
        return "Too few contexts for a test."
    return (
        "Smallest difference that can show, if no context differs the other way: "
        f"{', '.join(tested)}."
    )


def _table(model: Model, cells: Sequence[Cell], base: Cell) -> Iterator[str]:
    keys = [task for task in TITLES if task in base]
    head = ["settings"]
    for task in keys:
        head += [TITLES[task], "better, worse, p"]
    if KL in base:
        head += ["KL", "less the reference's", "better, worse, p"]
    head.append("device MiB")
    yield from table(head, [_row(model, cell, base, keys) for cell in cells])


def _row(model: Model, cell: Cell, base: Cell, keys: Sequence[str]) -> list[str]:
    is_base = cell is base
    row = [f"**`{cell['label']}`**" if is_base else f"`{cell['label']}`"]
    for task in keys:
        if task not in cell:
            row += [MISSING, MISSING]
            continue
        row.append(_shown(task, cell))
        row.append("" if is_base else _tested(model, task, cell, base))
    if KL in base:
        row += _divergence(model, cell, base) if KL in cell else [MISSING] * 3
    held = cell.get("device_bytes")
    return [*row, f"{held / MIB:.2f}" if held else MISSING]


def _shown(task: str, cell: Cell) -> str:
    """Keys found; the mean where an answer can be right in part."""
    mean, samples = cell[task]["mean"], cell[task]["samples"]
    if task in OTHER_TITLES:
        return f"{mean:.2f}"
    return f"{round(mean * samples)} of {samples}"


def _divergence(model: Model, cell: Cell, base: Cell) -> list[str]:
    mean = f"{cell[KL]['mean']:.3f}"
    if cell is base:
        return [mean, "", ""]
    pairs = zip(cell[KL]["scores"], base[KL]["scores"], strict=True)
    gaps = [own - other for own, other in pairs]
    groups = [group for _, group in model["samples"][KL]]
    spread = interval(gaps, groups, f"{cell['label']} {base['label']}")
    gap = f"{sum(gaps) / len(gaps):+.3f}"
    if spread is not None:
        gap += f" ({spread[0]:+.3f} to {spread[1]:+.3f})"
    return [mean, gap, _tested(model, KL, cell, base)]


def _tested(model: Model, task: str, cell: Cell, base: Cell) -> str:
    """Contexts in which a cell is better and worse, and p of the exact sign test.

    With too few contexts no difference could show.
    """
    if len({group for _, group in model["samples"][task]}) < MIN_CONTEXTS:
        return MISSING
    test: Comparison = compared(model, task, cell, base)
    return f"{test.better}, {test.worse}, {test.p:.2g}"
