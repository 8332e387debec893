"""Session files: one safetensors file per session and rank.

::

    DIR/<fingerprint>/<session>.r0of1.safetensors      or URL/<fingerprint>/...

A file contains a digest of its contents, and one of what a scan reads: text and tokens.
Files of another program, model, policy or layout, damaged files, links and pipes are
never loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.settings import SessionDtype
from vllm_kvplugins.sessions.snapshot import CacheSnapshot, HeapPart
from vllm_kvplugins.sessions.storage import (
    DirectoryStorage,
    SessionStorage,
    StoredFile,
)
from vllm_kvplugins.sessions.tensor_file import SessionFileError

FORMAT = "kvp-session-4"
_SUFFIX = ".safetensors"
FILE_NAME = re.compile(r"(?P<session>[^.]+)\.r\d+of(?P<ranks>\d+)\.safetensors")
_OBSERVED = "observed"
_QUERIES_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What a file of valid digests and other meaning raises.
CONTENT_ERRORS = (KeyError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that must be equal in the engines that save and load a cache.

    Attributes:
        facts: names and values, sorted: model, policy, dtype, block size, versions.
    """

    facts: tuple[tuple[str, str], ...]

    @staticmethod
    def of(**facts: Any) -> Identity:
        return Identity(tuple(sorted((k, str(v)) for k, v in facts.items())))

    @property
    def fingerprint(self) -> str:
        """Digest of all facts; the name of a directory."""
        return hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class FoundSession:
    """A session in a folder.

    Attributes:
        age_s: seconds since its last use.
        file_bytes: size of its files, over all ranks.
    """

    session: Session
    age_s: float
    file_bytes: int


@dataclass(slots=True)
class Scan:
    """What is in a folder.

    Attributes:
        sessions: those that can be loaded, least recently used first.
        problems: files that look like sessions and cannot be loaded.
        other_bytes: size of all other files: damaged and foreign ones, and temporary
            ones that could not be removed.
    """

    sessions: list[FoundSession] = field(default_factory=list)
    problems: list[SessionFileError] = field(default_factory=list)
    other_bytes: int = 0


