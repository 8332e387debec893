"""Segments of a dialogue that are near a question.

EpiCache, appendix B.1, the "RAG-like approach".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_kvplugins.episodes.clustering import cluster, similarities
from vllm_kvplugins.episodes.encoder import Encoder, embed
from vllm_kvplugins.episodes.settings import EpisodeSettings


def nearest(
    segments: Iterable[int], similarity: np.ndarray, sizes: Sequence[int], budget: int
) -> list[int]:
    """The segments that are most similar to a question, in the order of the dialogue.

    Takes the most similar ones first. Skips those for which no room is left.

    Args:
        segments: indices to choose from.
        similarity: float32 [K]; cosines of all segments and the question.
        sizes: tokens of all segments.
        budget: maximum number of tokens of all chosen segments.
    """
    chosen = []
    for segment in sorted(segments, key=lambda index: (-similarity[index], index)):
        if sizes[segment] <= budget:
            budget -= sizes[segment]
            chosen.append(segment)
    return sorted(chosen)


class SegmentIndex:
    """Segments of a dialogue with their vectors and episodes.

    Unlike EpiCache, also clusters the last lines, if they do not fill a segment.

    Args:
        lines: one per utterance.
        encoder: of segments and questions.
    """

    def __init__(
        self,
        lines: Sequence[str],
        settings: EpisodeSettings,
        encoder: Encoder,
        count_tokens: Callable[[str], int],
    ) -> None:
        size = settings.segment_utterances
        self._texts = [
            "\n".join(lines[start : start + size])
            for start in range(0, len(lines), size)
        ]
        self._sizes = [count_tokens(text) + 1 for text in self._texts]  # line breaks
        self._encoder = encoder
        self._vectors = embed(encoder, self._texts)
        self._clustering = cluster(self._vectors, settings)

    def near(self, question: str, budget: int, of_episode: bool) -> list[str]:
        """The segments nearest to a question, in the order of the dialogue.

        Args:
            budget: maximum number of tokens.
            of_episode: only segments of the episode with the nearest centroid (eq. 7).
        """
        query = embed(self._encoder, [question])
        (similarity,) = similarities(query, self._vectors)
        segments: Iterable[int] = range(len(self._texts))
        if of_episode:
            episode = similarities(query, self._clustering.centroids).argmax()
            segments = np.flatnonzero(self._clustering.labels == episode).tolist()
        chosen = nearest(segments, similarity, self._sizes, budget)
        return [self._texts[segment] for segment in chosen]
