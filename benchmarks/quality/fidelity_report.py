"""Table and plot of the output of ``fidelity.py --json-out``.

    python benchmarks/quality/fidelity_report.py FILE... --svg docs/img/fidelity.svg

Combines the rows of several files; the plot needs matplotlib.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer

Rows = list[dict[str, Any]]
# Okabe-Ito colours, which are safe for colour blindness
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
CONTROL = "random"
FIGURES = {"kl": "KL", "top1": "top-1", "error_alone": "error alone"}
FIGURES |= {"error_in_model": "error in model"}


def read(files: list[Path]) -> Rows:
    """All rows; a later row for the same policy, budget and document replaces an
    earlier.
    """
    means: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in files:
        for row in json.loads(file.read_text())["rows"]:
            means[row["policy"], row["budget"], row["document"]] = row
    return list(means.values())


def mean(rows: Rows, figure: str) -> float:
    return statistics.mean(row[figure] for row in rows)


def by_policy(rows: Rows, budget: float, figure: str = "kl") -> dict[str, Rows]:
    """Rows of every policy at a budget, lowest ``figure`` first."""
    groups: dict[str, Rows] = {}
    for row in rows:
        if row["budget"] == budget:
            groups.setdefault(row["policy"], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: mean(item[1], figure)))


def markdown(rows: Rows, budget: float) -> str:
    """One table: means and standard deviations over documents."""
    lines = ["| policy | " + " | ".join(FIGURES.values()) + " |"]
    lines.append("|---|" + "---|" * len(FIGURES))
    for policy, policy_rows in by_policy(rows, budget).items():
        cells = []
        for figure in FIGURES:
            deviation = statistics.stdev(row[figure] for row in policy_rows)
            cells.append(f"{mean(policy_rows, figure):.3f} ± {deviation:.3f}")
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def overview(rows: Rows, budgets: list[float], figure: str) -> str:
    """One metric at all budgets, sorted by the second budget."""
    lines = ["| policy | " + " | ".join(f"{b:.0%}" for b in budgets) + " |"]
    lines.append("|---|" + "---|" * len(budgets))
    for policy in by_policy(rows, budgets[1], figure):
        groups = [by_policy(rows, budget)[policy] for budget in budgets]
        cells = [f"{mean(group, figure):.3f}" for group in groups]
        lines.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Rows, budgets: list[float], svg: Path) -> None:
    """KL and attention error over the budget, a line per policy."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    titles = {"kl": "KL from full KV (nats per token)"}
    titles |= {"error_alone": "attention error of a layer alone"}
    policies = [name for name in by_policy(rows, budgets[1]) if " " not in name]
    scored = [name for name in policies if name != CONTROL]
    for axis, (what, title) in zip(axes, titles.items(), strict=True):
        for index, policy in enumerate(scored):
            heights = [mean(by_policy(rows, b)[policy], what) for b in budgets]
            axis.plot(
                budgets,
                heights,
                color=COLOURS[index % 7],
                marker=MARKERS[index % 7],
                linestyle="-" if index < 7 else ":",
                markersize=5,
                linewidth=1.2,
                label=policy,
            )
        heights = [mean(by_policy(rows, b)[CONTROL], what) for b in budgets]
        axis.plot(budgets, heights, "--", color="0.6", label=f"{CONTROL} (control)")
        axis.set(xscale="log", yscale="log", title=title, xlabel="kept of the prompt")
        axis.set_xticks(budgets, [f"{b:.0%}" for b in budgets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    svg.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(svg, metadata={"Date": None})


def main(
    files: list[Path],
    svg: Annotated[Path | None, typer.Option(help="file to plot to")] = None,
) -> None:
    """Print Markdown tables of FILES, and plot them."""
    rows = read(files)
    budgets = sorted({row["budget"] for row in rows})
    for figure, title in FIGURES.items():
        print(f"{title}\n\n{overview(rows, budgets, figure)}\n")
    for budget in budgets:
        print(f"{budget:.0%}\n\n{markdown(rows, budget)}\n")
    for commit in dict.fromkeys(f"{r['commit']}: {r['command']}" for r in rows):
        print(commit)
    if svg:
        draw(rows, budgets, svg)


if __name__ == "__main__":
    typer.run(main)
