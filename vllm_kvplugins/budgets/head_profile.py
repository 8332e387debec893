"""Head profiles of ``kvplugins research rank-heads``. Needs no torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_kvplugins.budgets.profile_files import read_as, shipped, write_as_json
from vllm_kvplugins.model_config import ModelFingerprint

RANK_HEADS = "kvplugins research rank-heads MODEL -o heads.json"


class RepeatedDocument(BaseModel):
    """A text that the model repeated.

    Attributes:
        name: of its file, without folders.
        tokens: number of tokens that were repeated.
        sha256: of the whole text in UTF-8.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tokens: int = Field(ge=1)
    sha256: str


class HeadProfile(BaseModel):
    """The contents of a head profile.

    Attributes:
        plugin: version of this package.
        model: name of the model that was measured.
        dtype: of weights and keys.
        scores: per layer and KV head, how much the head looks back at the text while
            the model repeats it, in [0, 1]; the mean over documents.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["kvplugins-heads"] = "kvplugins-heads"
    version: Literal[1] = 1
    plugin: str
    model: str
    fingerprint: ModelFingerprint
    dtype: str
    documents: tuple[RepeatedDocument, ...] = Field(min_length=1)
    scores: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _consistent(self) -> HeadProfile:
        layers, heads = self.fingerprint.num_layers, self.fingerprint.num_kv_heads
        if len(self.scores) != layers:
            raise ValueError(f"scores of {len(self.scores)} layers for {layers} layers")
        for row in self.scores:
            if len(row) != heads:
                raise ValueError(f"{len(row)} scores for {heads} KV heads")
            # a small excess is rounding; also refuses NaN
            if not all(0 <= score <= 1 + 1e-3 for score in row):
                raise ValueError(f"a score must be in [0, 1], got {list(row)}")
        return self


def mean_scores(
    documents: list[tuple[tuple[float, ...], ...]],
) -> tuple[tuple[float, ...], ...]:
    """Scores of each layer and KV head, averaged over documents."""
    return tuple(
        tuple(math.fsum(column) / len(documents) for column in zip(*rows, strict=True))
        for rows in zip(*documents, strict=True)
    )


def write_head_profile(profile: HeadProfile, path: Path) -> None:
    """Write a file for ``read_head_profile``. Readers see the old or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    write_as_json(profile, path)


def read_head_profile(path: Path) -> HeadProfile:
    """Read a profile written by ``write_head_profile``.

    Raises:
        KVPolicyError: the file cannot be read or is not a profile of this version.
    """
    return read_as(HeadProfile, path, "head profile", f"make one with `{RANK_HEADS}`")


def shipped_head_profiles() -> list[Path]:
    """Paths of the head profiles in this package, by name."""
    return shipped("head_profiles")


def shipped_head_profile(model: ModelFingerprint) -> Path | None:
    """Path of the shipped head profile for a model; None if there is none."""
    for path in shipped_head_profiles():
        if not read_head_profile(path).fingerprint.differences(model):
            return path
    return None
