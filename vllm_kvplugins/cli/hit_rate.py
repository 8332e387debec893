"""The plot of ``kvplugins research plot hit-rate``. Only drawing needs matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvplugins.engine.recorded_run import Header, RecordedRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Text stays text in SVG, and equal input gives an equal file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
_COLOURS = "viridis"  # perceptually uniform, safe for the colour-blind
_KEEPS_ALL = "0.85"
# Okabe and Ito's colours; line styles differ too, for grey prints.
_BLUE, _ORANGE = "#0072B2", "#D55E00"
_PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class Grids:
    """Means over requests; NaN for a layer that did not retrieve in a step.

    Attributes:
        pages: [layers, steps], fetched tokens per KV head, in pages.
        hot_pages: [layers, steps], hot slots per KV head, in pages.
        mass: [layers, steps], covered share of the attention.
    """

    pages: np.ndarray
    hot_pages: np.ndarray
    mass: np.ndarray

    @property
    def fetched_share(self) -> np.ndarray:
        """[steps], fetched share of the hot slots of all retrieving layers."""
        share: np.ndarray = np.nansum(self.pages, 0) / np.nansum(self.hot_pages, 0)
        return share

    @property
    def mean_mass(self) -> np.ndarray:
        """[steps], mean over retrieving layers."""
        mean: np.ndarray = np.nanmean(self.mass, 0)
        return mean


def grids_of(run: RecordedRun) -> Grids:
    """Arrange a run on a grid of layers and steps."""
    header = run.header
    steps = 1 + max(fetch.step for fetch in run.fetches)
    sums = np.zeros((3, header.num_layers, steps))
    counts = np.zeros((header.num_layers, steps))
    for fetch in run.fetches:
        sums[:, fetch.layer, fetch.step] += (
            fetch.fetched_tokens,
            fetch.hot_tokens,
            fetch.mass_covered_share,
        )
        counts[fetch.layer, fetch.step] += 1
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    page = header.num_kv_heads * header.block_size
    return Grids(means[0] / page, means[1] / page, means[2])


def draw(run: RecordedRun, path: Path) -> None:
    """Draw two heat maps over layers and steps, and their means per step.

    Args:
        path: ends in .svg or .png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display

    grids, header = grids_of(run), run.header
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(9, 7.6), layout="constrained")
        figure.suptitle(_title(run), fontsize=10)
        fetched, mass, means = figure.subplots(
            3, 1, sharex=True, height_ratios=[3, 3, 1.5]
        )
        low, high = np.nanmin(grids.hot_pages), np.nanmax(grids.hot_pages)
        hot = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
        _heat_map(
            figure,
            fetched,
            grids.pages,
            # With a scale up to all hot slots, few fetched pages would be invisible.
            float(np.nanmax(grids.pages)) or 1.0,
            f"Tokens fetched per KV head, in pages of {header.block_size}",
            f"pages (hot slots: {hot})",
        )
        _heat_map(
            figure,
            mass,
            grids.mass,
            1.0,
            "Mass covered: share of the attention over offloaded tokens on hot ones",
            "share",
        )
        _lines(means, grids)
        figure.savefig(
            path,
            dpi=_PNG_DPI,
            metadata={"Date": None} if path.suffix.lower() == ".svg" else {},
        )


def _title(run: RecordedRun) -> str:
    header = run.header
    requests = len({fetch.request for fetch in run.fetches})
    idle = header.num_layers - len({fetch.layer for fetch in run.fetches})
    lines = [
        f"{header.policy}, budget {_budget(header)}  ·  {Path(header.model).name}  ·  "
        f"{header.prompt_tokens} prompt tokens"
    ]
    if requests > 1:
        lines.append(f"mean of {requests} requests")
    if idle:
        lines.append(f"grey: the {idle} layers that keep everything resident")
    # a dollar would start a formula
    return "\n".join(lines).replace("$", r"\$")


def _budget(header: Header) -> str:
    budget = header.config.get("budget", "unknown")
    if isinstance(budget, int):
        return f"{budget} tokens per KV head"
    return f"{budget:.3g} of the prompt" if isinstance(budget, float) else str(budget)


def _heat_map(
    figure: Figure,
    axes: Axes,
    values: np.ndarray,
    maximum: float,
    title: str,
    unit: str,
) -> None:
    """Draw one grid; layers that keep all tokens are grey."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    # imshow, so that an SVG contains one image instead of a path per cell
    image = axes.imshow(
        values,
        cmap=colormaps[_COLOURS].with_extremes(bad=_KEEPS_ALL),
        vmin=0,
        vmax=maximum,
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )
    axes.set_title(title, fontsize=9)
    axes.set_ylabel("layer")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label=unit, pad=0.01)


def _lines(axes: Axes, grids: Grids) -> None:
    """Draw the fetched and the covered share of all layers, per step."""
    from matplotlib.ticker import MaxNLocator

    steps = np.arange(len(grids.mean_mass))
    dot = "." if len(steps) < 2 else ""
    axes.plot(
        steps,
        grids.mean_mass,
        color=_BLUE,
        marker=dot,
        label="mass covered, mean over layers",
    )
    axes.plot(
        steps,
        grids.fetched_share,
        color=_ORANGE,
        linestyle="--",
        marker=dot,
        label="fetched, of all hot slots",
    )
    axes.set(ylim=(0, 1.02), ylabel="share", xlabel="decode step")
    axes.set_title("All layers together", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", ncols=2, frameon=False)
