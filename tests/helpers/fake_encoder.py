"""Sentence encoders without a model, and utterances about topics."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from vllm_kvplugins.episodes.utterances import Utterance

TOPICS = {
    "sea": "boat wave sail harbour fish tide",
    "tea": "leaf kettle cup sugar steam pot",
    "art": "brush paint canvas colour frame sketch",
    "dog": "leash bark puppy bone paw fur",
}


def speak(rng: random.Random, count: int, topic: str | None = None) -> list[Utterance]:
    """Random utterances about one topic, or about any of them."""
    texts = []
    for i in range(count):
        words = TOPICS[topic or rng.choice(list(TOPICS))].split()
        texts.append(Utterance("AB"[i % 2], " ".join(rng.choices(words, k=5))))
    return texts


class BagOfWords:
    """Texts that share words get similar vectors; different texts get different ones.

    Attributes:
        seen: every text that was encoded, in order.
    """

    dim = 48

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, dim], normalized; independent of the other texts."""
        self.seen += texts
        return np.stack([self.vector(text) for text in texts])

    def vector(self, text: str) -> np.ndarray:
        """float32 [dim]."""
        words = re.findall(r"\w+", text.lower())
        vectors = [
            np.random.default_rng(crc32(text.encode())).normal(size=self.dim) / 10
        ]
        for word in words:
            rng = np.random.default_rng(crc32(word.encode()))
            vectors.append(rng.normal(size=self.dim))
        vector = np.sum(vectors, axis=0)
        unit: np.ndarray = (vector / np.linalg.norm(vector)).astype(np.float32)
        return unit


class Constant:
    """An encoder that returns the same vector for every text."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, 4]."""
        return np.full((len(texts), 4), self.value / 2, np.float32)
