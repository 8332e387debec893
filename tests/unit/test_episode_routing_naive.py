"""EpisodeRouter against a naive implementation, on random conversations."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
from fake_encoder import TOPICS, BagOfWords, speak
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvplugins.episodes.clustering import (
    cluster,
    guide_text,
    segments,
    similarities,
)
from vllm_kvplugins.episodes.routing import EpisodeRouter, Route
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import dialogue_text

FULL_TIER = os.environ.get("KVP_TEST_TIER") == "all"


class NaiveRouter:
    """The same rules on plain lists; recomputes everything each time."""

    def __init__(self, settings, max_conversations):
        self.settings, self.most = settings, max_conversations
        # Owner, utterances, clustering, guides; most recently used last
        self.known = []
        self.routed = []  # owner, history, guide
        self.encoder = BagOfWords()

    def route(self, owner, history, query):
        if not history:
            return None
        size = self.settings.segment_utterances
        full = len(history) // size
        parts = [history[k * size : (k + 1) * size] for k in range(full)] or [history]
        vectors = np.stack([self.encoder.vector(dialogue_text(p)) for p in parts])
        entry = self.clustering_for(owner, parts)
        clustered = entry is None
        if clustered:
            utterances = [u for part in parts for u in part]
            routed = cluster(vectors, self.settings)
            guides = [
                guide_text(
                    utterances,
                    segments(utterances, size),
                    m,
                    self.settings.guide_utterances,
                )
                for m in routed.medoids
            ]
            entry = (owner, parts, routed, guides)
            self.known = [*self.known, entry][-self.most :]
        _, _, routed, guides = entry
        labels = list(routed.labels)
        labels += [
            similarities(vector[None], routed.centroids)[0].argmax()
            for vector in vectors[len(labels) :]
        ]
        cosines = similarities(self.encoder.vector(query)[None], routed.centroids)[0]
        guide = guides[cosines.argmax()]
        last = self.last(owner, history)
        self.routed.append((owner, history, guide))
        by_size = sorted(range(len(guides)), key=lambda e: (-labels.count(e), e))
        return Route(
            int(cosines.argmax()),
            guide,
            pytest.approx(cosines.max(), abs=1e-6),
            tuple(guides[e] for e in by_size),
            None if last is None else last != guide,
            clustered,
            False,
            None,
            0,
            0,
            0,
        )

    def clustering_for(self, owner, parts):
        fitting = [
            entry
            for entry in self.known
            if entry[0] == owner and entry[1] == parts[: len(entry[1])]
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda entry: len(entry[1]))
        self.known = [e for e in self.known if e is not best] + [best]
        new = len(parts) - len(best[1])
        recluster = new and new / len(best[1]) >= self.settings.recluster_growth
        return None if recluster else best

    def last(self, owner, history):
        fitting = [
            (len(text), at)
            for at, (who, text, _) in enumerate(self.routed)
            if who == owner and text == history[: len(text)]
        ]
        return self.routed[max(fitting)[1]][2] if fitting else None


@settings(max_examples=100 if FULL_TIER else 10, deadline=None, print_blob=True)
@given(seed=st.integers(0, 10**6), max_conversations=st.sampled_from([2, 3, 50]))
def test_the_router_routes_as_a_naive_one_does(seed, max_conversations):
    rng = random.Random(seed)
    clustering = EpisodeSettings(
        episodes=rng.choice([1, 2, 3, "auto"]),
        segment_utterances=rng.choice([1, 2, 3]),
        guide_utterances=rng.choice([1, 4, 7]),
        recluster_growth=rng.choice([0.25, 0.5, 1.0]),
    )
    router = EpisodeRouter(clustering, lambda _: BagOfWords(), max_conversations)
    naive = NaiveRouter(clustering, max_conversations)
    histories = [[]]
    for _ in range(30):
        history = list(rng.choice(histories[-6:]))
        action = rng.random()
        if action < 0.6:
            history += speak(rng, rng.randint(1, 5))
        elif action < 0.75 and history:
            history = history[: rng.randrange(len(history))] + speak(rng, 1)
        owner, query = rng.choice("aab"), TOPICS[rng.choice(list(TOPICS))]
        # so few routes that none is evicted; the naive version never evicts
        if len(naive.routed) < 8 * max_conversations:
            expected = naive.route(owner, history, query)
            if embedded := rng.random() < 0.5:
                router.embed_new_segments(owner, history)
            routed = router.route(owner, history, query)
            if routed is not None:
                assert not routed.unknown_segments or not embedded
                routed = replace(routed, encode_ms=0, match_ms=0, unknown_segments=0)
            if routed is not None and not embedded:  # some may have no vector yet
                assert sorted(routed.guides) == sorted(expected.guides)
                routed = replace(routed, guides=expected.guides)
            assert routed == expected
        histories.append(history)
