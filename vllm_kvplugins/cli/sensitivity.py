"""The plot of ``kvplugins research plot sensitivity``: similarity and budgets by layer.

Only drawing needs matplotlib, and only the allocator needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.budgets.sensitivity_profile import SensitivityProfile
from vllm_kvplugins.errors import KVPolicyError, coded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Text stays text in SVG, and equal input gives an equal file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
# Okabe and Ito's colours; marks and line styles differ too, for grey prints.
_LOOKS = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
)
_EQUAL = "0.35"
_PNG_DPI = 150


def check_count(profiles: list[SensitivityProfile]) -> None:
    """Refuse more profiles than there are line styles.

    Raises:
        KVPolicyError: there are too many profiles.
    """
    if len(profiles) > len(_LOOKS):
        raise KVPolicyError(
            coded(
                "KVP606",
                f"{len(profiles)} profiles are too many for one plot; give at most "
                f"{len(_LOOKS)}",
            )
        )


def layer_tokens(
    profile: SensitivityProfile, path: Path, budget: int, block_size: int, alpha: float
) -> list[float]:
    """Tokens per KV head that the allocator gives each layer of a long prompt.

    Args:
        path: of the profile.
        budget: M, mean tokens per KV head, rounded up to whole pages.
        block_size: tokens per page.
        alpha: setting of the allocator.
    """
    import torch

    from vllm_kvplugins.budgets import Sensitivity

    allocator = Sensitivity(profile=path, alpha=alpha, heads="uniform")
    layers, heads = profile.fingerprint.num_layers, profile.fingerprint.num_kv_heads
    pages = -(-budget // block_size)
    scores = torch.zeros(layers, heads, 1)  # equal scores: no token is required
    available = torch.full((layers, heads), pages * layers)
    counts = allocator.allocate(scores, pages, block_size, available)
    return [float(row.double().mean()) * block_size for row in counts]


def draw(
    profiles: list[SensitivityProfile],
    tokens: list[list[float]],
    title: str,
    path: Path,
) -> None:
    """Draw key similarity (as in EpiCache's figure 4a) and budgets by layer.

    Args:
        tokens: per profile, tokens per KV head of each layer.
        title: of the lower plot.
        path: ends in .svg or .png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.5, 6.4), layout="constrained")
        similarity, budgets = figure.subplots(2, 1, sharex=True)
        for profile, given, look in zip(profiles, tokens, _LOOKS, strict=False):
            _similarity(similarity, profile, look)
            _budgets(budgets, profile, given, look)
        similarity.set(ylabel="mean cosine of keys")
        similarity.set_title(
            "Keys under sinks and recent tokens against full attention", fontsize=9
        )
        similarity.legend(loc="best", frameon=False)
        equal = sum(tokens[0]) / len(tokens[0])
        budgets.axhline(equal, color=_EQUAL, linewidth=1, linestyle=":")
        budgets.set(ylabel="tokens per KV head", xlabel="layer, 0 to 1", ylim=(0, None))
        budgets.set_title(title, fontsize=9)
        for axes in (similarity, budgets):
            axes.grid(alpha=0.3)
        figure.savefig(
            path,
            dpi=_PNG_DPI,
            metadata={"Date": None} if path.suffix.lower() == ".svg" else {},
        )


def _places(profile: SensitivityProfile) -> list[float]:
    """Layer indices scaled to [0, 1], to compare models of different depth."""
    last = max(len(profile.sensitivity) - 1, 1)
    return [layer / last for layer in range(len(profile.sensitivity))]


def _similarity(
    axes: Axes, profile: SensitivityProfile, look: tuple[str, str, str]
) -> None:
    """Draw the mean over documents and their range."""
    colour, mark, line = look
    columns = list(zip(*(d.sensitivity for d in profile.documents), strict=True))
    axes.fill_between(
        _places(profile),
        [1 - max(column) for column in columns],
        [1 - min(column) for column in columns],
        color=colour,
        alpha=0.2,
        linewidth=0,
    )
    count = len(profile.documents)
    spread = f"mean and range of {count} documents" if count > 1 else "1 document"
    settings = profile.settings
    axes.plot(
        _places(profile),
        [1 - value for value in profile.sensitivity],
        color=colour,
        marker=mark,
        linestyle=line,
        markersize=4,
        label=_escaped(f"{profile.model}, M = {settings.budget}, {spread}"),
    )


def _budgets(
    axes: Axes,
    profile: SensitivityProfile,
    tokens: list[float],
    look: tuple[str, str, str],
) -> None:
    colour, _, line = look
    axes.step(
        _places(profile),
        tokens,
        where="mid",
        color=colour,
        linestyle=line,
        linewidth=1.5,
    )


def _escaped(text: str) -> str:
    return text.replace("$", r"\$")  # a dollar would start a formula
