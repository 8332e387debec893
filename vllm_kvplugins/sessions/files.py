"""Sessions on disk: one safetensors file per session and rank.

::

    DIR/<fingerprint>/<session>.r0of1.safetensors

A file contains a digest of its contents, and one of what a scan reads: text and tokens.
Files of another program, model, policy or layout, damaged files, links and pipes are
never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
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
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.tensor_file import SessionFileError

FORMAT = "kvp-session-4"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"(?P<session>[^.]+)\.r\d+of(?P<ranks>\d+)\.safetensors")
_OBSERVED = "observed"
_QUERIES_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WRITE_S = 3600.0  # all ranks have written their parts of a session by then
# What a file of valid digests and other meaning raises.
_CONTENT_ERRORS = (KeyError, TypeError, ValueError, AttributeError)


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


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """The files of one engine's sessions.

    Attributes:
        root: ``session_dir``.
        ranks: number of workers; each writes its part of every session.
    """

    root: Path
    identity: Identity
    ranks: int = 1

    @property
    def folder(self) -> Path:
        """Folder of this engine's files, named by its identity."""
        return self.root / self.identity.fingerprint

    def path(self, session_id: str, rank: int) -> Path:
        """The file of a rank's part of a session."""
        return self.folder / f"{session_id}.r{rank}of{self.ranks}{_SUFFIX}"

    def prepare(self) -> None:
        """Create the folder, readable only by its owner, and remove leftovers.

        Raises:
            KVPolicyError: it cannot be created or written to.
        """
        try:
            # A mode applies to the last folder of a path only.
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
            remove_leftovers(self.folder)
        except OSError as error:
            text = (
                f"session_dir {str(self.root)!r} cannot be written to: {error}; "
                "choose another directory, or remove session_dir"
            )
            raise KVPolicyError(coded("KVP304", text)) from error

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
            "layout": saved.layout,
            "dtype": saved.dtype,
            "queries_dtype": str(saved.queries_dtype).removeprefix("torch."),
        }
        about["header"] = tensor_file.digest(about, {"tokens": tensors["tokens"]})
        about["digest"] = tensor_file.digest(about, tensors)
        return tensor_file.write(self.path(session.session_id, rank), tensors, about)

    def read(self, session_id: str, rank: int) -> CacheSnapshot:
        """Read a rank's part of a session.

        Raises:
            SessionFileError: the file is missing, damaged, or of another engine.
        """
        path = self.path(session_id, rank)
        about, tensors = _verified(path)
        self._check(path, about)
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of the file is the session's last use
        try:
            return _saved(about, tensors)
        except _CONTENT_ERRORS as error:
            raise SessionFileError(f"{path.name}: not a session ({error})") from error

    def unlink(self, session_id: str, rank: int) -> None:
        """Delete a rank's part of a session, if it exists."""
        self.path(session_id, rank).unlink(missing_ok=True)

    def scan(self) -> Scan:
        """Find all sessions.

        A file from the future, as after the system's date was set back, was used just
        now.
        """
        found, now = Scan(), time.time()
        files = {path.name: status for path, status in _files_in(self.folder)}
        suffix = f".r0of{self.ranks}{_SUFFIX}"
        for name in sorted(files, key=lambda name: files[name].st_mtime):
            if not name.endswith(suffix):
                continue
            session_id, used = name.removesuffix(suffix), files[name].st_mtime
            parts = [self.path(session_id, rank).name for rank in range(self.ranks)]
            try:
                session = self._scan_file(session_id, parts, files)
            except SessionFileError as error:
                found.problems.append(error)
                continue
            size = sum(files.pop(part).st_size for part in parts)
            found.sessions.append(FoundSession(session, max(now - used, 0.0), size))
        found.other_bytes = sum(status.st_size for status in files.values())
        return found

    def _scan_file(
        self, session_id: str, parts: list[str], files: Mapping[str, os.stat_result]
    ) -> Session:
        """The session of a file, without its keys and values.

        Args:
            parts: names of its files, rank by rank.
        """
        for rank, part in enumerate(parts):
            if part not in files:
                raise SessionFileError(
                    f"{parts[0]}: the part of rank {rank} is missing"
                )
        path = self.folder / parts[0]
        about, tensors = tensor_file.read(path, only=("tokens",))
        self._check(path, about)
        session = _checked_session(path, about, tensors["tokens"])
        if session.session_id != session_id:
            raise SessionFileError(f"{path.name}: contains another session")
        return session

    def _check(self, path: Path, about: Mapping[str, str]) -> None:
        if about.get("format") != FORMAT:
            raise SessionFileError(f"{path.name}: not in format {FORMAT}")
        if about.get("fingerprint") != self.identity.fingerprint:
            raise SessionFileError(
                f"{path.name}: from another model, policy or version"
            )


# -- one file ------------------------------------------------------------------------


def _tensors(session: Session, saved: CacheSnapshot) -> dict[str, torch.Tensor]:
    tensors = {
        "tokens": torch.from_numpy(session.tokens.astype(np.int32)),
        "counts": saved.counts,
        "positions": saved.positions,
        "zone": saved.retained,
        "tail": saved.tail,
    }
    if saved.queries is not None:
        tensors["queries"] = saved.queries
    for layer, packed in saved.observed.items():
        for name, tensor in packed.items():
            tensors[f"{_OBSERVED}.{layer}.{name}"] = tensor
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


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
        counts=tensors["counts"],
        positions=tensors["positions"],
        retained=tensors["zone"],
        tail=tensors["tail"],
        layout=about["layout"],
        dtype=_session_dtype(about["dtype"]),
        queries_dtype=_QUERIES_DTYPES[about["queries_dtype"]],
        queries=tensors.get("queries"),
        observed=observed,
    )


