"""Sessions on disk: one safetensors file per session and rank.

::

    DIR/<fingerprint>/<session>.r0of1.safetensors

A file is written under a temporary name and then renamed. It contains a digest of its
contents. Files of another program, model, policy or layout and damaged files are never
loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.sessions.commands import Session, Tokens
from vllm_kvplugins.sessions.snapshot import CacheSnapshot

FORMAT = "kvp-session-2"
_SUFFIX = ".safetensors"
_OBSERVED = "observed"


class SessionFileError(Exception):
    """A file that cannot be loaded; the message says why."""


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
        """Create the folder, readable only by its owner.

        Raises:
            KVPolicyError: it cannot be created or written to.
        """
        try:
            # A mode applies to the last folder of a path only.
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            text = (
                f"session_dir {str(self.root)!r} cannot be written to: {error}; "
                "choose another directory, or remove session_dir"
            )
            raise KVPolicyError(coded("KVP304", text)) from error

    def write(self, session: Session, rank: int, saved: CacheSnapshot) -> None:
        """Write a rank's part of a session.

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
        }
        about["digest"] = _digest(about, tensors)
        _write_atomically(self.path(session.session_id, rank), tensors, about)

    def read(self, session_id: str, rank: int) -> CacheSnapshot:
        """Read a rank's part of a session.

        Raises:
            SessionFileError: the file is missing, damaged, or of another engine.
        """
        path = self.path(session_id, rank)
        about, tensors = _read(path)
        self._check(path, about)
        digest = about.pop("digest", None)
        if digest != _digest(about, tensors):
            raise SessionFileError(f"{path.name}: its contents have changed")
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of the file is the session's last use
        return _saved(about, tensors)

    def unlink(self, session_id: str, rank: int) -> None:
        """Delete a rank's part of a session, if it exists."""
        self.path(session_id, rank).unlink(missing_ok=True)

    def scan(self) -> Iterator[tuple[Session, float] | SessionFileError]:
        """Find all sessions, least recently used first.

        Yields:
            A session and its age, in seconds since its last use; or an error for a file
            that cannot be loaded or whose parts are incomplete. A file from the future,
            as after the system's date was set back, was used just now.
        """
        now = time.time()
        suffix = f".r0of{self.ranks}{_SUFFIX}"
        paths = {p: p.stat().st_mtime for p in self.folder.glob(f"*{suffix}")}
        for path in sorted(paths, key=paths.__getitem__):
            session_id = path.name.removesuffix(suffix)
            try:
                for rank in range(1, self.ranks):
                    if not self.path(session_id, rank).exists():
                        raise SessionFileError(
                            f"{path.name}: the part of rank {rank} is missing"
                        )
                about, tensors = _read(path, only=("tokens",))
                self._check(path, about)
                if about.get("session") != session_id:
                    raise SessionFileError(f"{path.name}: contains another session")
                age_s = max(now - paths[path], 0.0)
                yield _session(about, tensors["tokens"]), age_s
            except SessionFileError as error:
                yield error

    def _check(self, path: Path, about: Mapping[str, str]) -> None:
        if about.get("format") != FORMAT:
            raise SessionFileError(f"{path.name}: not in format {FORMAT}")
        if about.get("fingerprint") != self.identity.fingerprint:
            raise SessionFileError(
                f"{path.name}: from another model, policy or version"
            )


# -- one file ------------------------------------------------------------------------


def _write_atomically(
    path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
) -> None:
    """Write a temporary file and rename it.

    ``save_file`` writes tensor by tensor, without a second copy in memory.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    os.close(handle)
    try:
        save_file(dict(tensors), name, dict(about))
        # Open the file only now: save_file may have replaced the one of mkstemp.
        with open(name, "rb") as file:
            os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    finally:
        Path(name).unlink(missing_ok=True)


def _read(
    path: Path, only: tuple[str, ...] | None = None
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, "pt") as file:
            about = dict(file.metadata() or {})
            names = file.keys() if only is None else only
            return about, {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise SessionFileError(f"{path.name}: cannot be read ({error})") from error


def _digest(about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.contiguous().reshape(-1).view(torch.uint8)
        digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


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
        queries=tensors.get("queries"),
        observed=observed,
    )


def _session(about: Mapping[str, str], tokens: torch.Tensor) -> Session:
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
    return fields | {key: fields.pop(name) for key, name in _SPANS.items()}


def _unpacked(packed: dict[str, Any] | None) -> Compaction | None:
    if packed is None:
        return None
    spans = {name: BlockSpan(**packed[key]) for key, name in _SPANS.items()}
    numbers = {key: value for key, value in packed.items() if key not in _SPANS}
    return Compaction(**(numbers | spans))


# -- a whole directory, for the command line ---------------------------------------


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A session file in a directory, as ``kvplugins sessions`` lists it.

    Attributes:
        facts: of its identity.
        tokens: length of its session.
        last_used: seconds since the epoch.
        problem: why it cannot be loaded; None: its header is valid.
    """

    path: Path
    session_id: str
    facts: dict[str, str]
    tokens: int
    num_bytes: int
    last_used: float
    problem: str | None = None


def list_files(root: Path) -> list[FoundFile]:
    """All session files under a directory, most recently used first."""
    files = []
    for path in root.glob(f"*/*.r*of*{_SUFFIX}"):
        stat = path.stat()
        session_id = path.name.split(".", 1)[0]
        try:
            about, tensors = _read(path, only=("tokens",))
            if about.get("format") != FORMAT:
                raise SessionFileError(f"not in format {FORMAT}")
            facts, tokens = dict(json.loads(about["facts"])), tensors["tokens"].numel()
            problem = None
        except SessionFileError as error:
            facts, tokens, problem = {}, 0, str(error)
        files.append(
            FoundFile(
                path, session_id, facts, tokens, stat.st_size, stat.st_mtime, problem
            )
        )
    return sorted(files, key=lambda file: -file.last_used)
