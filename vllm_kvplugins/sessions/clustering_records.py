"""Names and contents of the files with clusterings (``clusterings``)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvplugins.episodes.clustering import Clustering
from vllm_kvplugins.episodes.store import ClusteredHistory, ClusteringRecord
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.commands import Tokens
from vllm_kvplugins.sessions.file_contents import CONTENT_ERRORS
from vllm_kvplugins.sessions.files import Identity
from vllm_kvplugins.sessions.session_ids import ParsedId, bucket_start, digests_at
from vllm_kvplugins.sessions.tensor_file import SessionFileError

FORMAT = "kvp-clustering-1"
FILE_NAME = re.compile(r"(?P<id>[0-9a-f-]+)\.clustering\.safetensors")
SUFFIX = ".clustering.safetensors"


@dataclass(frozen=True, slots=True)
class AboutClustering:
    """What a file says about its clustering.

    Attributes:
        tokens: number of first tokens of the conversation when it was saved.
        tokens_digest: of these tokens.
    """

    num_segments: int
    tokens: int
    tokens_digest: str


def tokens_digests(tokens: Tokens, lengths: Sequence[int]) -> dict[int, str]:
    """Digests of first tokens, by number of tokens, as in files of clusterings."""
    return digests_at("", tokens, lengths)


def short_digest(digest: bytes) -> str:
    """A digest as it is in names."""
    return digest.hex()[:24]


def first_part_of_id(digests: Sequence[bytes]) -> str:
    """What all names of a clustering begin with; only a random part is missing."""
    n = len(digests)
    return (
        f"{short_digest(digests[bucket_start(n) - 1])}-{n}-{short_digest(digests[-1])}-"
    )


def parsed_id(name: str) -> ParsedId | None:
    """The parts of a name; None for other files."""
    parts = FILE_NAME.fullmatch(name)
    return None if parts is None else ParsedId.of(parts["id"])


def packed(
    record: ClusteringRecord, tokens: Tokens, identity: Identity
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Text and tensors of a clustering's file, with their digest.

    Args:
        tokens: int32 [n], token IDs of the history.
    """
    clustering, n = record.clustered.clustering, len(tokens)
    tensors = {
        "labels": torch.tensor(clustering.labels, dtype=torch.int64),
        "centroids": torch.tensor(clustering.centroids, dtype=torch.float32),
        "medoids": torch.tensor(clustering.medoids, dtype=torch.int64),
    }
    about = {
        "format": FORMAT,
        "fingerprint": identity.fingerprint,
        "facts": json.dumps(identity.facts),
        "history": record.digests[-1].hex(),
        "guides": json.dumps(record.clustered.guides),
        "reason": clustering.reason,
        "tokens": str(n),
        "tokens_digest": tokens_digests(tokens, [n])[n],
    }
    return about | {"digest": tensor_file.digest(about, tensors)}, tensors


def about_clustering(name: str, about: Mapping[str, str]) -> AboutClustering:
    """What a file says about its clustering.

    Raises:
        SessionFileError: it is not in this format, or not a clustering.
    """
    if about.get("format") != FORMAT:
        raise SessionFileError(f"{name}: not in format {FORMAT}")
    parsed = parsed_id(name)
    try:
        segments = 0 if parsed is None else parsed.num_tokens
        return AboutClustering(segments, int(about["tokens"]), about["tokens_digest"])
    except CONTENT_ERRORS as error:
        raise SessionFileError(f"{name}: not a clustering ({error})") from error


def clustered(
    name: str, about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> ClusteredHistory:
    """The clustering of a file whose digest is correct.

    Raises:
        SessionFileError: it is not in this format, or not a clustering.
    """
    segments = about_clustering(name, about).num_segments
    try:
        labels, centroids, medoids = (
            tensors[key].numpy().copy() for key in ("labels", "centroids", "medoids")
        )
        guides = json.loads(about["guides"])
        reason = about["reason"]
    except CONTENT_ERRORS as error:
        raise SessionFileError(f"{name}: not a clustering ({error})") from error
    episodes = len(centroids) if centroids.ndim == 2 else 0
    fits = (
        episodes > 0
        and (labels.dtype, labels.shape) == (np.int64, (segments,))
        and (medoids.dtype, medoids.shape) == (np.int64, (episodes,))
        and centroids.dtype == np.float32
        and np.isfinite(centroids).all()
        and _are_indices(labels, episodes)
        and _are_indices(medoids, segments)
        and isinstance(guides, list)
        and len(guides) == episodes
        and all(isinstance(guide, str) and guide for guide in guides)
    )
    if not fits:
        raise SessionFileError(f"{name}: not a clustering (impossible values)")
    for array in (labels, centroids, medoids):
        array.setflags(write=False)  # threads share them
    return ClusteredHistory(
        Clustering(labels, centroids, medoids, reason), tuple(guides)
    )


def _are_indices(array: np.ndarray, count: int) -> bool:
    return bool(len(array)) and 0 <= int(array.min()) <= int(array.max()) < count
