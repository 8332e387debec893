"""The plot of ``kvplugins plot retention``, and the file that it is drawn from.

``benchmarks/quality/retention.py`` writes the file. Only drawing needs matplotlib.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.errors import KVPolicyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT, VERSION = "kvplugins-retention", 1
# Text stays text, and the same file gives the same picture.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
# Okabe and Ito's, with marks and lines of their own: apart also in grey.
_LOOKS = {"flowkv": ("#0072B2", "o", "-"), "nested": ("#D55E00", "s", "--")}
_NAMES = {"flowkv": "FlowKV", "nested": "nested baseline"}
_MODEL = "0.35"
_PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class Run:
    """One dialogue under one strategy.

    Attributes:
        strategy: ``flowkv`` or ``nested``.
        dialogue: which one.
        shares: after turn 1, 2 and so on, how much of the attention that the last
            question pays to turn 1 is still covered.
    """

    strategy: str
    dialogue: int
    shares: list[float]


@dataclass(frozen=True, slots=True)
class Retention:
    """A file's contents: all runs of one policy.

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
        """As many as all runs have."""
        return min(len(run.shares) for run in self.runs)

    def shares(self, strategy: str) -> list[list[float]]:
        """Of each dialogue."""
        return [run.shares for run in self.runs if run.strategy == strategy]

    def mean(self, strategy: str) -> list[float]:
        """Per turn, over dialogues."""
        found = self.shares(strategy)
        return [sum(s[t] for s in found) / len(found) for t in range(self.turns)]

    def modelled(self, strategy: str) -> list[float]:
        """Appendix C: what turn 1 left stays, or is left of what is there each time."""
        r = self.mean("flowkv")[0]
        again = 1 if strategy == "nested" else 0
        return [r ** (1 + again * turn) for turn in range(self.turns)]


def write_retention(retention: Retention, path: Path) -> None:
    """Write a file for ``read_retention``."""
    header = {"format": FORMAT, "version": VERSION}
    path.write_text(json.dumps(header | asdict(retention), indent=1) + "\n")


def read_retention(path: Path) -> Retention:
    """Read what ``write_retention`` wrote.

    Raises:
        KVPolicyError: no such file, another kind of file, another version, or one
            that lacks something.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KVPolicyError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise KVPolicyError(_foreign(path)) from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise KVPolicyError(_foreign(path))
    if (version := found.pop("version", None)) != VERSION:
        raise KVPolicyError(
            f"{path} has version {version!r} of the format, this program reads "
            f"{VERSION}; measure again"
        )
    try:
        found["runs"] = [Run(**run) for run in found["runs"]]
        read = Retention(**found)
        complete = all(read.mean(strategy) for strategy in _LOOKS)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise KVPolicyError(
            f"{path} lacks a part of what {FORMAT} holds ({error}); measure again"
        ) from error
    if not complete:
        raise KVPolicyError(f"{path} has runs without turns; measure longer dialogues")
    return read


def _foreign(path: Path) -> str:
    return f"{path} is not a file of benchmarks/quality/retention.py"


def draw(retention: Retention, path: Path) -> None:
    """Retention by turn: each dialogue, the means, and the models of appendix C.

    Args:
        path: its suffix says which format; SVG and PNG are meant.

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
            xlabel="turns that are over",
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
    """The mean of a strategy, and the range of its dialogues."""
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
    """Appendix C: r after every turn against r^t, with the r of turn 1."""
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
