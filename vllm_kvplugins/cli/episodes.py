"""The plot of ``kvplugins research plot episodes``. Only drawing needs matplotlib."""

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
from vllm_kvplugins.errors import KVPolicyError, coded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Text stays text in SVG, and equal input gives an equal file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kvp", "font.size": 9}
# Okabe and Ito's colours; marks differ too, for grey prints.
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
_MIN_SEGMENTS = 4  # t-SNE needs neighbours
_NEIGHBOURS = 30  # perplexity of t-SNE; at most a third of the segments
_WIDTH, _LINES = 58, 4  # of the text of a medoid in the legend
_PNG_DPI = 150


@dataclass(frozen=True, slots=True)
class EpisodeMap:
    """The segments of a history in the plane.

    Attributes:
        utterances: number of utterances in the history.
        points: float [K, 2].
        labels: int [K], episode of each segment.
        medoids: int [E], segment of each medoid.
        texts: of the medoids.
        silhouette: of the embeddings, not of the points; NaN for one episode.
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
    """Cluster a history and place its segments with t-SNE (EpiCache, figure A3).

    Raises:
        KVPolicyError: there are too few different segments, a library is missing, or
            the encoder fails.
    """
    spans = full_segments(history, settings.segment_utterances)
    texts = [dialogue_text(history[span.start : span.stop]) for span in spans]
    if len(set(texts)) < _MIN_SEGMENTS:
        raise KVPolicyError(
            coded(
                "KVP606",
                f"{len(history)} utterances have {len(set(texts))} different segments "
                f"of {settings.segment_utterances}, a plot needs {_MIN_SEGMENTS}; give "
                "a longer history or a smaller --segment-utterances",
            )
        )
    embeddings = embed(encoder, texts)
    clusters = cluster(embeddings, settings)
    return EpisodeMap(
        len(history),
        _plane(embeddings, settings.seed),
        clusters.labels,
        clusters.medoids,
        tuple(texts[medoid] for medoid in clusters.medoids),
        silhouette(embeddings, clusters.labels),
        settings.encoder,
    )


def _plane(embeddings: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE  # installed: clustering needs it

    perplexity = min(_NEIGHBOURS, (len(embeddings) - 1) / 3)
    layout = TSNE(perplexity=perplexity, init="random", random_state=seed)
    points: np.ndarray = layout.fit_transform(embeddings)
    return points


def draw(segments: EpisodeMap, path: Path) -> None:
    """Draw the segments by episode, with the texts of the medoids in the legend.

    Args:
        path: ends in .svg or .png.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: needs no display

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # emojis are not in every font
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        height = max(4.4, 0.3 + 0.2 * (_LINES + 2) * len(segments.medoids))
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots()
        for episode in range(len(segments.medoids)):
            _episode(axes, segments, episode)
        axes.set(xticks=[], yticks=[], xlabel="t-SNE of segments, stars: medoids")
        axes.set_title(_title(segments), fontsize=9)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
        figure.savefig(
            path,
            dpi=_PNG_DPI,
            metadata={"Date": None} if path.suffix.lower() == ".svg" else {},
        )


def _episode(axes: Axes, segments: EpisodeMap, episode: int) -> None:
    """Draw the segments and the medoid of an episode, with a legend entry."""
    colour = _COLOURS[episode % len(_COLOURS)]
    members = segments.points[segments.labels == episode]
    axes.scatter(
        members[:, 0],
        members[:, 1],
        s=26,
        color=colour,
        marker=_MARKS[episode % len(_MARKS)],
        edgecolors="white",
        linewidths=0.4,
        label=_caption(episode, len(members), segments.texts[episode]),
    )
    x, y = segments.points[segments.medoids[episode]]
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


def _title(segments: EpisodeMap) -> str:
    counts = (
        f"{segments.utterances} utterances, {len(segments.labels)} segments, "
        f"{len(segments.medoids)} episodes"
    )
    made = f"by {segments.encoder}"
    if not np.isnan(segments.silhouette):
        made += f"  ·  silhouette {segments.silhouette:.2f}"
    return f"{counts}\n{made}".replace("$", r"\$")
