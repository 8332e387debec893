"""Which segments of a LoCoMo dialogue are told for a question."""

from __future__ import annotations

import json
import random

import locomo
import numpy as np
import pytest
from _locomo_segments import SegmentIndex, nearest
from fake_encoder import TOPICS, BagOfWords, speak

from vllm_kvplugins.episodes.routing import EpisodeRouter
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import dialogue_text

SIMILARITY = np.array([0.1, 0.9, 0.5, 0.7], np.float32)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (40, [0, 1, 2, 3]),  # all of them, in the order of the dialogue
        (39, [1, 2, 3]),
        (20, [1, 3]),
        (9, []),
    ],
)
def test_the_most_similar_segments_are_taken_until_the_budget_is_full(budget, expected):
    assert nearest(range(4), SIMILARITY, [10] * 4, budget) == expected


def test_a_segment_without_room_is_skipped():
    assert nearest(range(4), SIMILARITY, [10, 10, 5, 20], 15) == [1, 2]


def test_only_given_segments_are_taken():
    assert nearest([0, 2], SIMILARITY, [10] * 4, 40) == [0, 2]
    assert nearest([0, 2], SIMILARITY, [10] * 4, 10) == [2]


def test_of_equally_similar_segments_the_first_is_taken():
    assert nearest(range(3), np.ones(3, np.float32), [10] * 3, 20) == [0, 1]


def count_words(text: str) -> int:
    return len(text.split())


SETTINGS = EpisodeSettings(episodes=4, segment_utterances=2)


def topics(seed: int, rounds: int = 5):
    """A dialogue that returns to each topic, in segments of two utterances."""
    rng = random.Random(seed)
    return [u for topic in list(TOPICS) * rounds for u in speak(rng, 2, topic)]


def index_of(history, settings=SETTINGS) -> SegmentIndex:
    lines = dialogue_text(history).split("\n")
    return SegmentIndex(lines, settings, BagOfWords(), count_words)


def test_rag_tells_the_whole_episode_in_order():
    history = topics(seed=1)
    segments = [dialogue_text(history[i : i + 2]) for i in range(0, len(history), 2)]
    for number, words in enumerate(TOPICS.values()):
        told = index_of(history).near(words, 10_000, of_episode=True)
        assert told == segments[number :: len(TOPICS)], f"seed 1, {words}"


def test_rag_chooses_the_episode_that_epicache_routes_to():
    history = topics(seed=2)
    encoder = BagOfWords()
    router = EpisodeRouter(SETTINGS, lambda name: encoder)
    for words in TOPICS.values():
        query = f"user: which {words.split()[0]}?"
        route = router.route("", history, query)
        labels = route.record.clustered.clustering.labels
        members = np.flatnonzero(labels == route.episode)
        told = index_of(history).near(query, 10_000, of_episode=True)
        assert told == [dialogue_text(history[2 * i : 2 * i + 2]) for i in members]


def test_a_long_episode_is_cut_to_its_nearest_segments():
    index, history = index_of(topics(seed=3)), topics(seed=3)
    query = dialogue_text(history[8:10])  # the second segment about the first topic
    told = index.near(query, 30, of_episode=True)
    assert query in told
    assert len(told) == 2  # of 5; a segment has 12 words and counts as 13
    assert set(told) < set(index.near(query, 10_000, of_episode=True))


def test_segments_fill_the_budget_across_episodes():
    history = topics(seed=4)
    index, query = index_of(history), "boat sail"
    told = index.near(query, 13 * 9, of_episode=False)
    episode = index.near(query, 10_000, of_episode=True)
    assert len(told) == 9
    assert set(episode) < set(told)


def test_the_last_lines_are_a_segment_even_if_there_are_few():
    history = topics(seed=5)[:-1]
    told = index_of(history).near("any", 10_000, of_episode=False)
    assert "\n".join(told) == dialogue_text(history)


def test_each_question_is_asked_after_its_own_segments(tmp_path, monkeypatch):
    history = topics(seed=6)
    turns = [
        {"speaker": item.speaker, "dia_id": f"D1:{n}", "text": item.text}
        for n, item in enumerate(history)
    ]
    questions = [
        {"question": words, "answer": "x", "category": 1, "evidence": [f"D1:{2 * n}"]}
        for n, words in enumerate(TOPICS.values())
    ]
    path = tmp_path / "locomo.json"
    path.write_text(
        json.dumps([{"conversation": {"session_1": turns}, "qa": questions}])
    )
    loaded = []

    def load(name):
        loaded.append(name)
        return BagOfWords()

    monkeypatch.setattr("vllm_kvplugins.episodes.encoder.load_encoder", load)
    more = {"encoder": "folder", "segment_utterances": 2}
    setting = locomo.Setting("m", str(path), 0, 10_000, 4, "float32")
    work = locomo.job(locomo.RAG, 26, 32, more)
    chats = list(locomo.asked(setting, work, count_words))
    assert loaded == ["folder"]
    assert len({chat[0]["content"] for chat, _ in chats}) == 4
    for chat, question in chats:
        lines = chat[0]["content"].split("\n")
        assert chat == locomo.told(lines)
        assert len(lines) == 4  # two segments of 13 words
        assert all(line[3:].split()[0] in question.text.split() for line in lines)
