"""A table of scores on tasks that no policy was chosen by, as shares of stock's."""

from __future__ import annotations

from collections.abc import Iterator

from _evidence_auto import SHARE, share_of_stock
from _evidence_report import (
    MIB,
    MISSING,
    OTHER_TITLES,
    Cell,
    Model,
    name_of,
    table,
    title_of,
)
from _quality_stats import STOCK


def other_tasks(model: Model) -> str:
    """Markdown: a policy per line, stock vLLM first, then the best policy."""
    tasks = [task for task in OTHER_TITLES if model["samples"].get(task)]
    cells = [cell for cell in model["cells"] if all(task in cell for task in tasks)]
    cells.sort(key=lambda cell: (name_of(cell) != STOCK, -_mean(cell, tasks)))
    head = ["policy", *map(title_of, tasks), "mean", "mean / stock's", "device MiB"]
    return "\n".join(table(head, [list(_row(model, c, tasks)) for c in cells]))


def _mean(cell: Cell, tasks: list[str]) -> float:
    return float(sum(cell[task]["mean"] for task in tasks) / len(tasks))


def _row(model: Model, cell: Cell, tasks: list[str]) -> Iterator[str]:
    yield f"`{cell['label']}`"
    yield from (f"{cell[task]['mean']:.2f}" for task in tasks)
    yield f"{_mean(cell, tasks):.2f}"
    if cell["share"] == SHARE:
        share, low, high = share_of_stock(model, [name_of(cell)] * 2, tasks)
        yield f"{share:.0%} ({low:.0%} to {high:.0%})"
    else:
        yield MISSING
    yield f"{cell['device_bytes'] / MIB:.2f}"
