"""A sentence encoder behind an OpenAI-compatible endpoint for embeddings."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.parse import urldefrag

import numpy as np

from vllm_kvplugins.errors import KVPolicyError, coded

API_KEY_VARIABLE = "KVP_ENCODER_API_KEY"
_TIMEOUT_S = 30.0
_SHOWN_CHARACTERS = 200  # of a response, in an error message


def is_endpoint(name: str) -> bool:
    """Whether the name of an encoder is the address of an endpoint."""
    return name.startswith(("http://", "https://"))


class EmbeddingsEndpoint:
    """An encoder that another server runs, for example on a GPU.

    Args:
        address: base URL and model, as ``http://host:8001/v1#model``. If the
            environment variable ``KVP_ENCODER_API_KEY`` is set, it is sent as the API
            key.
        timeout_s: of one request.

    Raises:
        KVPolicyError: the address names no model.
    """

    def __init__(self, address: str, timeout_s: float = _TIMEOUT_S) -> None:
        base, model = urldefrag(address)
        if not model:
            raise KVPolicyError(coded("KVP506", endpoint_problem(address) or ""))
        self._url = f"{base.rstrip('/')}/embeddings"
        self._model = model
        self._timeout_s = timeout_s

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of texts: float32 [n, d].

        Raises:
            KVPolicyError: the endpoint does not respond, or its response has no
                embeddings.
        """
        if not texts:
            return np.empty((0, 0), np.float32)
        answer = self._post({"model": self._model, "input": list(texts)})
        try:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            shown = json.dumps(answer)[:_SHOWN_CHARACTERS]
            raise self._failed(f"its response has no embeddings: {shown}") from error
        if vectors.ndim != 2:
            raise self._failed(f"its embeddings have the shape {vectors.shape}")
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: np.ndarray = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
        return unit

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(API_KEY_VARIABLE)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        # JSON escapes lone surrogates, which tokenizers reject: replace them.
        text = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        request = urllib.request.Request(self._url, text, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")[:_SHOWN_CHARACTERS]
            raise self._failed(f"it answers {error.code}: {said}") from error
        except (OSError, ValueError) as error:  # no connection, no time, no JSON
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def _failed(self, why: str) -> KVPolicyError:
        return KVPolicyError(
            coded(
                "KVP506",
                f"the encoder at {self._url} (model {self._model!r}) cannot be used: "
                f"{why}; check the server, or set `encoder` to another one",
            )
        )


def endpoint_problem(address: str) -> str | None:
    """Why an address cannot be used; None if it can."""
    if urldefrag(address).fragment:
        return None
    return (
        f"encoder is {address!r}, an address without a model; append the model after "
        '"#", as in "http://127.0.0.1:8001/v1#Qwen/Qwen3-Embedding-0.6B"'
    )
