"""Session files: one safetensors file per session and rank.

::

    DIR/<fingerprint>/<session>.r0of1.safetensors      or URL/<fingerprint>/...
                               rank 0 of the 1 rank of the engine that wrote it

An engine of another tensor-parallel size reads the same files, if the policy allows it
(``head_shards``). They stay as they are.

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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.head_shards import Heads, Shard, gather
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
FILE_NAME = re.compile(
    r"(?P<session>[^.]+)\.r(?P<rank>\d+)of(?P<ranks>\d+)\.safetensors"
)
_OBSERVED = "observed"
# Of a file, besides what the session's size says.
_MAX_MORE_BYTES = 1 << 20
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
class SessionParts:
    """The files of a session: the parts of all ranks that wrote it.

    Attributes:
        ranks: number of these ranks.
        num_bytes: size of all files.
        modified: of the newest one; see ``StoredFile``.
    """

    session_id: str
    ranks: int
    num_bytes: int
    modified: float


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

    Methods that take ``ranks`` also read or delete what an engine with so many ranks
    wrote; None: this engine's number.

    Args:
        ranks: number of workers; each writes its part of every session.
        heads: the KV heads of the model, if sessions of other sizes can be read; None:
            they cannot.
    """

    def __init__(
        self,
        storage: SessionStorage,
        identity: Identity,
        ranks: int = 1,
        heads: Heads | None = None,
    ) -> None:
        self.storage = storage
        self.identity = identity
        self.ranks = ranks
        self.heads = heads

    def name(self, session_id: str, rank: int, ranks: int | None = None) -> str:
        """The name of the file of a rank's part of a session."""
        return f"{session_id}.r{rank}of{ranks or self.ranks}{_SUFFIX}"

    def reads(self, ranks: int) -> bool:
        """Whether this engine reads sessions that so many ranks wrote."""
        if ranks == self.ranks or self.heads is None:
            return ranks == self.ranks
        return self.heads.fit(ranks) and self.heads.fit(self.ranks)

    def max_bytes(self, session: Session, ranks: int) -> int:
        """Most that the files of a session can take, if its header is right.

        Ranks that have the same KV head write it several times.
        """
        copies = self.heads.copies(ranks) if self.heads is not None else 1
        return 2 * copies * session.num_bytes + ranks * _MAX_MORE_BYTES

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

    def read(
        self, session_id: str, rank: int, ranks: int | None = None
    ) -> CacheSnapshot:
        """Read a rank's part of a session; of another size's files, those that have it.

        Args:
            rank: of this engine.

        Raises:
            SessionFileError: a file is missing, damaged, or of another engine, or the
                parts of other ranks cannot be cut or joined.
            OSError: the storage failed.

        Cost: files of another size are read whole, one after the other.
        """
        if ranks is None or ranks == self.ranks:
            return self._read_part(session_id, rank, self.ranks)
        if self.heads is None or not self.reads(ranks):
            name = self.name(session_id, 0, ranks)
            raise SessionFileError(f"{name}: not readable with {self.ranks} ranks")
        read = partial(self._read_part, session_id, ranks=ranks)
        try:
            return gather(self.heads, Shard(rank, self.ranks), ranks, read)
        except ValueError as error:
            name = self.name(session_id, 0, ranks)
            raise SessionFileError(
                f"{name}: not readable with {self.ranks} ranks ({error})"
            ) from error

    def _read_part(self, session_id: str, rank: int, ranks: int) -> CacheSnapshot:
        """What one of ``ranks`` ranks wrote."""
        name = self.name(session_id, rank, ranks)
        about, tensors = verified(self.storage, name)
        self._check(name, about)
        if about.get("session") != session_id:
            raise SessionFileError(f"{name}: contains another session")
        self.storage.touch(name)  # its time is the session's last use
        try:
            return _saved(about, tensors)
        except CONTENT_ERRORS as error:
            raise SessionFileError(f"{name}: not a session ({error})") from error

    def unlink(self, session_id: str, rank: int, ranks: int | None = None) -> None:
        """Delete a rank's part of a session, if it exists.

        Of another size's files, each of this engine's ranks deletes some.
        """
        for part in range(rank, ranks or self.ranks, self.ranks):
            self.storage.delete(self.name(session_id, part, ranks))

    def scan(self) -> Scan:
        """Find all sessions.

        A file from the future, as after the system's date was set back, was used just
        now.
        """
        found, now = Scan(), time.time()
        files = {file.name: file for file in self.storage.list()}
        known = set[str]()
        for name in sorted(files, key=lambda name: files[name].modified):
            parsed = FILE_NAME.fullmatch(name)
            if parsed is None or parsed["rank"] != "0":
                continue
            session_id, ranks = parsed["session"], int(parsed["ranks"])
            if not self.reads(ranks) or session_id in known:
                continue
            used = files[name].modified
            try:
                parts = self._complete(session_id, ranks, files)
                session = self.read_session(session_id, ranks)
            except SessionFileError as error:
                found.problems.append(error)
                continue
            known.add(session_id)
            size = sum(files.pop(part).num_bytes for part in parts)
            found.sessions.append(FoundSession(session, max(now - used, 0.0), size))
        found.other_bytes = sum(file.num_bytes for file in files.values())
        return found

    def _complete(
        self, session_id: str, ranks: int, files: Mapping[str, StoredFile]
    ) -> list[str]:
        """Names of the files of a session.

        Raises:
            SessionFileError: the part of a rank is missing.
        """
        parts: list[str] = []
        for rank in range(ranks):
            parts.append(self.name(session_id, rank, ranks))
            if parts[-1] not in files:
                raise SessionFileError(
                    f"{parts[0]}: the part of rank {rank} is missing"
                )
        return parts

    def list_complete(self, prefix: str = "") -> dict[str, SessionParts]:
        """Sessions whose IDs begin with a prefix, without reading their files.

        Returns:
            For each ID with the parts of all ranks that wrote it: these parts.

        Raises:
            OSError: the storage failed.
        """
        found: dict[str, SessionParts] = {}
        for (session_id, ranks), files in self._by_writer(prefix).items():
            names = {file.name for file in files}
            if len(files) != ranks or names != {
                self.name(session_id, rank, ranks) for rank in range(ranks)
            }:
                continue
            if session_id not in found or ranks == self.ranks:
                found[session_id] = SessionParts(
                    session_id,
                    ranks,
                    sum(file.num_bytes for file in files),
                    max(file.modified for file in files),
                )
        return found

    def _by_writer(self, prefix: str) -> dict[tuple[str, int], list[StoredFile]]:
        """Files that are not empty, by session and number of ranks, if readable."""
        groups: dict[tuple[str, int], list[StoredFile]] = {}
        for file in self.storage.list(prefix):
            name = FILE_NAME.fullmatch(file.name)
            if name is not None and self.reads(int(name["ranks"])) and file.num_bytes:
                writer = name["session"], int(name["ranks"])
                groups.setdefault(writer, []).append(file)
        return groups

    def read_session(self, session_id: str, ranks: int | None = None) -> Session:
        """A session without its keys and values, from the first rank's file.

        Raises:
            SessionFileError: the file is missing, damaged, or of another engine.
            OSError: the storage failed.
        """
        name = self.name(session_id, 0, ranks)
        about, tensors = self.storage.read(name, only=("tokens",))
        self._check(name, about)
        session = checked_session(name, about, tensors["tokens"])
        if session.session_id != session_id:
            raise SessionFileError(f"{name}: contains another session")
        return session if ranks == self.ranks else replace(session, file_ranks=ranks)

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

    def __init__(
        self,
        root: Path,
        identity: Identity,
        ranks: int = 1,
        heads: Heads | None = None,
    ) -> None:
        self.folder = root / identity.fingerprint
        super().__init__(DirectoryStorage(root, self.folder), identity, ranks, heads)

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
