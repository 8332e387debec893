"""Session files: one safetensors file per session and rank.

::

    DIR/<fingerprint>/<session>.r0of1.safetensors      or URL/<fingerprint>/...
                               rank 0 of the 1 rank of the engine that wrote it

The file of a session that continues another one stores only what that one's files do
not have (``deltas``). All others store every page.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.sessions import deltas, tensor_file
from vllm_kvplugins.sessions.commands import Session
from vllm_kvplugins.sessions.deltas import (
    Delta,
    FileRef,
    Lineage,
    Origins,
    PartOrigin,
    name_of,
)
from vllm_kvplugins.sessions.file_contents import (
    CONTENT_ERRORS,
    DELTA_FORMAT,
    FORMAT,
    FORMATS,
    check_formats,
    checked_session,
    packed_compaction,
    snapshot_of,
    sources_of,
    tensors_of,
    verified,
)
from vllm_kvplugins.sessions.head_shards import Heads, Shard, gather
from vllm_kvplugins.sessions.page_tokens import PageFormat
from vllm_kvplugins.sessions.snapshot import CacheSnapshot
from vllm_kvplugins.sessions.storage import (
    DirectoryStorage,
    SessionStorage,
    StoredFile,
)
from vllm_kvplugins.sessions.tensor_file import SessionFileError

_SUFFIX = ".safetensors"
FILE_NAME = re.compile(
    r"(?P<session>[^.]+)\.r(?P<rank>\d+)of(?P<ranks>\d+)\.safetensors"
)
# Of a file, besides what the session's size says.
_MAX_MORE_BYTES = 1 << 20


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
        sources: sessions whose files its files need.
    """

    session: Session
    age_s: float
    file_bytes: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written.

    Attributes:
        sources: sessions whose files it needs.
    """

    num_bytes: int
    sources: tuple[str, ...] = ()


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
        max_source_age_s: a file needs no file that was written earlier; None: no limit,
            because files that are needed are not deleted.
    """

    def __init__(
        self,
        storage: SessionStorage,
        identity: Identity,
        ranks: int = 1,
        heads: Heads | None = None,
        max_source_age_s: float | None = None,
    ) -> None:
        self.storage = storage
        self.identity = identity
        self.ranks = ranks
        self.heads = heads
        self.max_source_age_s = max_source_age_s

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

    def write(
        self,
        session: Session,
        rank: int,
        saved: CacheSnapshot,
        formats: Sequence[PageFormat] = (),
        lineage: Lineage | None = None,
    ) -> WrittenFile:
        """Write a rank's part of a session.

        Args:
            formats: of the pages of each part; needed with ``lineage``.
            lineage: the session that it continues, whose file is there and stays; the
                new file leaves out what that one has, if this is worth it. None: it
                stores every page.

        Raises:
            OSError: there is no room or no permission; no file remains.
        """
        delta = self._delta(saved, formats, lineage) if lineage else None
        tensors, now = tensors_of(session, saved, delta), time.time()
        about = {
            "format": DELTA_FORMAT if delta else FORMAT,
            "fingerprint": self.identity.fingerprint,
            "facts": json.dumps(self.identity.facts),
            "session": session.session_id,
            "owner": session.owner,
            "num_bytes": str(session.num_bytes),
            "first_query": str(session.first_query),
            "compaction": json.dumps(packed_compaction(session.compaction)),
            "dtype": saved.dtype,
            "queries_dtype": str(saved.queries_dtype).removeprefix("torch."),
        }
        if session.ttl_s is not None:
            about["ttl_s"] = str(session.ttl_s)
        for index, part in enumerate(saved.parts):
            about[name_of("layout", index)] = part.layout
        about["first_written"] = f"{delta.first_written if delta else now:.0f}"
        if delta is not None:
            about["files"] = deltas.packed_refs(delta.files)
        about["header"] = tensor_file.digest(about, {"tokens": tensors["tokens"]})
        about["digest"] = tensor_file.digest(about, tensors)
        name = self.name(session.session_id, rank)
        num_bytes = self.storage.write(name, tensors, about)
        page_bytes = deltas.page_bytes_of(tensors)
        own = FileRef(session.session_id, about["digest"], page_bytes)
        origins = Origins(
            (*(delta.files if delta else ()), own),
            delta.parts if delta else None,
            float(about["first_written"]),
        )
        saved.file.origins = origins
        return WrittenFile(num_bytes, origins.sources)

    def _delta(
        self, saved: CacheSnapshot, formats: Sequence[PageFormat], lineage: Lineage
    ) -> Delta | None:
        """What the file stores if it needs others; None: it needs none."""
        origins = lineage.file.origins
        assert origins is not None, "the continued session has no file"
        # A date that was set back makes a file no younger.
        age_s = abs(time.time() - origins.first_written)
        if self.max_source_age_s is not None and age_s > self.max_source_age_s:
            return None
        parts = [(part.slots, part.retained, part.tail) for part in saved.parts]
        return deltas.delta_of(saved.compaction, saved.tokens, parts, formats, lineage)

    def read(
        self,
        session_id: str,
        rank: int,
        ranks: int | None = None,
        formats: Sequence[PageFormat] = (),
    ) -> CacheSnapshot:
        """Read a rank's part of a session; of another size's files, those that have it.

        Args:
            rank: of this engine.
            formats: of its pages in each part; without them, only files that need no
                others can be read.

        Raises:
            SessionFileError: a file is missing, damaged, or of another engine, or the
                parts of other ranks cannot be cut or joined.
            OSError: the storage failed.

        Cost: files of another size, and files that a file needs, are read whole, one
            after the other.
        """
        if ranks is None or ranks == self.ranks:
            return self._read_part(session_id, rank, self.ranks, formats)
        if self.heads is None or not self.reads(ranks):
            name = self.name(session_id, 0, ranks)
            raise SessionFileError(f"{name}: not readable with {self.ranks} ranks")
        read = partial(self._read_part, session_id, ranks=ranks, formats=formats)
        try:
            return gather(self.heads, Shard(rank, self.ranks), ranks, read)
        except ValueError as error:
            name = self.name(session_id, 0, ranks)
            raise SessionFileError(
                f"{name}: not readable with {self.ranks} ranks ({error})"
            ) from error

    def _read_part(
        self, session_id: str, rank: int, ranks: int, formats: Sequence[PageFormat]
    ) -> CacheSnapshot:
        """What one of ``ranks`` ranks wrote."""
        name = self.name(session_id, rank, ranks)
        about, tensors, digest = self._contents(session_id, rank, ranks)
        own = FileRef(session_id, digest, deltas.page_bytes_of(tensors))
        files: tuple[FileRef, ...] = ()
        parts: tuple[PartOrigin, ...] | None = None

        def read(source: FileRef) -> deltas.FileContents:
            return self._read_source(source, about, rank, ranks)

        try:
            if about["format"] == DELTA_FORMAT:
                files = deltas.unpacked_refs(about["files"])
                check_formats(about, formats)
                pages, parts = deltas.whole_pages(tensors, files, formats, read)
                tensors = tensors | pages
            saved = snapshot_of(about, tensors)
            written = float(about.get("first_written", 0.0))
        except (*CONTENT_ERRORS, IndexError, RuntimeError) as error:
            raise SessionFileError(f"{name}: not a session ({error})") from error
        self.storage.touch(name)  # its time is the session's last use
        saved.file.origins = Origins((*files, own), parts, written)
        return saved

    def _read_source(
        self, source: FileRef, about: Mapping[str, str], rank: int, ranks: int
    ) -> deltas.FileContents:
        """The contents of a file that another one needs.

        Args:
            about: text of the other one.

        Raises:
            SessionFileError: it is missing or damaged, or not the file of then.
        """
        found, tensors, digest = self._contents(source.session_id, rank, ranks)
        if digest != source.digest or found.get("owner") != about.get("owner"):
            name = self.name(source.session_id, rank, ranks)
            raise SessionFileError(
                f"{name}: another file than {about['session']} needs"
            )
        return found, tensors

    def _contents(
        self, session_id: str, rank: int, ranks: int
    ) -> tuple[dict[str, str], dict[str, torch.Tensor], str]:
        """Text, tensors and digest of a file of this engine."""
        name = self.name(session_id, rank, ranks)
        about, tensors, digest = verified(self.storage, name)
        self._check(name, about)
        if about.get("session") != session_id:
            raise SessionFileError(f"{name}: contains another session")
        return about, tensors, digest

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
        known: dict[str, tuple[FoundSession, list[str]]] = {}
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
                session, sources = self._read_header(session_id, ranks)
                sources = self._with_others(sources, parts[1:])
            except SessionFileError as error:
                found.problems.append(error)
                continue
            age_s = max(now - used, 0.0)
            size = sum(files[part].num_bytes for part in parts)
            known[session_id] = FoundSession(session, age_s, size, sources), parts
        for each, parts in known.values():
            missing = [source for source in each.sources if source not in known]
            if missing:
                text = f"{parts[0]}: needs {missing[0]}, which is damaged or gone"
                found.problems.append(SessionFileError(text))
                continue
            found.sessions.append(each)
            for part in parts:
                del files[part]
        found.other_bytes = sum(file.num_bytes for file in files.values())
        return found

    def _with_others(
        self, sources: tuple[str, ...], parts: Sequence[str]
    ) -> tuple[str, ...]:
        """Sessions whose files a session needs, on all ranks.

        Args:
            sources: that the first rank's file needs.
            parts: names of the files of the other ranks.
        """
        every = dict.fromkeys(sources)
        for name in parts:
            about, _ = self.storage.read(name, only=())
            every.update(dict.fromkeys(sources_of(name, about)))
        return tuple(every)

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
        return self._read_header(session_id, ranks)[0]

    def _read_header(
        self, session_id: str, ranks: int | None
    ) -> tuple[Session, tuple[str, ...]]:
        """As ``read_session``, and the sessions whose files this file needs."""
        name = self.name(session_id, 0, ranks)
        about, tensors = self.storage.read(name, only=("tokens",))
        self._check(name, about)
        session = checked_session(name, about, tensors["tokens"])
        if session.session_id != session_id:
            raise SessionFileError(f"{name}: contains another session")
        sources = sources_of(name, about)
        if ranks != self.ranks:
            session = replace(session, file_ranks=ranks)
        return session, sources

    def _check(self, name: str, about: Mapping[str, str]) -> None:
        if about.get("format") not in FORMATS:
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
