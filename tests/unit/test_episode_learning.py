"""A route waits for its query only; what is new in a history is learned later."""

from __future__ import annotations

from fake_encoder import BagOfWords
from test_episode_book import HISTORY, book_of, dialogue

from vllm_kvplugins.episodes.utterances import dialogue_text


def test_a_route_embeds_the_query_and_what_is_new_is_learned():
    encoder = BagOfWords()
    book = book_of(encoder)
    assert book.route("me", HISTORY, "one").unknown_segments == 0
    assert len(encoder.seen) == 9
    for more, new in ((1, 0), (3, 0), (4, 1), (6, 0), (9, 1)):
        encoder.seen.clear()
        history = HISTORY + dialogue("sea", "tea", seed=4)[:more]
        assert book.route("me", history, "two").unknown_segments == new
        assert encoder.seen == ["two"]
        book.learn("me", history)
        expected = [dialogue_text(history[-more:][k * 4 : k * 4 + 4]) for k in range(2)]
        assert encoder.seen == ["two", *expected[more // 4 - new : more // 4]]
        assert book.route("me", history, "two").unknown_segments == 0


def test_what_was_never_learned_is_embedded_when_it_is_clustered():
    encoder = BagOfWords()
    book = book_of(encoder)
    book.route("me", HISTORY, "one")
    history = HISTORY + dialogue("sea", "tea", seed=4)
    assert book.route("me", history[:-1], "two").unknown_segments == 3
    encoder.seen.clear()
    route = book.route("me", history, "three")
    assert route.clustered
    assert route.unknown_segments == 0
    assert len(encoder.seen) == 5


def test_segments_of_the_same_text_count_each():
    book = book_of()
    book.route("me", HISTORY, "one")
    twice = HISTORY + 2 * dialogue("sea", seed=4)[:4]
    assert book.route("me", twice, "two").unknown_segments == 2
    book.learn("me", twice)
    assert book.route("me", twice, "two").unknown_segments == 0


def test_learning_without_a_history_or_news_embeds_nothing():
    encoder = BagOfWords()
    book = book_of(encoder)
    book.learn("me", [])
    assert not encoder.seen
    book.route("me", HISTORY, "one")
    encoder.seen.clear()
    book.learn("me", HISTORY + HISTORY[:3])
    assert not encoder.seen
