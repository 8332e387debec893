"""Sensitivity profiles of ``kvplugins research calibrate``. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_kvplugins.budgets.profile_files import read_as, shipped, write_as_json
from vllm_kvplugins.model_config import ModelFingerprint

_REMEDY = "make one with `kvplugins research calibrate MODEL -o profile.json`"


class MeasureSettings(BaseModel):
    """Settings of a measurement.

    Attributes:
        budget: M, number of tokens that a query of the second pass attends to, with
            itself and the sinks.
        sinks: number of first tokens that all queries attend to.
        dtype: of weights and keys.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int = Field(ge=1)
    sinks: int = Field(ge=0)
    dtype: str

    @model_validator(mode="after")
    def _leaves_recent_tokens(self) -> MeasureSettings:
        if self.sinks >= self.budget:
            raise ValueError(
                f"{self.sinks} sinks leave nothing of a budget of {self.budget} tokens "
                "for the most recent tokens; give fewer sinks"
            )
        return self


class DocumentSensitivity(BaseModel):
    """The measurement of one document.

    Attributes:
        name: of its file, without folders.
        tokens: number of tokens that were read.
        sha256: of the whole text in UTF-8.
        sensitivity: s_l = 1 - sigma_l per layer (equation 9).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    tokens: int = Field(ge=1)
    sha256: str
    sensitivity: tuple[float, ...]


class SensitivityProfile(BaseModel):
    """The contents of a profile file.

    Attributes:
        model: name of the model that was measured.
        sensitivity: per layer, the mean over documents (algorithm 1, line 11).
        plugin: version of this package.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["kvplugins-sensitivity"] = "kvplugins-sensitivity"
    version: Literal[1] = 1
    plugin: str
    model: str
    fingerprint: ModelFingerprint
    settings: MeasureSettings
    documents: tuple[DocumentSensitivity, ...] = Field(min_length=1)
    sensitivity: tuple[float, ...]

    @model_validator(mode="after")
    def _consistent(self) -> SensitivityProfile:
        layers = self.fingerprint.num_layers
        for row in (self.sensitivity, *(d.sensitivity for d in self.documents)):
            if len(row) != layers:
                raise ValueError(f"{len(row)} sensitivities for {layers} layers")
            # a cosine is in [-1, 1]; also refuses NaN
            if not all(0 <= value <= 2 for value in row):
                raise ValueError(f"a sensitivity must be in [0, 2], got {list(row)}")
        return self


def mean_sensitivity(documents: list[DocumentSensitivity]) -> tuple[float, ...]:
    """Mean sensitivity per layer, over documents (algorithm 1, line 11)."""
    columns = zip(*(document.sensitivity for document in documents), strict=True)
    return tuple(sum(column) / len(documents) for column in columns)


def write_profile(profile: SensitivityProfile, path: Path) -> None:
    """Write a file for ``read_profile``. Readers see the old file or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    write_as_json(profile, path)


def read_profile(path: Path) -> SensitivityProfile:
    """Read a profile written by ``write_profile``.

    Raises:
        KVPolicyError: the file cannot be read or is not a profile of this version.
    """
    return read_as(SensitivityProfile, path, "sensitivity profile", _REMEDY)


def shipped_profiles() -> list[Path]:
    """Paths of the profiles in this package, by name."""
    return shipped("profiles")


def shipped_profile(model: ModelFingerprint) -> Path | None:
    """Path of the shipped profile for a model; None if there is none."""
    for path in shipped_profiles():
        if not read_profile(path).fingerprint.differences(model):
            return path
    return None