class SessionFiles:
    """The session files of one engine, in a storage.

    Args:
        ranks: number of workers; each writes its part of every session.
    """

    def __init__(
        self, storage: SessionStorage, identity: Identity, ranks: int = 1
    ) -> None:
        self.storage = storage
        self.identity = identity
        self.ranks = ranks

    def name(self, session_id: str, rank: int) -> str:
        """The name of the file of a rank's part of a session."""
        return f"{session_id}.r{rank}of{self.ranks}{_SUFFIX}"

    def prepare(self) -> None:
        """Create the folder, and check that it can be written to.

        Raises:
            OSError: it cannot.
        """
        self.storage.prepare()

    def write(self, session: Session, rank: int, saved: CacheSnapshot) -> int:
        """Write a rank's part of a session.

        Returns:
            The size of its file.

        Raises:
            OSError: there is no room or no permission; no file remains.
        """
        tensors = _tensors(session, saved)
        about = {
            "format": FORMAT,
            "fingerprint": self.identity.fingerprint,
            "facts": json.dumps(self.identity.facts),
            "session": session.session_id,
            "owner": session.owner,
            "num_bytes": str(session.num_bytes),
            "first_query": str(session.first_query),
            "compaction": json.dumps(_packed(session.compaction)),
            "dtype": saved.dtype,
            "queries_dtype": str(saved.queries_dtype).removeprefix("torch."),
        }
        for index, part in enumerate(saved.parts):
            about[_part_name("layout", index)] = part.layout
        about["header"] = tensor_file.digest(about, {"tokens": tensors["tokens"]})
        about["digest"] = tensor_file.digest(about, tensors)
        return self.storage.write(self.name(session.session_id, rank), tensors, about)

    def read(self, session_id: str, rank: int) -> CacheSnapshot:
        """Read a rank's part of a session.

        Raises:
            SessionFileError: the file is missing, damaged, or of another engine.
            OSError: the storage failed.
        """
        name = self.name(session_id, rank)
        about, tensors = verified(self.storage, name)
        self._check(name, about)
        if about.get("session") != session_id:
            raise SessionFileError(f"{name}: contains another session")
        self.storage.touch(name)  # its time is the session's last use
        try:
            return _saved(about, tensors)
        except CONTENT_ERRORS as error:
            raise SessionFileError(f"{name}: not a session ({error})") from error

    def unlink(self, session_id: str, rank: int) -> None:
        """Delete a rank's part of a session, if it exists."""
        self.storage.delete(self.name(session_id, rank))

    def scan(self) -> Scan:
        """Find all sessions.

        A file from the future, as after the system's date was set back, was used just
        now.
        """
        found, now = Scan(), time.time()
        files = {file.name: file for file in self.storage.list()}
        suffix = f".r0of{self.ranks}{_SUFFIX}"
        for name in sorted(files, key=lambda name: files[name].modified):
            if not name.endswith(suffix):
                continue
            session_id, used = name.removesuffix(suffix), files[name].modified
            parts = [self.name(session_id, rank) for rank in range(self.ranks)]
            try:
                _check_complete(parts, files)
                session = self.read_session(session_id)
            except SessionFileError as error:
                found.problems.append(error)
                continue
            size = sum(files.pop(part).num_bytes for part in parts)
            found.sessions.append(FoundSession(session, max(now - used, 0.0), size))
        found.other_bytes = sum(file.num_bytes for file in files.values())
        return found

    def list_complete(self, prefix: str = "") -> dict[str, StoredFile]:
        """Sessions whose IDs begin with a prefix, without reading their files.

        Returns:
            For each ID with the parts of all ranks: the size of all parts, and the time
            of the newest one.

        Raises:
            OSError: the storage failed.
        """
        parts: dict[str, list[StoredFile]] = {}
        for file in self.storage.list(prefix):
            name = FILE_NAME.fullmatch(file.name)
            is_part = name is not None and int(name["ranks"]) == self.ranks
            if name is not None and is_part and file.num_bytes:
                parts.setdefault(name["session"], []).append(file)
        return {
            session_id: StoredFile(
                session_id,
                sum(file.num_bytes for file in files),
                max(file.modified for file in files),
            )
            for session_id, files in parts.items()
            if len(files) == self.ranks
        }

    def read_session(self, session_id: str) -> Session:
        """A session without its keys and values, from the first rank's file.

        Raises:
            SessionFileError: the file is missing, damaged, or of another engine.
            OSError: the storage failed.
        """
        name = self.name(session_id, 0)
        about, tensors = self.storage.read(name, only=("tokens",))
        self._check(name, about)
        session = checked_session(name, about, tensors["tokens"])
        if session.session_id != session_id:
            raise SessionFileError(f"{name}: contains another session")
        return session

    def _check(self, name: str, about: Mapping[str, str]) -> None:
        if about.get("format") != FORMAT:
            raise SessionFileError(f"{name}: not in format {FORMAT}")
        if about.get("fingerprint") != self.identity.fingerprint:
            raise SessionFileError(f"{name}: from another model, policy or version")


class SessionFolder(SessionFiles):
    """The session files of one engine, in a folder that its identity names.

    Args:
        root: ``session_dir``.
    """

    def __init__(self, root: Path, identity: Identity, ranks: int = 1) -> None:
        self.folder = root / identity.fingerprint
        super().__init__(DirectoryStorage(root, self.folder), identity, ranks)

    def prepare(self) -> None:
        """Create the folder, readable only by its owner, and remove leftovers.

        Raises:
            KVPolicyError: it cannot be created or written to.
        """
        try:
            super().prepare()
        except OSError as error:
            text = (
                f"session_dir {str(self.folder.parent)!r} cannot be written to: "
                f"{error}; choose another directory, or remove session_dir"
            )
            raise KVPolicyError(coded("KVP304", text)) from error

    def path(self, session_id: str, rank: int) -> Path:
        """The file of a rank's part of a session."""
        return self.folder / self.name(session_id, rank)


def _check_complete(parts: list[str], files: Mapping[str, StoredFile]) -> None:
    """Refuse a session of which a rank's part is missing.

    Args:
        parts: names of its files, rank by rank.
    """
    for rank, part in enumerate(parts):
        if part not in files:
            raise SessionFileError(f"{parts[0]}: the part of rank {rank} is missing")


# -- one file ------------------------------------------------------------------------


def _tensors(session: Session, saved: CacheSnapshot) -> dict[str, torch.Tensor]:
    tensors = {"tokens": torch.from_numpy(session.tokens.astype(np.int32))}
    for index, part in enumerate(saved.parts):
        for key, name in _PART_TENSORS.items():
            tensors[_part_name(key, index)] = getattr(part, name)
    if saved.queries is not None:
        tensors["queries"] = saved.queries
    for layer, packed in saved.observed.items():
        for name, tensor in packed.items():
            tensors[f"{_OBSERVED}.{layer}.{name}"] = tensor
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


