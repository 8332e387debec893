"""The plot of ``kvplugins research plot retention``, and its input file.

``benchmarks/quality/retention.py`` writes the file. Only drawing needs matplotlib.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.errors import KVPolicyError, coded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT, VERSION = "kvplugins-retention", 1
# Text stays text in SVG, and equal input gives an equal file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
# Okabe and Ito's colours; marks and line styles differ too, for grey prints.
_LOOKS = {"flowkv": ("#0072B2", "o", "-"), "nested": ("#D55E00", "s", "--")}
_NAMES = {"flowkv": "FlowKV", "nested": "nested baseline"}
_MODEL = "0.35"
_PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class Run:
    """One dialogue under one strategy.

    Attributes:
        strategy: ``flowkv`` or ``nested``.
        dialogue: its index.
        shares: after turns 1, 2, ..., the share of the attention of the last question
            to turn 1 that falls on tokens still kept.
    """

    strategy: str
    dialogue: int
    shares: list[float]


@dataclass(frozen=True, slots=True)
class Retention:
    """The contents of a file: all runs of one policy.

    Attributes:
        policy: its settings without ``nested``.
        source: machine, commit and command.
    """

    model: str
    policy: dict[str, Any]
    block_size: int
    runs: list[Run]
    source: dict[str, str]

    @property
    def turns(self) -> int:
        """Number of turns that all runs have."""
        return min(len(run.shares) for run in self.runs)

    def shares(self, strategy: str) -> list[list[float]]:
        """Shares of each dialogue under one strategy."""
        return [run.shares for run in self.runs if run.strategy == strategy]

    def mean(self, strategy: str) -> list[float]:
        """Mean share per turn, over dialogues."""
        shares = self.shares(strategy)
        return [sum(s[t] for s in shares) / len(shares) for t in range(self.turns)]

    def modelled(self, strategy: str) -> list[float]:
        """Appendix C: retention stays at r, or falls as r^t for the nested baseline."""
        r = self.mean("flowkv")[0]
        repeated = 1 if strategy == "nested" else 0
        return [r ** (1 + repeated * turn) for turn in range(self.turns)]


def write_retention(retention: Retention, path: Path) -> None:
    """Write a file for ``read_retention``."""
    header = {"format": FORMAT, "version": VERSION}
    path.write_text(json.dumps(header | asdict(retention), indent=1) + "\n")


def read_retention(path: Path) -> Retention:
    """Read a file of ``write_retention``.

    Raises:
        KVPolicyError: the file is missing, incomplete, or of another kind or version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KVPolicyError(
            coded(
                "KVP601",
                f"cannot read {path}: {error.strerror}; give a file of "
                "benchmarks/quality/retention.py",
            )
        ) from error
    except ValueError as error:
        raise KVPolicyError(_foreign(path)) from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise KVPolicyError(_foreign(path))
    if (version := content.pop("version", None)) != VERSION:
        raise KVPolicyError(
            coded(
                "KVP607",
                f"{path} has version {version!r} of the format, this program reads "
                f"version {VERSION}; measure again",
            )
        )
    try:
        content["runs"] = [Run(**run) for run in content["runs"]]
        retention = Retention(**content)
        is_complete = all(retention.mean(strategy) for strategy in _LOOKS)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise KVPolicyError(
            coded("KVP607", f"{path} is incomplete ({error}); measure again")
        ) from error
    if not is_complete:
        raise KVPolicyError(
            coded("KVP606", f"{path} has runs without turns; measure longer dialogues")
        )
    return retention


def _foreign(path: Path) -> str:
    message = (
        f"{path} was not written by benchmarks/quality/retention.py; give a file of "
        "that benchmark"
    )
    return coded("KVP607", message)


def draw(retention: Retention, path: Path) -> None:
    """Draw retention by turn: means and ranges, and the models of appendix C.

    Args:
        path: ends in .svg or .png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display
    from matplotlib.ticker import MaxNLocator

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        axes = figure.subplots()
        turns = list(range(1, retention.turns + 1))
        for strategy in _LOOKS:
            _runs(axes, retention, strategy, turns)
        _models(axes, retention, turns)
        axes.set(
            ylim=(0, 1.02),
            xlabel="finished turns",
            ylabel="attention to turn 1 still covered",
        )
        axes.set_title(_title(retention), fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.legend(loc="best", frameon=False)
        figure.savefig(
            path,
            dpi=_PNG_DPI,
            metadata={"Date": None} if path.suffix.lower() == ".svg" else {},
        )


def _runs(axes: Axes, retention: Retention, strategy: str, turns: list[int]) -> None:
    """Draw the mean of a strategy and the range of its dialogues."""
    colour, mark, line = _LOOKS[strategy]
    dialogues = len(retention.shares(strategy))
    columns = list(zip(*retention.shares(strategy), strict=False))[: len(turns)]
    axes.fill_between(
        turns,
        [min(column) for column in columns],
        [max(column) for column in columns],
        color=colour,
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(
        turns,
        retention.mean(strategy),
        color=colour,
        marker=mark,
        linestyle=line,
        label=f"{_NAMES[strategy]}, mean and range of {dialogues}",
    )


def _models(axes: Axes, retention: Retention, turns: list[int]) -> None:
    """Draw the models of appendix C, r and r^t, with the r of turn 1."""
    constant, falling = map(retention.modelled, ("flowkv", "nested"))
    grey: dict[str, Any] = {"color": _MODEL, "linewidth": 1}
    label = f"model: r = {constant[0]:.2f}"
    axes.plot(turns, constant, linestyle=":", label=label, **grey)
    axes.plot(turns, falling, linestyle="-.", label="model: r^t", **grey)


def _title(retention: Retention) -> str:
    policy = retention.policy
    title = (
        f"{policy['base']}, ratio {policy['ratio']}, floor {policy['floor']}  ·  "
        f"{retention.model}"
    )
    return title.replace("$", r"\$")  # a dollar would start a formula