def _checked_session(
    path: Path, about: Mapping[str, str], tokens: torch.Tensor
) -> Session:
    """The session of a file whose keys and values have not been read.

    Raises:
        SessionFileError: text or tokens have changed, or are not those of a session.
    """
    text = {key: about[key] for key in about if key not in ("header", "digest")}
    if about.get("header") != tensor_file.digest(text, {"tokens": tokens}):
        raise SessionFileError(f"{path.name}: its header has changed")
    try:
        session = _session(text, tokens)
    except _CONTENT_ERRORS as error:
        raise SessionFileError(f"{path.name}: not a session ({error})") from error
    n = len(session.tokens)
    if (
        session.num_bytes < 1
        or not 0 <= session.first_query <= n
        or not 0 <= session.compacted_at <= n
    ):
        raise SessionFileError(f"{path.name}: not a session (impossible sizes)")
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


# Key in files -> field. Files of earlier versions call the retained region "zone", and
# they must stay loadable.
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


def _verified(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Text and tensors of a file whose digest is correct.

    Raises:
        SessionFileError: it is missing or damaged.
    """
    about, tensors = tensor_file.read(path)
    digest = about.pop("digest", None)
    if digest != tensor_file.digest(about, tensors):
        raise SessionFileError(f"{path.name}: its contents have changed")
    return about, tensors


# -- a whole directory, for the command line ---------------------------------------


def _files_in(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files of a folder and their status; without those that vanish meanwhile."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def remove_leftovers(folder: Path) -> int:
    """Delete temporary files of processes that no longer run.

    Returns:
        The number of deleted files.
    """
    removed = 0
    for path, _ in _files_in(folder):
        if tensor_file.is_temporary(path.name) and tensor_file.is_leftover(path):
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A session file in a directory, as ``kvplugins sessions`` lists it.

    Attributes:
        facts: of its identity.
        tokens: length of its session.
        last_used: seconds since the epoch.
        problem: why it cannot be loaded; None: its header is valid.
        damaged: no server can load it. Other files with a problem are of another
            version, or are no files.
    """

    path: Path
    session_id: str
    facts: dict[str, str]
    tokens: int
    num_bytes: int
    last_used: float
    problem: str | None = None
    damaged: bool = False


def list_files(root: Path) -> list[FoundFile]:
    """All session files under a directory, most recently used first."""
    found = [
        _found_file(path, status)
        for folder, _ in _files_in(root)
        for path, status in _files_in(folder)
        if _NAME.fullmatch(path.name)
    ]
    return sorted(found, key=lambda file: -file.last_used)


@dataclass(frozen=True, slots=True)
class Garbage:
    """Files that no server needs.

    Attributes:
        leftovers: temporary files of processes that no longer run.
        damaged: session files that cannot be loaded.
        incomplete: parts of sessions of which another rank's part is missing.
    """

    leftovers: list[Path]
    damaged: list[Path]
    incomplete: list[Path]


def find_garbage(root: Path) -> Garbage:
    """Files under a directory that no server needs.

    A session whose parts are being written is not garbage: a part of it is new.
    """
    damaged, parts = [], dict[tuple[Path, str], list[FoundFile]]()
    for file in list_files(root):
        if file.damaged:
            damaged.append(file.path)
        else:
            key = (file.path.parent, file.session_id)
            parts.setdefault(key, []).append(file)
    incomplete = [
        file.path
        for files in parts.values()
        if len(files) < _num_ranks(files[0].path)
        and time.time() - files[0].last_used > _WRITE_S
        for file in files
    ]
    leftovers = [
        path
        for folder, _ in _files_in(root)
        for path, _ in _files_in(folder)
        if tensor_file.is_temporary(path.name) and tensor_file.is_leftover(path)
    ]
    return Garbage(leftovers, damaged, incomplete)


def _num_ranks(path: Path) -> int:
    name = _NAME.fullmatch(path.name)
    assert name is not None, "not a session file"
    return int(name["ranks"])


def _found_file(path: Path, status: os.stat_result) -> FoundFile:
    session_id = path.name.split(".", 1)[0]
    facts: dict[str, str] = {}
    tokens, problem, damaged = 0, None, False
    try:
        about, tensors = tensor_file.read(path, only=("tokens",))
        damaged = about.get("format") == FORMAT
        if not damaged:
            raise SessionFileError(f"{path.name}: not in format {FORMAT}")
        session = _checked_session(path, about, tensors["tokens"])
        facts, tokens = dict(json.loads(about["facts"])), len(session.tokens)
        damaged = False
    except (SessionFileError, *_CONTENT_ERRORS) as error:
        problem = str(error)
        damaged = damaged or not tensor_file.is_readable(path)
    size, used = status.st_size, status.st_mtime
    return FoundFile(path, session_id, facts, tokens, size, used, problem, damaged)


def verify(path: Path) -> dict[str, str]:
    """Read a whole file and compare its digest.

    Returns:
        Its text.

    Raises:
        SessionFileError: it is damaged or not a session file.
    """
    return _verified(path)[0]
