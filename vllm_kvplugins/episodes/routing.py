"""Routes queries to episodes of conversations that grow."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np

from vllm_kvplugins.episodes.clustering import (
    cluster,
    full_segments,
    guide_text,
    similarities,
)
from vllm_kvplugins.episodes.encoder import Encoder, embed
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.store import (
    ClusteredHistory,
    ClusteringRecord,
    ClusteringStore,
)
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text

logger = logging.getLogger(__name__)

V = TypeVar("V")
_BATCH_SIZE = 32  # texts that a thread embeds before it lets other threads go first
# Capacity of the caches, per conversation on average.
_SEGMENTS_PER_CONVERSATION, _ROUTES_PER_CONVERSATION = 64, 8


@dataclass(frozen=True, slots=True)
class Route:
    """The episode of a query.

    Attributes:
        episode: index of the episode in its clustering.
        guide: patched prompt of the episode, which also identifies its cache.
        similarity: cosine of the query and the episode's centroid.
        guides: guides of all episodes; the one with most embedded segments first.
        switched: whether the guide differs from that of the conversation's last route;
            None for the first route.
        clustered: whether this route clustered the history.
        found: whether this route found the clustering in the store.
        record: the clustering that was used, for the store to save.
        unknown_segments: number of full segments without a vector;
            ``embed_new_segments`` embeds them.
        encode_ms: time in the encoder, including the wait for other threads and, the
            first time, loading.
        match_ms: time of everything else: lookup, also in the store, clustering,
            matching.
    """

    episode: int
    guide: str
    similarity: float
    guides: tuple[str, ...]
    switched: bool | None
    clustered: bool
    found: bool
    record: ClusteringRecord = field(compare=False, repr=False)
    unknown_segments: int
    encode_ms: float
    match_ms: float


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What the router knows about a history.

    Attributes:
        segments: full segments, as indices of utterances.
        digests: of the history's first 1, 2, … utterances.
        base: clustering of the history's longest known beginning; None if there is none
            or the history has grown too much since.
        last_guide: guide of the conversation's last route, if there was one.
    """

    segments: list[range]
    digests: list[bytes]
    base: ClusteredHistory | None
    last_guide: str | None

    def segment_digests(self, count: int) -> tuple[bytes, ...]:
        """Digests of the history's first 1, 2, … ``count`` segments."""
        return tuple(self.digests[span.stop - 1] for span in self.segments[:count])


