"""Stage 1 of EpiCache: segments, episodes, medoids, and the guide of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_kvplugins.episodes.encoder import INSTALL
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text
from vllm_kvplugins.errors import KVPolicyError

AUTO_EPISODES = range(2, 9)
_STARTS = 10  # of K-Means; the best one counts


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """Segments in episodes, numbered by their first segments.

    Attributes:
        labels: int64 [K], the episode of each segment.
        centroids: float32 [E, d], means of the members (eq. 6); not of length 1.
        medoids: int64 [E], of each episode the segment closest to its centroid.
        reason: why so many episodes, in words.
    """

    labels: np.ndarray
    centroids: np.ndarray
    medoids: np.ndarray
    reason: str


def segments(utterances: Sequence[Utterance], size: int) -> list[range]:
    """S_1 … S_K of eq. 4: ``size`` utterances each, fewer in the last one.

    Returns:
        Indices into ``utterances``.
    """
    count = len(utterances)
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


def full_segments(utterances: Sequence[Utterance], size: int) -> list[range]:
    """Those with ``size`` utterances; of a shorter history the one that it has."""
    found = segments(utterances, size)
    return [span for span in found if len(span) == size] or found


def similarities(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Cosines of eq. 7.

    Args:
        vectors: float32 [n, d].
        centroids: float32 [E, d]; one of length 0 is like nothing.

    Returns:
        float32 [n, E]. The first largest of a row is the episode.
    """
    cosines: np.ndarray = _unit(vectors) @ _unit(centroids).T
    return cosines


def cluster(embeddings: np.ndarray, settings: EpisodeSettings) -> Clustering:
    """Episodes of a history (eq. 5-6), by K-Means from k-means++.

    Differs from the paper: "auto" takes the number of episodes, from 2 to 8, with the
    best silhouette, the smaller one if two are equal.

    Args:
        embeddings: float32 [K, d], of the segments in their order.

    Returns:
        As many episodes as asked for; fewer if there are fewer different vectors. Same
        input and seed, same result.

    Raises:
        KVPolicyError: scikit-learn is not installed.
        ValueError: no segment.

    Cost: O(10 K E d) per iteration of K-Means; "auto" runs it seven times and compares
    all pairs of segments.
    """
    if embeddings.ndim != 2 or not len(embeddings):
        raise ValueError(f"cannot cluster an array of shape {embeddings.shape}")
    distinct = len(np.unique(embeddings, axis=0))
    if settings.episodes == "auto":
        labels, reason = _best(embeddings, distinct, settings.seed)
    else:
        count = min(settings.episodes, distinct)
        labels = _k_means(embeddings, count, settings.seed)
        reason = f"{settings.episodes} asked for, {distinct} different segments"
    return _clustering(embeddings, labels, reason)


def silhouette(embeddings: np.ndarray, labels: np.ndarray) -> float:
    """Mean silhouette of a clustering, -1 to 1; NaN where it has no meaning.

    It needs two episodes at least, and fewer than there are segments.

    Raises:
        KVPolicyError: scikit-learn is not installed.
    """
    if not 2 <= len(np.unique(labels)) < len(labels):
        return float("nan")
    return float(_scikit().metrics.silhouette_score(embeddings, labels))


def guide_text(
    utterances: Sequence[Utterance],
    segments: Sequence[range],
    medoid: int,
    guide_utterances: int,
) -> str:
    """The patched prompt of an episode: its medoid segment and what stands around it.

    Appendix A.3: "the medoid segment of size 8". Segments of 4 utterances are widened
    on both sides alike, or on one where the history ends; larger ones are cut to their
    middle.

    Returns:
        ``speaker: text`` lines.
    """
    span = segments[medoid]
    size = min(guide_utterances, len(utterances))
    start = span.start - (size - len(span)) // 2
    start = max(0, min(start, len(utterances) - size))
    return dialogue_text(utterances[start : start + size])


def _clustering(embeddings: np.ndarray, labels: np.ndarray, reason: str) -> Clustering:
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(first))[inverse.reshape(-1)]
    members = [np.flatnonzero(labels == e) for e in range(len(first))]
    centroids = np.stack([embeddings[of].mean(0) for of in members])
    cosines = similarities(embeddings, centroids)
    medoids = [of[cosines[of, e].argmax()] for e, of in enumerate(members)]
    found = labels.astype(np.int64), centroids.astype(np.float32), np.array(medoids)
    for array in found:
        array.setflags(write=False)  # threads share them
    return Clustering(*found, reason)


def _best(embeddings: np.ndarray, distinct: int, seed: int) -> tuple[np.ndarray, str]:
    """Labels with the best silhouette, and how it came out."""
    most = min(AUTO_EPISODES[-1], distinct, len(embeddings) - 1)
    if most < AUTO_EPISODES[0]:
        reason = f"auto: {distinct} different segments of {len(embeddings)} are too few"
        return np.zeros(len(embeddings), np.int64), f"{reason} to compare"
    tried = {
        count: _k_means(embeddings, count, seed)
        for count in range(AUTO_EPISODES[0], most + 1)
    }
    scores = {count: silhouette(embeddings, tried[count]) for count in tried}
    best = max(tried, key=lambda count: scores[count])
    return tried[best], f"auto: silhouette {scores[best]:.3f}"


def _k_means(embeddings: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Labels; ``count`` is at most the number of different vectors."""
    if count == 1:
        return np.zeros(len(embeddings), np.int64)
    found = _scikit().cluster.KMeans(
        count, init="k-means++", n_init=_STARTS, random_state=seed
    )
    labels: np.ndarray = found.fit(embeddings.astype(np.float64)).labels_
    return labels


def _scikit() -> Any:
    try:
        import sklearn.cluster
        import sklearn.metrics
    except ModuleNotFoundError as error:
        raise KVPolicyError(
            f"episodes need {error.name}, which is not installed: {INSTALL}"
        ) from error
    return sklearn


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return units
