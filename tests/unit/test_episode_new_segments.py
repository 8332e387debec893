"""A route embeds only its query; new segments are embedded later."""

from __future__ import annotations

from fake_encoder import BagOfWords
from test_episode_routing import HISTORY, dialogue, router_of

from vllm_kvplugins.episodes.utterances import dialogue_text


def test_a_route_embeds_the_query_and_a_later_call_new_segments():
    encoder = BagOfWords()
    router = router_of(encoder)
    assert router.route("me", HISTORY, "one").unknown_segments == 0
    assert len(encoder.seen) == 9
    for more, new in ((1, 0), (3, 0), (4, 1), (6, 0), (9, 1)):
        encoder.seen.clear()
        history = HISTORY + dialogue("sea", "tea", seed=4)[:more]
        assert router.route("me", history, "two").unknown_segments == new
        assert encoder.seen == ["two"]
        router.embed_new_segments("me", history)
        expected = [dialogue_text(history[-more:][k * 4 : k * 4 + 4]) for k in range(2)]
        assert encoder.seen == ["two", *expected[more // 4 - new : more // 4]]
        assert router.route("me", history, "two").unknown_segments == 0


def test_clustering_embeds_all_segments_without_a_vector():
    encoder = BagOfWords()
    router = router_of(encoder)
    router.route("me", HISTORY, "one")
    history = HISTORY + dialogue("sea", "tea", seed=4)
    assert router.route("me", history[:-1], "two").unknown_segments == 3
    encoder.seen.clear()
    route = router.route("me", history, "three")
    assert route.clustered
    assert route.unknown_segments == 0
    assert len(encoder.seen) == 5


def test_counts_segments_with_equal_text():
    router = router_of()
    router.route("me", HISTORY, "one")
    twice = HISTORY + 2 * dialogue("sea", seed=4)[:4]
    assert router.route("me", twice, "two").unknown_segments == 2
    router.embed_new_segments("me", twice)
    assert router.route("me", twice, "two").unknown_segments == 0


def test_embeds_nothing_without_new_segments():
    encoder = BagOfWords()
    router = router_of(encoder)
    router.embed_new_segments("me", [])
    assert not encoder.seen
    router.route("me", HISTORY, "one")
    encoder.seen.clear()
    router.embed_new_segments("me", HISTORY + HISTORY[:3])
    assert not encoder.seen