# Key in files -> field. Files of earlier versions call the retained region "zone", and
# they must stay loadable.
_PART_TENSORS = {
    "counts": "counts",
    "positions": "positions",
    "zone": "retained",
    "tail": "tail",
}


def _part_name(key: str, index: int) -> str:
    """The name of a tensor or a text of a snapshot's part."""
    return f"{key}.{index}" if index else key  # files without a drafter have one part


def _parts(
    about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> tuple[HeapPart, ...]:
    parts: list[HeapPart] = []
    while not parts or _part_name("layout", len(parts)) in about:
        index = len(parts)
        fields = {
            name: tensors[_part_name(key, index)] for key, name in _PART_TENSORS.items()
        }
        parts.append(HeapPart(**fields, layout=about[_part_name("layout", index)]))
    return tuple(parts)


def _session_dtype(name: str) -> SessionDtype:
    if name not in get_args(SessionDtype):
        raise ValueError(f"stored as {name!r}")
    return cast(SessionDtype, name)


def _saved(about: Mapping[str, str], tensors: dict[str, torch.Tensor]) -> CacheSnapshot:
    observed: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == _OBSERVED:
            layer, _, part = rest.partition(".")
            observed.setdefault(int(layer), {})[part] = tensor
    return CacheSnapshot(
        tokens=tensors["tokens"].numel(),
        compaction=_unpacked(json.loads(about["compaction"])),
        parts=_parts(about, tensors),
        dtype=_session_dtype(about["dtype"]),
        queries_dtype=_QUERIES_DTYPES[about["queries_dtype"]],
        queries=tensors.get("queries"),
        observed=observed,
    )


def checked_session(
    name: str, about: Mapping[str, str], tokens: torch.Tensor
) -> Session:
    """The session of a file whose keys and values have not been read.

    Raises:
        SessionFileError: text or tokens have changed, or are not those of a session.
    """
    text = {key: about[key] for key in about if key not in ("header", "digest")}
    if about.get("header") != tensor_file.digest(text, {"tokens": tokens}):
        raise SessionFileError(f"{name}: its header has changed")
    try:
        session = _session(text, tokens)
    except CONTENT_ERRORS as error:
        raise SessionFileError(f"{name}: not a session ({error})") from error
    n = len(session.tokens)
    if (
        session.num_bytes < 1
        or not 0 <= session.first_query <= n
        or not 0 <= session.compacted_at <= n
    ):
        raise SessionFileError(f"{name}: not a session (impossible sizes)")
    return session


def _session(about: Mapping[str, str], tokens: torch.Tensor) -> Session:
    if tokens.dtype != torch.int32 or tokens.ndim != 1:
        raise ValueError(f"tokens are {tokens.dtype} {list(tokens.shape)}")
    ids: Tokens = tokens.numpy().copy()
    return Session(
        session_id=about["session"],
        owner=about["owner"],
        tokens=ids,
        compaction=_unpacked(json.loads(about["compaction"])),
        num_bytes=int(about["num_bytes"]),
        first_query=int(about["first_query"]),
    )


# Key in files -> field, as in _PART_TENSORS.
_SPANS = {"candidates": "candidates", "zone": "retained"}


def _packed(compaction: Compaction | None) -> dict[str, Any] | None:
    if compaction is None:
        return None
    fields = asdict(compaction)
    del fields["whole_tokens"]  # it has run
    return fields | {key: fields.pop(name) for key, name in _SPANS.items()}


def _unpacked(packed: dict[str, Any] | None) -> Compaction | None:
    if packed is None:
        return None
    spans = {name: BlockSpan(**packed[key]) for key, name in _SPANS.items()}
    numbers = {key: value for key, value in packed.items() if key not in _SPANS}
    return Compaction(**(numbers | spans))


def verified(
    storage: SessionStorage, name: str
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Text and tensors of a file whose digest is correct.

    Raises:
        SessionFileError: it is missing or damaged.
        OSError: the storage failed.
    """
    about, tensors = storage.read(name)
    digest = about.pop("digest", None)
    if digest != tensor_file.digest(about, tensors):
        raise SessionFileError(f"{name}: its contents have changed")
    return about, tensors
