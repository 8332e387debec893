"""EpisodeRouter: routes, growing histories, branches, owners and eviction."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic, sleep

import numpy as np
import pytest
from fake_encoder import TOPICS, BagOfWords, Constant, speak

from vllm_kvplugins.episodes.routing import EpisodeRouter, Route
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.episodes.utterances import Utterance, dialogue_text
from vllm_kvplugins.errors import KVPolicyError


def dialogue(*topics, seed=0):
    """Eight utterances, in two segments, about each topic."""
    rng = random.Random(seed)
    return [utterance for topic in topics for utterance in speak(rng, 8, topic)]


def router_of(encoder=None, max_conversations=1024, **options):
    encoder = encoder or BagOfWords()
    return EpisodeRouter(
        EpisodeSettings(**options), lambda _: encoder, max_conversations
    )


def untimed(route: Route | None) -> Route | None:
    return route and replace(route, encode_ms=0, match_ms=0)


HISTORY = dialogue("sea", "tea", "art", "dog")


# -- routes ---------------------------------------------------------------


@pytest.mark.parametrize("topic", TOPICS)
def test_a_query_goes_to_the_episode_of_its_topic(topic):
    route = router_of().route("me", HISTORY, TOPICS[topic])
    assert route.episode == list(TOPICS).index(topic)
    assert route.guide == route.guides[route.episode], "equally many segments each"
    assert len(route.guide.splitlines()) == 8
    assert set(route.guide.split()) & set(TOPICS[topic].split())
    assert route.similarity > 0.5
    assert route.clustered
    assert route.switched is None
    assert route.encode_ms > 0
    assert route.match_ms > 0


def test_an_empty_history_has_no_route():
    encoder = BagOfWords()
    assert router_of(encoder).route("me", [], "hello") is None
    assert encoder.seen == []


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_history_shorter_than_a_segment_is_one_segment(count):
    encoder = BagOfWords()
    router = router_of(encoder)
    history = HISTORY[:count]
    route = router.route("me", history, "sea")
    assert encoder.seen == [dialogue_text(history), "sea"]
    assert route.guides == (route.guide,) == (dialogue_text(history),)
    assert not router.route("me", history, "sea").clustered


def test_a_short_history_that_grows_is_clustered_again():
    """Its only segment was not the first segment of the longer history."""
    router = router_of()
    for count in range(1, 6):
        route = router.route("me", HISTORY[:count], "sea")
        assert route.clustered == (count < 5)
        assert route.guide == dialogue_text(HISTORY[: min(count, 4)])


def test_switched_compares_with_the_last_route_of_the_conversation():
    router = router_of()
    utterances = []
    history = list(HISTORY)
    for topic in ("sea", "sea", "tea", "tea", "sea"):
        utterances.append(router.route("me", history, TOPICS[topic]).switched)
        history += [Utterance("A", f"{topic}?"), Utterance("B", "so.")]
    assert utterances == [None, False, True, False, True]
    other = dialogue("tea", "sea", seed=9)
    assert router.route("me", other, TOPICS["tea"]).switched is None


def test_guides_come_with_the_most_populous_episode_first():
    history = dialogue("sea", "tea", "tea", "tea", "art", "art")
    router = router_of(episodes=3, guide_utterances=4)
    route = router.route("me", history, TOPICS["sea"])
    topics = [
        next(t for t, words in TOPICS.items() if guide.split()[1] in words.split())
        for guide in route.guides
    ]
    assert topics == ["tea", "art", "sea"]
    longer_history = history + dialogue("art", "art", seed=5)  # 12 + 4 segments
    later = router.route("me", longer_history, TOPICS["sea"])
    assert later.guides == route.guides, "new segments count once they have a vector"
    router.embed_new_segments("me", longer_history)
    assert [route.guides[i] for i in (1, 0, 2)] == list(
        router.route("me", longer_history, TOPICS["sea"]).guides
    ), "new segments count, where they were assigned"


def test_a_clustered_segment_counts_where_k_means_put_it():
    class Line(Constant):
        """All vectors have one direction: equal for the cosine, but not for K-Means."""

        def encode(self, texts):
            return np.array([[float(t.split()[-1]), 0] for t in texts], np.float32)

    history = [Utterance("A", x) for x in ("1", "2", "100", "101", "102")]
    router = router_of(Line(), episodes=2, segment_utterances=1, guide_utterances=1)
    route = router.route("me", history, "1")
    assert route.episode == 0
    assert route.guides == ("A: 100", "A: 1")


# -- growing -------------------------------------------------------------------------


@pytest.mark.parametrize(("growth", "at"), [(0.5, 12), (0.25, 10), (1.0, 16)])
def test_the_history_is_clustered_again_when_it_has_grown_enough(growth, at):
    router = router_of(recluster_growth=growth)
    history = HISTORY + dialogue("sea", "tea", "art", "dog", seed=4)
    clustered = [
        k
        for k in range(8, 17)
        if router.route("me", history[: 4 * k + 3], "boat").clustered
    ]
    assert clustered[:2] == [8, at]


def test_guides_change_only_when_the_history_is_clustered_again():
    router = router_of()
    before = router.route("me", HISTORY, TOPICS["tea"])
    history = HISTORY + dialogue("tea", "tea", seed=4)[:12]
    kept = router.route("me", history, TOPICS["tea"])
    assert set(kept.guides) == set(before.guides)
    assert kept.switched is False
    history += dialogue("tea", seed=5)
    after = router.route("me", history, TOPICS["tea"])
    assert after.clustered
    assert set(after.guides) != set(before.guides)
    assert after.guides == router_of().route("me", history, "tea").guides
    assert after.switched == (after.guide != kept.guide)


def test_other_conversations_do_not_change_a_route():
    router = router_of()
    rng = random.Random(3)
    questions = [
        (HISTORY + speak(rng, n), rng.choice(list(TOPICS))) for n in (0, 5, 9, 15)
    ]
    router.route("me", HISTORY, "first")
    first = [router.route("me", *each) for each in questions]
    for _ in range(60):
        history = HISTORY[: rng.choice([20, 32])] + speak(rng, rng.randrange(30))
        router.route(rng.choice("xy"), history, rng.choice(list(TOPICS)))
        i = rng.randrange(len(questions))
        again = router.route("me", *questions[i])
        assert not again.clustered
        assert (again.episode, again.similarity, again.guides) == (
            first[i].episode,
            first[i].similarity,
            first[i].guides,
        )


def test_a_branch_leaves_its_sibling_alone():
    router = router_of()
    router.route("me", HISTORY, "sea")
    trunk = HISTORY + dialogue("dog", "dog", "dog", "dog", seed=7)
    whole = router.route("me", trunk, TOPICS["dog"])
    assert whole.clustered
    branch = [*trunk[:34], Utterance("A", "edited"), *trunk[35:44]]
    edited = router.route("me", branch, TOPICS["dog"])
    assert not edited.clustered, "what is older than the edit is known"
    assert set(edited.guides) == set(router.route("me", HISTORY, "tea").guides)
    early = [Utterance("A", "edited"), *trunk[1:]]
    assert router.route("me", early, TOPICS["dog"]).clustered
    again = router.route("me", trunk, TOPICS["dog"])
    assert again.guides == whole.guides
    assert not again.clustered
    assert again.switched is False


# -- owners, eviction --------------------------------------------------------------


def test_owners_share_nothing():
    encoder = BagOfWords()
    router = router_of(encoder)
    first = router.route("ann", HISTORY, "sea")
    encoder.seen.clear()
    second = router.route("bob", HISTORY, "sea")
    assert len(encoder.seen) == 9, "neither are vectors taken over"
    assert untimed(second) == untimed(first)
    router.route("ann", HISTORY, TOPICS["tea"])
    assert router.route("bob", HISTORY, "sea").switched is False


def test_texts_cannot_be_shifted_between_fields():
    router = router_of()
    router.route("ab", [Utterance("c", "d"), Utterance("e", "f")], "q")
    for owner, history in (
        ("a", [Utterance("bc", "d"), Utterance("e", "f")]),
        ("ab", [Utterance("cd", ""), Utterance("e", "f")]),
        ("ab", [Utterance("c", "de"), Utterance("", "f")]),
    ):
        assert router.route(owner, history, "q").switched is None


def test_evicts_the_least_recently_used_conversation():
    router = router_of(max_conversations=2)
    a, b, c = (dialogue("sea", "tea", seed=seed) for seed in range(3))

    def clustered(history):
        return router.route("me", history, "q").clustered

    assert [clustered(h) for h in (a, b, a, c)] == [True, True, False, True]
    assert not clustered(a)
    assert clustered(b)
    assert not clustered(a)
    assert clustered(c)


def test_evicts_vectors_and_routes():
    encoder = BagOfWords()
    router = router_of(encoder, max_conversations=1)
    long = [
        utterance for seed in range(9) for utterance in dialogue(*TOPICS, seed=seed)
    ]
    first = router.route("me", long, "q")  # 72 segments, 64 of which are remembered
    router.route("me", HISTORY, "q")
    encoder.seen.clear()
    second = router.route("me", long, "q")
    assert len(encoder.seen) > 8
    assert second.guides == first.guides
    for n in range(20):
        router.route("me", [Utterance("A", str(n))], "q")
    assert router.route("me", long, "q").switched is None


def test_max_conversations_is_at_least_one():
    with pytest.raises(ValueError, match="max_conversations is 0"):
        router_of(max_conversations=0)


# -- odd encoders --------------------------------------------------------------------


def test_equal_vectors_give_one_episode():
    route = router_of(Constant()).route("me", HISTORY, "q")
    assert len(route.guides) == 1
    assert route.similarity == pytest.approx(1)


def test_more_episodes_than_segments():
    route = router_of(episodes=40).route("me", HISTORY, TOPICS["tea"])
    assert len(route.guides) == 8


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_vector_is_a_clear_error_and_is_not_remembered(value):
    encoder = Constant(value)
    router = router_of(encoder)
    for _ in range(2):
        with pytest.raises(KVPolicyError, match=r"KVP507.*9 of 9 texts"):
            router.route("me", HISTORY, "q")
    encoder.value = 1.0
    assert router.route("me", HISTORY, "q").clustered


def test_a_wrong_number_of_vectors_is_a_clear_error():
    class Short(Constant):
        def encode(self, texts):
            return super().encode(texts)[:-1]

    with pytest.raises(KVPolicyError, match=r"KVP507.*\(8, 4\)"):
        router_of(Short()).route("me", HISTORY, "q")


def test_the_encoder_is_loaded_once_and_a_failure_is_retried():
    loaded = []

    def load(name):
        loaded.append(name)
        if len(loaded) == 1:
            raise KVPolicyError("no encoder")
        return BagOfWords()

    router = EpisodeRouter(EpisodeSettings(encoder="some/model"), load)
    with pytest.raises(KVPolicyError, match="no encoder"):
        router.load()
    router.load()
    router.route("me", HISTORY, "q")
    assert loaded == ["some/model"] * 2


def test_lone_surrogates_have_digests():
    utterances = [Utterance("A", "\ud800"), Utterance("A", "\udfff")]
    assert router_of(Constant()).route("me", utterances, "q") is not None


# -- threads -------------------------------------------------------------------------


def test_threads_get_the_same_routes_as_one_thread():
    class Alone(BagOfWords):
        busy = threading.Lock()

        def encode(self, texts):
            assert self.busy.acquire(blocking=False), "two threads at a time"
            try:
                return super().encode(texts)
            finally:
                self.busy.release()

    rng = random.Random(1)
    questions = [
        (f"user {user}", HISTORY[: 4 * rng.randrange(3, 9)] + speak(rng, 4), topic)
        for user in range(6)
        for topic in TOPICS.values()
    ]
    alone = [router_of().route(*each) for each in questions]
    shared = router_of(Alone())
    with ThreadPoolExecutor(12) as pool:
        routes = list(pool.map(lambda each: shared.route(*each), questions * 4))
    for i, route in enumerate(routes):
        expected = alone[i % len(questions)]
        assert (route.episode, route.guides, route.similarity) == (
            expected.episode,
            expected.guides,
            expected.similarity,
        )


def test_a_long_history_does_not_delay_a_short_one():
    started, release = threading.Event(), threading.Event()
    calls = []

    class Slow(BagOfWords):
        def encode(self, texts):
            calls.append(len(texts))
            started.set()
            assert release.wait(20)
            return super().encode(texts)

    long = [
        utterance for seed in range(9) for utterance in dialogue(*TOPICS, seed=seed)
    ]
    router = router_of(Slow())
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(router.route, "me", long, "q")
        assert started.wait(20)
        other = pool.submit(router.route, "you", HISTORY[:4], "q")
        deadline = monotonic() + 20
        while not router._encoder_turnstile.locked() and monotonic() < deadline:
            sleep(0.001)
        release.set()
        assert other.result(20).clustered
        assert waiting.result(20).clustered
    assert calls == [32, 2, 32, 9], "73 texts, with the two of the other between"
