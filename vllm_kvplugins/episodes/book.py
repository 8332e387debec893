"""Which episode of which conversation: what is known of histories, and routing."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np

from vllm_kvplugins.episodes.clustering import (
    Clustering,
    cluster,
    full_segments,
    guide_text,
    similarities,
)
from vllm_kvplugins.episodes.encoder import Encoder, embed
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text

logger = logging.getLogger(__name__)

V = TypeVar("V")
_BATCH = 32  # texts that one thread embeds before another one may
_SEGMENTS, _ROUTES = 64, 8  # remembered per conversation, on average


@dataclass(frozen=True, slots=True)
class Route:
    """Where a query belongs.

    Attributes:
        episode: number of the episode in this clustering.
        guide: its patched prompt; what a cache of this episode is known by.
        similarity: cosine of the query to the episode's centroid.
        guides: of all episodes, the one with most known segments first.
        switched: another guide than the conversation's last one; None at first.
        clustered: the history was clustered for this route.
        unknown_segments: so many full segments have no vector yet; ``learn`` embeds
            them.
        encode_ms: in the encoder, with waiting for other threads and, the first time,
            with loading it.
        match_ms: everything else: look-up, clustering, matching.
    """

    episode: int
    guide: str
    similarity: float
    guides: tuple[str, ...]
    switched: bool | None
    clustered: bool
    unknown_segments: int
    encode_ms: float
    match_ms: float


@dataclass(frozen=True, slots=True, eq=False)
class _Conversation:
    """A beginning of histories as it was clustered; never changed.

    Attributes:
        guides: by episode.
    """

    clustering: Clustering
    guides: tuple[str, ...]


class EpisodeRouter:
    """Routes queries to episodes of histories that grow.

    EpiCache, section 3.1, stages 1 and 3. Differs from the paper, which clusters one
    history once and offline: new segments join the nearest episode, whose centroid and
    guide stay, until the history has grown by ``recluster_growth`` and is clustered
    anew. Where a query goes does not depend on who has joined, so a route does not wait
    for new segments: they are embedded, once they are full, by ``learn``, or when the
    history is clustered anew. The last utterances, which fill no segment, belong to no
    episode. A history shorter than one segment is one segment.

    A clustering is filed under the owner and the utterances that it was made from, and
    a history uses the one of its longest beginning. So a branch, where an earlier
    message was edited, takes what is older than the edit and leaves its sibling alone,
    and the same history and query go to the same episode whatever came between, as
    long as nothing was clustered anew or forgotten. After a restart a history is
    clustered at its current length: other guides than those before, if they were made
    when it was shorter.

    Any number of threads may call it; they wait for each other in the encoder only,
    and there for one batch.

    Args:
        encoder_loader: takes ``settings.encoder``; called once, by the first route or
            by ``load``.
        most_conversations: so many clusterings are kept, and 64 times as many vectors
            of segments (about 2 KiB each); who was used least recently goes.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        encoder_loader: Callable[[str], Encoder],
        most_conversations: int = 1024,
    ) -> None:
        if most_conversations < 1:
            raise ValueError(
                f"most_conversations is {most_conversations}; give 1 or more"
            )
        self._settings = settings
        self._load = encoder_loader
        self._encoder: Encoder | None = None
        self._door, self._encoding = Lock(), Lock()
        self._lock = Lock()  # for the three below; never held while encoding
        self._conversations = _Recent[_Conversation](most_conversations)
        self._vectors = _Recent[np.ndarray](_SEGMENTS * most_conversations)
        self._routed = _Recent[str](_ROUTES * most_conversations)  # guides

    def load(self) -> None:
        """Load the encoder now, so that the first route need not wait for it.

        Raises:
            KVPolicyError: it cannot be loaded.
        """
        with self._encoding:
            self._loaded()

    def route(
        self, owner: str, history: Sequence[Utterance], query: str
    ) -> Route | None:
        """The episode that a query is about (eq. 7); None without a history.

        Args:
            owner: whoever has another one shares nothing with this one: neither
                clusterings nor vectors.
            history: everything before the query.

        Raises:
            KVPolicyError: a library is missing, or the encoder fails.

        Cost: the query is embedded, and all segments without a vector where the history
        is clustered; a digest of the history.
        """
        if not history:
            return None
        started = perf_counter()
        history = list(history)
        spans, chain, base, last_guide = self._look_up(owner, history)
        texts = _new_texts(base, history, spans)
        looked_up = perf_counter()
        if base is None:
            vectors, (asked,) = self._embed(owner, texts, [query])
        else:
            keys, found = self._recall(owner, texts)
            vectors = [found[key] for key in keys if key in found]
            (asked,) = self._encode([query])
        encoded = perf_counter()
        if clustered := base is None:
            base = self._cluster(chain, history, spans, np.stack(vectors))
            texts, vectors = [], []
        episode, similarity, guides = _match(base, vectors, asked)
        guide = base.guides[episode]
        with self._lock:
            self._routed.put(chain[-1], guide)
        return Route(
            episode,
            guide,
            similarity,
            guides,
            switched=None if last_guide is None else guide != last_guide,
            clustered=clustered,
            unknown_segments=len(texts) - len(vectors),
            encode_ms=(encoded - looked_up) * 1e3,
            match_ms=(looked_up - started + perf_counter() - encoded) * 1e3,
        )

    def learn(self, owner: str, history: Sequence[Utterance]) -> None:
        """Embed what the last route left: full segments that have no vector yet.

        Raises:
            KVPolicyError: a library is missing, or the encoder fails.
        """
        history = list(history)
        spans, _, base, _ = self._look_up(owner, history)
        self._embed(owner, _new_texts(base, history, spans), [])

    def _look_up(
        self, owner: str, history: list[Utterance]
    ) -> tuple[list[range], list[bytes], _Conversation | None, str | None]:
        """Segments, digests, the clustering to go on with, if any, the last guide."""
        spans = full_segments(history, self._settings.segment_utterances)
        chain = _chain(owner, history)
        with self._lock:
            last = next(filter(None, map(self._routed.get, reversed(chain))), None)
            for count in range(len(spans), 0, -1):
                base = self._conversations.get(chain[spans[count - 1].stop - 1])
                if base is not None:
                    new = len(spans) - count
                    grown = new and new >= self._settings.recluster_growth * count
                    return spans, chain, (None if grown else base), last
        return spans, chain, None, last

    def _cluster(
        self,
        chain: list[bytes],
        history: list[Utterance],
        spans: list[range],
        vectors: np.ndarray,
    ) -> _Conversation:
        """Cluster a history and file it; another thread may have been faster."""
        found = cluster(vectors, self._settings)
        said = history[: spans[-1].stop]  # the guides too hang on full segments only
        size = self._settings.guide_utterances
        guides = tuple(guide_text(said, spans, m, size) for m in found.medoids)
        logger.info(
            "clustered %d segments into %d episodes (%s)",
            len(spans),
            len(guides),
            found.reason,
        )
        key = chain[len(said) - 1]
        with self._lock:
            faster = self._conversations.get(key)
            return faster or self._conversations.put(key, _Conversation(found, guides))

    def _recall(
        self, owner: str, texts: list[str]
    ) -> tuple[list[bytes], dict[bytes, np.ndarray]]:
        """What segments are known by, and the vectors of those that have one."""
        keys = [_chain(owner, [Utterance("", text)])[0] for text in texts]
        with self._lock:
            held = {key: self._vectors.get(key) for key in keys}
        return keys, {k: v for k, v in held.items() if v is not None}

    def _embed(
        self, owner: str, texts: list[str], queries: list[str]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Vectors of segments, of which some may be known, and of queries."""
        keys, found = self._recall(owner, texts)
        missing = {k: t for k, t in zip(keys, texts, strict=True) if k not in found}
        vectors = self._encode([*missing.values(), *queries])
        with self._lock:
            for key, vector in zip(missing, vectors, strict=False):  # then queries
                found[key] = self._vectors.put(key, vector.copy())
        return [found[key] for key in keys], vectors[len(missing) :]

    def _encode(self, texts: list[str]) -> np.ndarray:
        """Batch by batch, so that a long history does not hold up short ones."""
        parts = []
        for at in range(0, len(texts), _BATCH):
            # Who releases a lock could take it again before those who wait: here
            # they stand in the door already.
            with self._door:
                self._encoding.acquire()
            try:
                parts.append(embed(self._loaded(), texts[at : at + _BATCH]))
            finally:
                self._encoding.release()
        return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            self._encoder = self._load(self._settings.encoder)
        return self._encoder


class _Recent(Generic[V]):
    """A dict that forgets whoever was used least recently."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[bytes, V] = OrderedDict()

    def get(self, key: bytes) -> V | None:
        """What is held, as used now."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def put(self, key: bytes, value: V) -> V:
        """Hold a value; what was held under the key is replaced."""
        self._held[key] = value
        self._held.move_to_end(key)
        if len(self._held) > self._most:
            self._held.popitem(last=False)
        return value


def _new_texts(
    base: _Conversation | None, history: list[Utterance], spans: list[range]
) -> list[str]:
    """Texts of the segments that are not in a clustering."""
    known = 0 if base is None else len(base.clustering.labels)
    return [dialogue_text(history[s.start : s.stop]) for s in spans[known:]]


def _match(
    base: _Conversation, new: list[np.ndarray], asked: np.ndarray
) -> tuple[int, float, tuple[str, ...]]:
    """Episode of a query, its cosine, and all guides, most segments first.

    Args:
        new: float32 [d] each, segments since the clustering.
        asked: float32 [d].
    """
    centroids = base.clustering.centroids
    labels = base.clustering.labels
    if new:
        joined = similarities(np.stack(new), centroids).argmax(1)
        labels = np.concatenate([labels, joined])
    members = np.bincount(labels, minlength=len(centroids))
    order = np.argsort(-members, kind="stable")
    (cosines,) = similarities(asked[None], centroids)
    episode = int(cosines.argmax())
    return episode, float(cosines[episode]), tuple(base.guides[e] for e in order)


def _chain(owner: str, history: Sequence[Utterance]) -> list[bytes]:
    """Digests of the owner and the first 1, 2, … utterances."""
    chain = hashlib.blake2b(_framed(owner), digest_size=32)
    digests = []
    for said in history:
        chain.update(_framed(said.speaker) + _framed(said.text))
        digests.append(chain.digest())
    return digests


def _framed(text: str) -> bytes:
    """With its length, so that no two lists of texts give the same bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw).to_bytes(8, "little") + raw
