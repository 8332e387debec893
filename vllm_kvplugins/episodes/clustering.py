"""Clusters a history into episodes (EpiCache, section 3.1, stage 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_kvplugins.episodes.encoder import INSTALL
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text
from vllm_kvplugins.errors import KVPolicyError, coded

AUTO_EPISODES = range(2, 9)
_NUM_STARTS = 10  # K-Means runs this often and keeps the best result


@dataclass(frozen=True, slots=True, eq=False)
class Clustering:
    """Episodes of a history, in the order of their first segments.

    Attributes:
        labels: int64 [K]; the episode of each segment.
        centroids: float32 [E, d]; means of the members (eq. 6), not normalized.
        medoids: int64 [E]; for each episode, the segment closest to its centroid.
        reason: how the number of episodes was determined, for the log.
    """

    labels: np.ndarray
    centroids: np.ndarray
    medoids: np.ndarray
    reason: str


def segments(utterances: Sequence[Utterance], size: int) -> list[range]:
    """Segments S_1 … S_K of eq. 4: ``size`` utterances each, fewer in the last one.

    Returns:
        Indices into ``utterances``.
    """
    count = len(utterances)
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


def full_segments(utterances: Sequence[Utterance], size: int) -> list[range]:
    """Segments of exactly ``size`` utterances; a shorter history is one segment."""
    candidates = segments(utterances, size)
    return [span for span in candidates if len(span) == size] or candidates


def similarities(vectors: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Cosines of eq. 7.

    Args:
        vectors: float32 [n, d].
        centroids: float32 [E, d]; the cosine of a zero vector is 0.

    Returns:
        float32 [n, E]. The first maximum of a row is the episode.
    """
    cosines: np.ndarray = _unit(vectors) @ _unit(centroids).T
    return cosines


def cluster(embeddings: np.ndarray, settings: EpisodeSettings) -> Clustering:
    """Cluster the segments of a history into episodes (eq. 5-6).

    K-Means with k-means++ initialization. Differs from the paper: with "auto", the
    number of episodes is the one from 2 to 8 with the best silhouette; the smaller one
    of two equal ones.

    Args:
        embeddings: float32 [K, d]; one vector per segment, in order.

    Returns:
        ``settings.episodes`` episodes; fewer if there are fewer distinct vectors.
        Deterministic for a seed.

    Raises:
        KVPolicyError: scikit-learn is not installed.
        ValueError: there is no segment.

    Cost: O(10 K E d) per iteration of K-Means. "auto" runs K-Means seven times and
    compares all pairs of segments.
    """
    if embeddings.ndim != 2 or not len(embeddings):
        raise ValueError(f"cannot cluster an array of shape {embeddings.shape}")
    distinct = len(np.unique(embeddings, axis=0))
    if settings.episodes == "auto":
        labels, reason = _best(embeddings, distinct, settings.seed)
    else:
        count = min(settings.episodes, distinct)
        labels = _k_means(embeddings, count, settings.seed)
        reason = f"episodes={settings.episodes}, {distinct} distinct segments"
    return _clustering(embeddings, labels, reason)


def silhouette(embeddings: np.ndarray, labels: np.ndarray) -> float:
    """Mean silhouette of a clustering, from -1 to 1.

    NaN if it is undefined: for a single episode, or if every segment is an episode.

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
    """Patched prompt of an episode: its medoid segment with the text around it.

    Appendix A.3: "the medoid segment of size 8". A segment of 4 utterances is extended
    equally on both sides; at an end of the history, on the other side. A larger segment
    is cut to its middle.

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
    arrays = labels.astype(np.int64), centroids.astype(np.float32), np.array(medoids)
    for array in arrays:
        array.setflags(write=False)  # threads share them
    return Clustering(*arrays, reason)


def _best(embeddings: np.ndarray, distinct: int, seed: int) -> tuple[np.ndarray, str]:
    """Labels with the best silhouette, and the reason for the log."""
    max_episodes = min(AUTO_EPISODES[-1], distinct, len(embeddings) - 1)
    if max_episodes < AUTO_EPISODES[0]:
        labels = np.zeros(len(embeddings), np.int64)
        return labels, (
            f"auto: {distinct} distinct segments of {len(embeddings)} are too few"
        )
    candidates = {
        count: _k_means(embeddings, count, seed)
        for count in range(AUTO_EPISODES[0], max_episodes + 1)
    }
    scores = {
        count: silhouette(embeddings, labels) for count, labels in candidates.items()
    }
    best = max(candidates, key=lambda count: scores[count])
    return candidates[best], f"auto: silhouette {scores[best]:.3f}"


def _k_means(embeddings: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Labels; ``count`` is at most the number of distinct vectors."""
    if count == 1:
        return np.zeros(len(embeddings), np.int64)
    k_means = _scikit().cluster.KMeans(
        count, init="k-means++", n_init=_NUM_STARTS, random_state=seed
    )
    labels: np.ndarray = k_means.fit(embeddings.astype(np.float64)).labels_
    return labels


def _scikit() -> Any:
    try:
        import sklearn.cluster
        import sklearn.metrics
    except ModuleNotFoundError as error:
        raise KVPolicyError(
            coded(
                "KVP032",
                f"episodes need {error.name}, which is not installed; run {INSTALL}",
            )
        ) from error
    return sklearn


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return units
