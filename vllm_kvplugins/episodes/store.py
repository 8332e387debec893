"""What a router needs to find clusterings that another router has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_kvplugins.episodes.clustering import Clustering


@dataclass(frozen=True, slots=True, eq=False)
class ClusteredHistory:
    """The clustering of a history, or of its beginning.

    Attributes:
        guides: patched prompts, by episode.
    """

    clustering: Clustering
    guides: tuple[str, ...]

    @property
    def num_segments(self) -> int:
        """Number of clustered segments."""
        return len(self.clustering.labels)


@dataclass(frozen=True, slots=True, eq=False)
class ClusteringRecord:
    """A clustering, and what identifies its history: what a store saves.

    Attributes:
        digests: of the owner and the history's first 1, 2, … segments; one per
            clustered segment.
    """

    digests: tuple[bytes, ...]
    clustered: ClusteredHistory


class ClusteringStore(Protocol):
    """Clusterings that outlive a router, or that other routers have made."""

    def find(self, digests: Sequence[bytes], shortest: int) -> ClusteredHistory | None:
        """The clustering of the longest known beginning of a history.

        Never raises because of the store, and returns after a limited time.

        Args:
            digests: as in ``ClusteringRecord``, of all segments of the history.
            shortest: do not find clusterings of fewer segments.

        Returns:
            None if there is none, or if the store fails or is slow.
        """