class EpisodeRouter:
    """Routes queries to episodes of histories that grow.

    EpiCache, section 3.1, stages 1 and 3. Differs from the paper, which clusters a
    history once, offline. Here, new segments join the nearest episode, without changing
    its centroid or guide. When the history has grown by ``recluster_growth``, it is
    clustered again.

    Routing depends only on centroids. A query therefore does not wait until new
    segments are embedded: ``embed_new_segments`` does that later, or the next
    clustering. The last utterances, if they do not fill a segment, belong to no
    episode. A history shorter than a segment is one segment.

    The key of a clustering is its owner and its utterances. A history uses the
    clustering of its longest known beginning. If a client edits an earlier message, the
    new branch uses a clustering from before the edit, and the old branch keeps its own.
    Equal histories and queries get the same episode, until the history is clustered
    again or its clustering is evicted.

    A ``store`` keeps clusterings across restarts and shares them with other routers.
    Without one, a restarted router clusters a history at its current length, which can
    give other guides than before. The router asks the store before it clusters; saving
    is up to the caller (``Route.record``), which knows whether it may.

    Thread-safe. Threads wait for each other only in the encoder, for one batch at most.

    Args:
        encoder_loader: takes ``settings.encoder``. Called once, by the first route or
            by ``load``.
        max_conversations: number of clusterings to keep. The router keeps 64 times as
            many vectors of segments (about 2 KiB each). Evicts the least recently used.
        store: clusterings of earlier and other routers with the same settings and
            encoder; None: none.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        encoder_loader: Callable[[str], Encoder],
        max_conversations: int = 1024,
        store: ClusteringStore | None = None,
    ) -> None:
        if max_conversations < 1:
            raise ValueError(
                f"max_conversations is {max_conversations}; give 1 or more"
            )
        self._settings = settings
        self._store = store
        self._load_encoder = encoder_loader
        self._encoder: Encoder | None = None
        self._encoder_turnstile, self._encoder_lock = Lock(), Lock()
        self._cache_lock = Lock()  # for the three caches; not held while encoding
        self._clusterings = _LRUCache[ClusteredHistory](max_conversations)
        self._vectors = _LRUCache[np.ndarray](
            _SEGMENTS_PER_CONVERSATION * max_conversations
        )
        self._last_guides = _LRUCache[str](_ROUTES_PER_CONVERSATION * max_conversations)

    def load(self) -> None:
        """Load the encoder, so that the first route does not wait for it.

        Raises:
            KVPolicyError: the encoder cannot be loaded.
        """
        with self._encoder_lock:
            self._loaded_encoder()

    def route(
        self,
        owner: str,
        history: Sequence[Utterance],
        query: str,
        asks_store: bool = True,
    ) -> Route | None:
        """Find the episode that a query is about (eq. 7).

        Args:
            owner: owners share neither clusterings nor vectors with each other.
            history: all utterances before the query.
            asks_store: whether to look for a clustering in the store, if the router
                knows none.

        Returns:
            None if the history is empty.

        Raises:
            KVPolicyError: a library is missing, or the encoder failed.

        Cost: embeds the query; if the history is clustered, also all its segments
        without a vector. Computes a digest of the history. May wait for the store.
        """
        if not history:
            return None
        started = perf_counter()
        history = list(history)
        lookup = self._look_up(owner, history)
        base, queries, encode_s = lookup.base, [query], 0.0
        query_vectors = np.empty((0, 0), np.float32)
        if base is None and self._store is not None and asks_store:
            # First, because its length tells whether a clustering is of this encoder.
            encoding = perf_counter()
            query_vectors, queries = self._encode(queries), []
            encode_s += perf_counter() - encoding
            base = self._find(self._store, lookup, query_vectors.shape[1])
        found = base is not None and lookup.base is None
        encoding = perf_counter()
        new_texts = _texts_after(base, history, lookup.segments)
        if base is None:
            vectors, encoded = self._embed(owner, new_texts, queries)
        else:
            keys, cached = self._cached_vectors(owner, new_texts)
            vectors = [cached[key] for key in keys if key in cached]
            encoded = self._encode(queries)
        (query_vector,) = encoded if queries else query_vectors
        encode_s += perf_counter() - encoding
        if clustered := base is None:
            base = self._cluster(lookup, history, np.stack(vectors))
            new_texts, vectors = [], []
        episode, similarity, guides = _match(base, vectors, query_vector)
        guide = base.guides[episode]
        with self._cache_lock:
            self._last_guides.put(lookup.digests[-1], guide)
        return Route(
            episode,
            guide,
            similarity,
            guides,
            switched=None if lookup.last_guide is None else guide != lookup.last_guide,
            clustered=clustered,
            found=found,
            record=ClusteringRecord(lookup.segment_digests(base.num_segments), base),
            unknown_segments=len(new_texts) - len(vectors),
            encode_ms=encode_s * 1e3,
            match_ms=(perf_counter() - started - encode_s) * 1e3,
        )

    def embed_new_segments(self, owner: str, history: Sequence[Utterance]) -> None:
        """Embed the full segments that joined the history since it was clustered.

        Raises:
            KVPolicyError: a library is missing, or the encoder failed.
        """
        history = list(history)
        lookup = self._look_up(owner, history)
        self._embed(owner, _texts_after(lookup.base, history, lookup.segments), [])

    def _look_up(self, owner: str, history: list[Utterance]) -> _Lookup:
        segments = full_segments(history, self._settings.segment_utterances)
        digests = _prefix_digests(owner, history)
        base: ClusteredHistory | None = None
        with self._cache_lock:
            guides = map(self._last_guides.get, reversed(digests))
            last_guide = next(filter(None, guides), None)
            for count in range(len(segments), 0, -1):
                base = self._clusterings.get(digests[segments[count - 1].stop - 1])
                if base is not None:
                    if self._is_outgrown(count, len(segments)):
                        base = None
                    break
        return _Lookup(segments, digests, base, last_guide)

    def _is_outgrown(self, clustered: int, segments: int) -> bool:
        """Whether a history has grown too much since ``clustered`` segments."""
        num_new = segments - clustered
        return num_new > 0 and num_new >= self._settings.recluster_growth * clustered

    def _find(
        self, store: ClusteringStore, lookup: _Lookup, dim: int
    ) -> ClusteredHistory | None:
        """Find a clustering in the store, and remember it.

        Args:
            dim: number of elements of the encoder's vectors. Another encoder may have
                the same name.
        """
        count = len(lookup.segments)
        shortest = bisect_left(
            range(count), True, key=lambda n: not self._is_outgrown(n, count)
        )
        found = store.find(lookup.segment_digests(count), max(shortest, 1))
        if found is None or found.clustering.centroids.shape[1] != dim:
            return None
        logger.info(
            "found a clustering of %d segments for a history of %d",
            found.num_segments,
            count,
        )
        key = lookup.segment_digests(found.num_segments)[-1]
        with self._cache_lock:
            return self._clusterings.get(key) or self._clusterings.put(key, found)

    def _cluster(
        self, lookup: _Lookup, history: list[Utterance], vectors: np.ndarray
    ) -> ClusteredHistory:
        """Cluster a history and cache the result.

        Returns:
            The clustering of another thread, if it was faster.
        """
        clustering = cluster(vectors, self._settings)
        # Guides also depend on full segments only.
        utterances = history[: lookup.segments[-1].stop]
        guides = tuple(
            guide_text(
                utterances, lookup.segments, medoid, self._settings.guide_utterances
            )
            for medoid in clustering.medoids
        )
        logger.info(
            "clustered %d segments into %d episodes (%s)",
            len(lookup.segments),
            len(guides),
            clustering.reason,
        )
        key = lookup.digests[len(utterances) - 1]
        made = ClusteredHistory(clustering, guides)
        with self._cache_lock:
            return self._clusterings.get(key) or self._clusterings.put(key, made)

    def _cached_vectors(
        self, owner: str, texts: list[str]
    ) -> tuple[list[bytes], dict[bytes, np.ndarray]]:
        """Cache keys of all segments, and the vectors of those that have one."""
        keys = [_prefix_digests(owner, [Utterance("", text)])[0] for text in texts]
        with self._cache_lock:
            vectors = {key: self._vectors.get(key) for key in keys}
        return keys, {k: v for k, v in vectors.items() if v is not None}

    def _embed(
        self, owner: str, texts: list[str], queries: list[str]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Vectors of segments, which are cached, and of queries, which are not."""
        keys, cached = self._cached_vectors(owner, texts)
        missing = {k: t for k, t in zip(keys, texts, strict=True) if k not in cached}
        vectors = self._encode([*missing.values(), *queries])
        with self._cache_lock:
            # The vectors of the queries follow those of the segments.
            for key, vector in zip(missing, vectors, strict=False):
                cached[key] = self._vectors.put(key, vector.copy())
        return [cached[key] for key in keys], vectors[len(missing) :]

    def _encode(self, texts: list[str]) -> np.ndarray:
        """Embed in batches, so that long histories do not delay short ones."""
        batches = []
        for start in range(0, len(texts), _BATCH_SIZE):
            # A thread that releases a lock can acquire it again before waiting threads
            # do. The turnstile prevents that: the next thread already waits in it.
            with self._encoder_turnstile:
                self._encoder_lock.acquire()
            try:
                batch = texts[start : start + _BATCH_SIZE]
                batches.append(embed(self._loaded_encoder(), batch))
            finally:
                self._encoder_lock.release()
        return np.concatenate(batches) if batches else np.empty((0, 0), np.float32)

    def _loaded_encoder(self) -> Encoder:
        if self._encoder is None:
            self._encoder = self._load_encoder(self._settings.encoder)
        return self._encoder


