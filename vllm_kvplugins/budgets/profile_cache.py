"""Measured sensitivity profiles in the user's cache. Needs no torch.

One file per model in ``~/.cache/vllm_kvplugins/sensitivity``, ``NAME-DIGEST.json`` with
the digest of the model's fingerprint. Models with equal fingerprints, such as a base
model and its fine-tuned versions, share a profile, as they share a shipped one.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvplugins.budgets.sensitivity_profile import (
    SensitivityProfile,
    read_profile,
    write_profile,
)
from vllm_kvplugins.calibration_job import JobFiles, forget_failure
from vllm_kvplugins.default_model import cache_dir
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.model_config import ModelFingerprint

_DIGEST_LENGTH = 16
_SNAPSHOTS = "snapshots"  # models--OWNER--NAME/snapshots/REVISION, of Hugging Face


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the cache has for a model.

    Attributes:
        path: of ``profile``.
        profile: None if there is no usable one.
        problems: one sentence with a code per file that cannot be used.
        foreign: the first file that is the profile of another model.
    """

    path: Path | None = None
    profile: SensitivityProfile | None = None
    problems: tuple[str, ...] = ()
    foreign: Path | None = None


def cache_folder() -> Path:
    """Folder of the measured profiles; may not exist."""
    return cache_dir() / "sensitivity"


def model_name(model: str) -> str:
    """Name of a model for people, also of a snapshot in the Hugging Face cache.

    Args:
        model: a folder or a Hugging Face ID.
    """
    path = Path(model).expanduser().absolute()
    if path.parent.name == _SNAPSHOTS:
        return path.parents[1].name.rpartition("--")[2]
    return path.name


def job_files(model: str, fingerprint: ModelFingerprint) -> JobFiles:
    """Where the profile of a model belongs, and the files of its measurement."""
    name = re.sub(r"[^\w.-]", "-", model_name(model)).lstrip(".") or "model"
    return JobFiles(cache_folder() / f"{name}-{_digest(fingerprint)}.json")


def cached_profile(fingerprint: ModelFingerprint) -> Lookup:
    """Look for a usable profile of a model. Never fails on the content of a file."""
    problems, foreign = [], None
    for path in sorted(cache_folder().glob(f"*-{_digest(fingerprint)}.json")):
        try:
            profile = read_profile(path)
        except KVPolicyError as error:
            problems.append(_unusable(path, str(error)))
            continue
        different = profile.fingerprint.differences(fingerprint)
        if not different:
            return Lookup(path, profile, tuple(problems), foreign)
        foreign = foreign or path
        reason = f"it belongs to another model ({'; '.join(different)})"
        problems.append(_unusable(path, reason))
    return Lookup(problems=tuple(problems), foreign=foreign)


def store(profile: SensitivityProfile, model: str) -> Path:
    """Write a profile into the cache, in place of an earlier one or of a failure.

    Returns:
        The path of the file.

    Raises:
        OSError: the file cannot be written.
    """
    files = job_files(model, profile.fingerprint)
    files.profile.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, files.profile)
    forget_failure(files)
    return files.profile


def _unusable(path: Path, reason: str) -> str:
    return coded(
        "KVP117",
        f"the cached sensitivity profile {path} is ignored: {reason}; remove the file, "
        "or measure again with `kvplugins research calibrate MODEL`",
    )


def _digest(fingerprint: ModelFingerprint) -> str:
    content = _with_floats(fingerprint.model_dump(mode="json"))
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


def _with_floats(value: Any) -> Any:
    """The same with equal numbers written equally: 10000 is 10000.0 in some files."""
    if isinstance(value, dict):
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
