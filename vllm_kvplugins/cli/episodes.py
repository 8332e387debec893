"""The plot of ``kvplugins plot episodes``. Only drawing itself needs matplotlib."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvplugins.episodes.clustering import cluster, full_segments, silhouette
from vllm_kvplugins.episodes.encoder import Encoder, embed
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text
from vllm_kvplugins.errors import KVPolicyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Text stays text, and the same history gives the same file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
# Okabe and Ito's, with marks of their own: apart also in grey.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#F0E442",
    "#000000",
)
_MARKS = "osD^vPX*"
_LEAST = 4  # segments that a map of neighbours needs
_NEIGHBOURS = 30  # t-SNE's perplexity, or a third of the segments
_WIDTH, _LINES = 58, 4  # of a medoid's text beside the plot
_PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class EpisodeMap:
    """A history's segments in the plane.

    Attributes:
        utterances: how many the history has.
        points: float [K, 2].
        labels: int [K], episodes.
        medoids: int [E], segments.
        texts: of the medoids.
        silhouette: of the embeddings, not of the plane; NaN for one episode.
        encoder: its name.
    """

    utterances: int
    points: np.ndarray
    labels: np.ndarray
    medoids: np.ndarray
    texts: tuple[str, ...]
    silhouette: float
    encoder: str


def episode_map(
    history: Sequence[Utterance], settings: EpisodeSettings, encoder: Encoder
) -> EpisodeMap:
    """Cluster a history and lay its segments out by t-SNE.

    EpiCache, figure A3.

    Raises:
        KVPolicyError: too few different segments, a library is missing, or the encoder
            fails.
    """
    spans = full_segments(history, settings.segment_utterances)
    texts = [dialogue_text(history[span.start : span.stop]) for span in spans]
    if len(set(texts)) < _LEAST:
        raise KVPolicyError(
            f"{len(history)} utterances have {len(set(texts))} different segments of "
            f"{settings.segment_utterances}, a plot needs {_LEAST}; take a longer "
            "history or a smaller --segment-utterances"
        )
    embeddings = embed(encoder, texts)
    found = cluster(embeddings, settings)
    return EpisodeMap(
        len(history),
        _plane(embeddings, settings.seed),
        found.labels,
        found.medoids,
        tuple(texts[medoid] for medoid in found.medoids),
        silhouette(embeddings, found.labels),
        settings.encoder,
    )


def _plane(embeddings: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE  # there since it clustered

    perplexity = min(_NEIGHBOURS, (len(embeddings) - 1) / 3)
    layout = TSNE(perplexity=perplexity, init="random", random_state=seed)
    points: np.ndarray = layout.fit_transform(embeddings)
    return points


def draw(found: EpisodeMap, path: Path) -> None:
    """Segments by episode, and beside them what the medoids say.

    Args:
        path: its suffix says which format; SVG and PNG are meant.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # a picture in a message is not in every font
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        height = max(4.4, 0.3 + 0.2 * (_LINES + 2) * len(found.medoids))
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        for episode in range(len(found.medoids)):
            _episode(axes, found, episode)
        axes.set(xticks=[], yticks=[], xlabel="t-SNE of segments, stars: medoids")
        axes.set_title(_title(found), fontsize=9)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(
            path,
            dpi=_PNG_DPI,
            metadata={"Date": None} if path.suffix.lower() == ".svg" else {},
        )


def _episode(axes: Axes, found: EpisodeMap, episode: int) -> None:
    """Its segments, its medoid, and its line of the legend."""
    colour = _COLOURS[episode % len(_COLOURS)]
    members = found.points[found.labels == episode]
    axes.scatter(
        members[:, 0],
        members[:, 1],
        s=26,
        color=colour,
        marker=_MARKS[episode % len(_MARKS)],
        edgecolors="white",
        linewidths=0.4,
        label=_caption(episode, len(members), found.texts[episode]),
    )
    x, y = found.points[found.medoids[episode]]
    axes.scatter(x, y, s=240, marker="*", color=colour, edgecolors="black")


def _caption(episode: int, segments: int, text: str) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        shown = "".join(c if c.isprintable() else " " for c in line)
        shown = " ".join(shown.split())
        lines += textwrap.wrap(shown, _WIDTH, max_lines=2, placeholder=" …")
    if len(lines) > _LINES:
        lines = [*lines[: _LINES - 1], f"{lines[_LINES - 1].removesuffix(' …')} …"]
    head = f"episode {episode}, {segments} segment{'s' * (segments != 1)}"
    # a dollar would start a formula
    return "\n".join([head, *lines]).replace("$", r"\$")


def _title(found: EpisodeMap) -> str:
    counts = (
        f"{found.utterances} utterances, {len(found.labels)} segments, "
        f"{len(found.medoids)} episodes"
    )
    made = f"by {found.encoder}"
    if not np.isnan(found.silhouette):
        made += f"  ·  silhouette {found.silhouette:.2f}"
    return f"{counts}\n{made}".replace("$", r"\$")