class _LRUCache(Generic[V]):
    """A dictionary that evicts the least recently used entry when it is full."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        """The value of a key, which becomes the most recently used one."""
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: bytes, value: V) -> V:
        """Set the value of a key and return the value."""
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return value


def _texts_after(
    base: ClusteredHistory | None, history: list[Utterance], segments: list[range]
) -> list[str]:
    """Texts of the segments that a clustering does not contain."""
    clustered = 0 if base is None else base.num_segments
    return [dialogue_text(history[s.start : s.stop]) for s in segments[clustered:]]


def _match(
    base: ClusteredHistory, new_vectors: list[np.ndarray], query_vector: np.ndarray
) -> tuple[int, float, tuple[str, ...]]:
    """Episode of a query, its cosine, and all guides, most segments first.

    Args:
        new_vectors: float32 [d] each; segments that joined after the clustering.
        query_vector: float32 [d].
    """
    centroids = base.clustering.centroids
    labels = base.clustering.labels
    if new_vectors:
        new_labels = similarities(np.stack(new_vectors), centroids).argmax(1)
        labels = np.concatenate([labels, new_labels])
    segments_per_episode = np.bincount(labels, minlength=len(centroids))
    order = np.argsort(-segments_per_episode, kind="stable")
    (cosines,) = similarities(query_vector[None], centroids)
    episode = int(cosines.argmax())
    return episode, float(cosines[episode]), tuple(base.guides[e] for e in order)


def _prefix_digests(owner: str, history: Sequence[Utterance]) -> list[bytes]:
    """Digests of the owner with the first 1, 2, … utterances."""
    running = hashlib.blake2b(_length_prefixed(owner), digest_size=32)
    digests = []
    for utterance in history:
        running.update(_length_prefixed(utterance.speaker))
        running.update(_length_prefixed(utterance.text))
        digests.append(running.digest())
    return digests


def _length_prefixed(text: str) -> bytes:
    """Text with its length in front, so that no two lists of texts give equal bytes."""
    encoded = text.encode("utf-8", "surrogatepass")
    return len(encoded).to_bytes(8, "little") + encoded
