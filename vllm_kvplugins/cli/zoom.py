"""The plot of ``research plot zoom``: share of zoomed spans by layer and head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_kvplugins.routers.files import RouterFacts

# Text stays text in SVG, and equal input gives an equal file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
_COLOURS = "viridis"  # perceptually uniform, safe for the colour-blind
_PNG_DPI = 150


def draw(facts: RouterFacts, path: Path) -> None:
    """Draw the share of spans that each query head zooms into (SeKV, figures 5, 6).

    Args:
        facts: of a router; its report has the shares on held-out texts.
        path: ends in .svg or .png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display
    from matplotlib.ticker import MaxNLocator

    report = facts.report
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        axes = figure.subplots()
        columns = [list(column) for column in zip(*report.zoom_rate, strict=True)]
        image = axes.imshow(
            columns, cmap=_COLOURS, vmin=0, vmax=1, aspect="auto", origin="lower"
        )
        bar = figure.colorbar(image, ax=axes)
        bar.set_label("share of spans seen token by token")
        axes.set(xlabel="layer", ylabel="query head")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        title = (
            f"Zoom-in of {facts.model} on held-out texts, "
            f"{report.zoomed['router']:.0%} of all spans"
        )
        axes.set_title(title.replace("$", r"\$"), fontsize=9)  # no formulas
        figure.savefig(
            path,
            dpi=_PNG_DPI,
            metadata={"Date": None} if path.suffix.lower() == ".svg" else {},
        )
