"""An encoder behind an OpenAI-compatible endpoint, over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from embeddings_server import EmbeddingsServer

from vllm_kvplugins.episodes.embeddings_endpoint import (
    API_KEY_VARIABLE,
    EmbeddingsEndpoint,
)
from vllm_kvplugins.episodes.encoder import load_encoder, missing
from vllm_kvplugins.episodes.settings import EpisodeSettings
from vllm_kvplugins.errors import KVPolicyError, codes_in


def embedding(text: str) -> list[float]:
    """Not of length 1; texts of other lengths point elsewhere."""
    return [3.0, float(len(text)), 0.0]


@pytest.fixture
def server() -> Iterator[EmbeddingsServer]:
    made = EmbeddingsServer(embedding)
    yield made
    made.close()


def test_vectors_come_in_the_order_of_texts_and_have_length_1(server, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    texts = ["a", "some words", "naïve \ud800 text"]
    vectors = EmbeddingsEndpoint(server.address).encode(texts)
    expected = np.array([embedding(text) for text in texts], np.float32)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    assert vectors.dtype == np.float32
    ((path, headers, body),) = server.requests
    assert path == "/v1/embeddings"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {"model": "some/encoder", "input": [*texts[:2], "naïve ? text"]}


def test_no_key_is_sent_if_none_is_set(server, monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    EmbeddingsEndpoint(server.address).encode(["a"])
    assert server.requests[0][1]["Authorization"] is None


def test_loading_asks_for_a_vector_and_needs_no_sentence_transformers(server):
    assert load_encoder(server.address).encode(["a"]).shape == (1, 3)
    assert len(server.requests) == 2
    assert missing(server.address) is None


@pytest.mark.parametrize(
    "answer",
    [
        (500, b"out of memory"),
        (200, b"not JSON"),
        (200, b'{"data": [{"embedding": [1.0]}]}'),
        (200, b'{"error": "no such model"}'),
        (200, b'{"data": [{"index": 0, "embedding": "AAAA"}]}'),
        (200, b"[]"),
    ],
)
def test_a_server_that_fails_is_an_error_with_its_words(server, answer):
    server.answer = lambda body: answer
    with pytest.raises(KVPolicyError) as raised:
        load_encoder(server.address)
    assert codes_in(str(raised.value)) == ("KVP506",)
    server.answer = server.embeddings
    assert load_encoder(server.address).encode(["a"]).shape == (1, 3)


def test_a_wrong_number_of_vectors_is_an_error(server):
    server.answer = lambda body: (200, b'{"data": []}')
    with pytest.raises(KVPolicyError):
        load_encoder(server.address)


def test_a_server_that_is_not_there_is_an_error(server):
    server.close()
    with pytest.raises(KVPolicyError) as raised:
        load_encoder(server.address)
    assert codes_in(str(raised.value)) == ("KVP506",)


def test_a_server_that_does_not_respond_is_an_error(server):
    may_answer = threading.Event()
    server.answer = lambda body: ((may_answer.wait(20) and 200) or 500, b"{}")
    with pytest.raises(KVPolicyError):
        EmbeddingsEndpoint(server.address, timeout_s=0.1).encode(["a"])
    may_answer.set()


def test_an_address_needs_a_model():
    with pytest.raises(KVPolicyError) as raised:
        EpisodeSettings(encoder="http://127.0.0.1:8001/v1")
    assert codes_in(str(raised.value)) == ("KVP037",)
    EpisodeSettings(encoder="http://127.0.0.1:8001/v1#model")
