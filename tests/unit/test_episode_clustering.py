"""Segments, K-Means episodes, medoids and guides against equations 4 to 7."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from vllm_kvplugins.episodes.clustering import (
    cluster,
    guide_text,
    segments,
    silhouette,
    similarities,
)
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance
from vllm_kvplugins.errors import KVPolicyError


def told(count):
    return [Utterance("ab"[i % 2], str(i)) for i in range(count)]


def blobs(counts, spread=0.02, seed=0, dim=16):
    """Unit vectors around as many corners as ``counts`` has, mixed up."""
    rng = np.random.default_rng(seed)
    corners = np.eye(dim)[: len(counts)]
    truth = np.repeat(np.arange(len(counts)), counts)
    rng.shuffle(truth)
    points = corners[truth] + rng.normal(size=(len(truth), dim)) * spread
    units = points / np.linalg.norm(points, axis=1, keepdims=True)
    return units.astype(np.float32), truth


def settings(episodes=4, **more):
    return EpisodeSettings(episodes=episodes, **more)


# -- settings ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"episodes": 0}, "episodes is 0"),
        ({"episodes": True}, "episodes is True"),
        ({"episodes": "four"}, "episodes is 'four'"),
        ({"episodes": 2.0}, "episodes is 2.0"),
        ({"segment_utterances": 0}, "segment_utterances is 0"),
        ({"guide_utterances": -1}, "guide_utterances is -1"),
        ({"encoder": " "}, "encoder is ' '"),
        ({"encoder": None}, "encoder is None"),
        ({"recluster_growth": 0}, "recluster_growth is 0"),
        ({"recluster_growth": float("nan")}, "recluster_growth is nan"),
        ({"recluster_growth": float("inf")}, "recluster_growth is inf"),
        ({"recluster_growth": "0.5"}, "recluster_growth is '0.5'"),
        ({"recluster_growth": True}, "recluster_growth is True"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, "seed is 4294967296"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)
def test_rejects_invalid_settings(options, words):
    with pytest.raises(KVPolicyError, match="cannot be used") as error:
        EpisodeSettings(**options)
    assert words in str(error.value)


def test_lists_all_reasons():
    with pytest.raises(KVPolicyError) as error:
        EpisodeSettings(episodes=-3, seed=-1)
    assert error.value.codes == ("KVP037", "KVP037")
    assert "episodes is -3" in str(error.value)
    assert "seed is -1" in str(error.value)


# -- segments (eq. 4) ----------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 41])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_segments_are_those_of_equation_4(count, size):
    clustering = segments(told(count), size)
    assert len(clustering) == -(-count // size)
    for k, span in enumerate(clustering, 1):
        assert list(span) == list(range((k - 1) * size, min(k * size, count)))


# -- episodes (eq. 5-7) --------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_clear_topics_are_found_and_numbered_in_their_order(seed):
    embeddings, truth = blobs((7, 9, 11, 5), seed=seed)
    clustering = cluster(embeddings, settings())
    _, first = np.unique(truth, return_index=True)
    order = {topic: place for place, topic in enumerate(np.argsort(first))}
    assert clustering.labels.tolist() == [order[topic] for topic in truth]


def test_centroids_are_means_and_medoids_the_closest_members():
    embeddings, _ = blobs((6, 6, 6), spread=0.5, seed=3)
    clustering = cluster(embeddings, settings(3))
    assert clustering.centroids.dtype == np.float32
    assert clustering.labels.dtype == np.int64
    for episode, medoid in enumerate(clustering.medoids):
        members = np.flatnonzero(clustering.labels == episode)
        mean = embeddings[members].astype(np.float64).mean(0)
        assert clustering.centroids[episode] == pytest.approx(mean, abs=1e-6)
        cosines = embeddings[members] @ mean / np.linalg.norm(mean)
        assert medoid == members[cosines.argmax()]


def test_a_medoid_belongs_to_its_episode():
    """The closest member by cosine, even if a segment of another episode is closer."""
    far = np.array([[1, 0.0], [0.1, 0.0], [0.6, 0.8], [-1, 0.1]], np.float32)
    for seed in range(20):
        clustering = cluster(far, settings(3, seed=seed))
        assert clustering.labels[clustering.medoids].tolist() == [0, 1, 2]


def test_the_same_seed_gives_the_same_clustering():
    embeddings, _ = blobs((9,) * 6, spread=0.6, seed=1)
    one, two = (cluster(embeddings, settings(5, seed=3)) for _ in range(2))
    for name in ("labels", "centroids", "medoids"):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    others = [cluster(embeddings, settings(5, seed=s)).labels for s in range(8)]
    assert any(not np.array_equal(one.labels, other) for other in others)


def test_arrays_are_read_only_as_threads_share_them():
    clustering = cluster(blobs((3, 3))[0], settings(2))
    for name in ("labels", "centroids", "medoids"):
        assert not getattr(clustering, name).flags.writeable


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_segments_than_episodes_give_as_many_episodes(count):
    embeddings = np.eye(5, dtype=np.float32)[:count]
    clustering = cluster(embeddings, settings(4))
    assert clustering.labels.tolist() == list(range(count))
    assert clustering.medoids.tolist() == list(range(count))
    assert np.array_equal(clustering.centroids, embeddings)


@pytest.mark.parametrize("episodes", [4, "auto"])
def test_equal_segments_are_one_episode(episodes):
    embeddings = np.full((9, 4), 0.5, np.float32)
    clustering = cluster(embeddings, settings(episodes))
    assert clustering.labels.tolist() == [0] * 9
    assert clustering.medoids.tolist() == [0]


@pytest.mark.filterwarnings("error")
def test_two_kinds_of_segments_are_two_episodes_without_a_warning():
    embeddings = np.eye(2, dtype=np.float32)[[0, 1, 1, 0, 1]]
    assert cluster(embeddings, settings(4)).labels.tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("topics", [2, 3, 5, 8])
def test_auto_finds_how_many_topics_there_are(topics):
    embeddings, _ = blobs((6,) * topics, seed=topics)
    clustering = cluster(embeddings, settings("auto"))
    assert len(clustering.centroids) == topics
    assert clustering.reason.startswith("auto: silhouette 0.9")


def test_auto_goes_to_eight_and_not_further():
    embeddings, _ = blobs((5,) * 11)
    assert len(cluster(embeddings, settings("auto")).centroids) == 8


@pytest.mark.parametrize("count", [1, 2])
def test_auto_gives_one_episode_for_few_segments(count):
    clustering = cluster(np.eye(4, dtype=np.float32)[:count], settings("auto"))
    assert clustering.labels.tolist() == [0] * count
    assert clustering.reason.startswith("auto")


def test_auto_with_three_segments_compares_two_episodes():
    embeddings = np.array([[1, 0], [0.99, 0.14], [0, 1]], np.float32)
    clustering = cluster(embeddings, settings("auto"))
    assert clustering.labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize("shape", [(0, 4), (4,)])
def test_nothing_cannot_be_clustered(shape):
    with pytest.raises(ValueError, match="cannot cluster"):
        cluster(np.zeros(shape, np.float32), settings())


def test_a_missing_scikit_learn_names_the_extra(monkeypatch):
    for name in ("sklearn", "sklearn.cluster"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(KVPolicyError, match=r"vllm-kvplugins\[episodes\]"):
        cluster(np.eye(4, dtype=np.float32), settings(2))


def test_silhouette_is_high_for_clear_topics_and_undefined_for_one():
    embeddings, truth = blobs((5, 5, 5))
    assert silhouette(embeddings, truth) > 0.9
    assert abs(silhouette(embeddings, np.arange(15) % 3)) < 0.5
    assert np.isnan(silhouette(embeddings, np.zeros(15, int)))
    assert np.isnan(silhouette(embeddings, np.arange(15)))


def test_similarities_are_cosines_also_of_vectors_that_are_not_unit():
    rng = np.random.default_rng(0)
    vectors, centroids = rng.normal(size=(5, 7)), rng.normal(size=(3, 7))
    expected = [
        [v @ c / np.linalg.norm(v) / np.linalg.norm(c) for c in centroids]
        for v in vectors
    ]
    assert similarities(vectors, centroids) == pytest.approx(np.array(expected))


def test_nothing_is_like_a_centroid_of_length_zero():
    clustering = similarities(np.eye(2), np.array([[0.0, 0.0], [1.0, 0.0]]))
    assert clustering.tolist() == [[0.0, 1.0], [0.0, 0.0]]


# -- guides --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "medoid", "size", "first", "last"),
    [
        (40, 5, 8, 18, 25),  # two on both sides
        (40, 5, 4, 20, 23),
        (40, 5, 9, 18, 26),  # the odd one after the center
        (40, 0, 8, 0, 7),  # the start of the history
        (40, 9, 8, 32, 39),  # the end of the history
        (40, 5, 2, 21, 22),  # less than one segment: its middle
        (6, 0, 8, 0, 5),  # a short history, used whole
        (6, 1, 4, 2, 5),  # a partial last segment
        (1, 0, 8, 0, 0),
    ],
)
def test_a_guide_is_the_medoid_widened_evenly(count, medoid, size, first, last):
    history = told(count)
    lines = guide_text(history, segments(history, 4), medoid, size).splitlines()
    assert lines == [f"{'ab'[i % 2]}: {i}" for i in range(first, last + 1)]
