"""All files of a ``session_dir`` or ``session_url``, for the command line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.sessions import clustering_records
from vllm_kvplugins.sessions.clustering_records import about_clustering, tokens_digests
from vllm_kvplugins.sessions.file_contents import (
    CONTENT_ERRORS,
    FORMAT,
    FORMATS,
    checked_session,
    sources_of,
    verified,
)
from vllm_kvplugins.sessions.files import FILE_NAME
from vllm_kvplugins.sessions.object_store import (
    ObjectStorage,
    list_folders,
    url_problems,
)
from vllm_kvplugins.sessions.storage import (
    DirectoryStorage,
    SessionStorage,
    StoredFile,
    files_in,
    find_leftovers,
)
from vllm_kvplugins.sessions.tensor_file import SessionFileError, UnreadableFileError

_WRITE_S = 3600.0  # all ranks have written their parts of a session by then
_READS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Item:
    """A file in a storage."""

    storage: SessionStorage
    name: str

    @property
    def location(self) -> str:
        return f"{self.storage.location}/{self.name}"

    def delete(self) -> None:
        """Delete the file, if it exists.

        Raises:
            OSError: the storage failed.
        """
        self.storage.delete(self.name)


@dataclass(frozen=True, slots=True)
class FoundFile(Item):
    """A session file, as ``kvplugins sessions`` lists it.

    Attributes:
        facts: of its identity.
        tokens: length of its session.
        last_used: seconds since the epoch; in an object store, the time of writing.
        problem: why it cannot be loaded; None: its header is valid.
        damaged: no server can load it. Other files with a problem are of another
            version, or are no files.
        sources: IDs of sessions whose files it needs.
    """

    session_id: str
    facts: dict[str, str]
    tokens: int
    num_bytes: int
    last_used: float
    problem: str | None = None
    damaged: bool = False
    sources: tuple[str, ...] = ()

    @property
    def session(self) -> tuple[str, str]:
        """Its session, unique in all folders."""
        return self.storage.location, self.session_id

    @property
    def needed_sessions(self) -> set[tuple[str, str]]:
        """``sources``, unique in all folders."""
        return {(self.storage.location, source) for source in self.sources}


@dataclass(frozen=True, slots=True)
class FoundClustering(Item):
    """A file with the episodes of a conversation.

    Attributes:
        tokens: number of first tokens of its conversation.
        tokens_digest: of these tokens.
        last_used: as of ``FoundFile``.
        damaged: no server can load it.
    """

    tokens: int
    tokens_digest: str
    num_bytes: int
    last_used: float
    damaged: bool = False


def open_folders(place: str) -> list[SessionStorage]:
    """The folders of all engines in a ``session_dir`` or ``session_url``.

    Raises:
        KVPolicyError: the directory does not exist, or the URL cannot be used.
        StoreError: the object store failed.
    """
    if "://" not in place:
        return _local_folders(Path(place), is_shared=False)
    if problems := url_problems(place):
        raise KVPolicyError("\n".join(problems))
    parts = urlsplit(place)
    if parts.scheme == "file":
        return _local_folders(Path(unquote(parts.path)), is_shared=True)
    return [ObjectStorage(place, name) for name in list_folders(place)]


def _local_folders(root: Path, is_shared: bool) -> list[SessionStorage]:
    if not root.is_dir():
        message = (
            f"{root} is not a folder; give the session_dir or session_url of a server"
        )
        raise KVPolicyError(coded("KVP605", message))
    return [DirectoryStorage(root, path, is_shared) for path, _ in files_in(root)]


def list_files(folders: Iterable[SessionStorage]) -> list[FoundFile]:
    """All session files, most recently used first.

    Raises:
        StoreError: the object store failed.

    Cost: reads the header and the tokens of each file.
    """
    listed = [
        (folder, file)
        for folder in folders
        for file in folder.list()
        if FILE_NAME.fullmatch(file.name)
    ]
    # An object store answers slowly, but many at once.
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        found = list(pool.map(lambda each: _found_file(*each), listed))
    return sorted(found, key=lambda file: -file.last_used)


def list_clusterings(folders: Iterable[SessionStorage]) -> list[FoundClustering]:
    """All clusterings, also those of other versions.

    Raises:
        StoreError: the object store failed.

    Cost: reads each file, usually some kilobytes.
    """
    listed = [
        (folder, file)
        for folder in folders
        for file in folder.list()
        if clustering_records.FILE_NAME.fullmatch(file.name)
    ]
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        return list(pool.map(lambda each: _found_clustering(*each), listed))


def _found_clustering(storage: SessionStorage, file: StoredFile) -> FoundClustering:
    tokens, digest, damaged = 0, "", False
    try:
        about, *_ = verified(storage, file.name)
        said = about_clustering(file.name, about)
        tokens, digest = said.tokens, said.tokens_digest
    except SessionFileError:
        # What another version wrote is whole.
        damaged = _is_damaged_clustering(storage, file.name)
    return FoundClustering(
        storage, file.name, tokens, digest, file.num_bytes, file.modified, damaged
    )


def _is_damaged_clustering(storage: SessionStorage, name: str) -> bool:
    if _is_damaged(storage, name):
        return True
    try:
        about, _ = storage.read(name, only=())
    except SessionFileError:
        return False
    return about.get("format") == clustering_records.FORMAT


def clusterings_of(
    found: Iterable[FoundClustering], files: Iterable[FoundFile]
) -> list[FoundClustering]:
    """Clusterings of the conversations that sessions belong to.

    A clustering belongs to the sessions that begin with its tokens.

    Raises:
        StoreError: the object store failed.

    Cost: reads the tokens of each session.
    """
    left = {each.location: each for each in found if each.tokens}
    belonging: list[FoundClustering] = []
    for file in files:
        if not left:
            break
        try:
            _, tensors = file.storage.read(file.name, only=("tokens",))
            tokens = tensors["tokens"].numpy()
            lengths = {c.tokens for c in left.values() if c.tokens <= len(tokens)}
            digests = tokens_digests(tokens, sorted(lengths))
        except (SessionFileError, *CONTENT_ERRORS):
            continue
        for location, each in list(left.items()):
            if digests.get(each.tokens) == each.tokens_digest:
                belonging.append(left.pop(location))
    return belonging


def _found_file(storage: SessionStorage, file: StoredFile) -> FoundFile:
    facts: dict[str, str] = {}
    tokens, problem, damaged = 0, None, False
    sources: tuple[str, ...] = ()
    try:
        about, tensors = storage.read(file.name, only=("tokens",))
        damaged = about.get("format") in FORMATS
        if not damaged:
            raise SessionFileError(f"{file.name}: not in format {FORMAT}")
        session = checked_session(file.name, about, tensors["tokens"])
        facts, tokens = dict(json.loads(about["facts"])), len(session.tokens)
        sources = sources_of(file.name, about)
        damaged = False
    except (SessionFileError, *CONTENT_ERRORS) as error:
        problem = str(error)
        damaged = damaged or _is_damaged(storage, file.name)
    session_id = file.name.split(".", 1)[0]
    return FoundFile(
        storage,
        file.name,
        session_id,
        facts,
        tokens,
        file.num_bytes,
        file.modified,
        problem,
        damaged,
        sources,
    )


def needing(chosen: Iterable[FoundFile], files: Iterable[FoundFile]) -> list[FoundFile]:
    """Files that cannot be loaded without some of the chosen ones.

    A file lists all files that it needs, so one pass finds them.
    """
    gone = {file.session for file in chosen}
    return [
        file
        for file in files
        if file.session not in gone and gone.intersection(file.needed_sessions)
    ]


def not_needed(
    chosen: Iterable[FoundFile], files: Iterable[FoundFile]
) -> list[FoundFile]:
    """The chosen files without those that another file needs."""
    chosen = list(chosen)
    gone = {file.session for file in chosen}
    needed = {s for f in files if f.session not in gone for s in f.needed_sessions}
    return [file for file in chosen if file.session not in needed]


def _is_damaged(storage: SessionStorage, name: str) -> bool:
    """Whether a file is not whole, or has no header.

    False for what is not a file, and for what may not be read.
    """
    try:
        storage.read(name, only=())
    except UnreadableFileError:
        return False
    except SessionFileError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class Garbage:
    """Files that no server needs.

    Attributes:
        leftovers: temporary files of processes that no longer run.
        damaged: files of sessions and clusterings that cannot be loaded.
        incomplete: parts of sessions of which another rank's part is missing, or a file
            that they need.
    """

    leftovers: list[Item]
    damaged: list[Item]
    incomplete: list[Item]


def find_garbage(folders: Iterable[SessionStorage]) -> Garbage:
    """Files that no server needs.

    A session whose parts are being written is not garbage: a part of it is new.

    Raises:
        StoreError: the object store failed.
    """
    folders = list(folders)
    damaged: list[Item] = [c for c in list_clusterings(folders) if c.damaged]
    parts: dict[tuple[str, str, int], list[FoundFile]] = {}
    every = list_files(folders)
    for file in every:
        if file.damaged:
            damaged.append(file)
        else:
            key = (file.storage.location, file.session_id, _num_ranks(file.name))
            parts.setdefault(key, []).append(file)
    incomplete: list[Item] = [
        file
        for (_, _, ranks), files in parts.items()
        if len(files) < ranks and time.time() - files[0].last_used > _WRITE_S
        for file in files
    ]
    there = {file.session for file in every if not file.damaged}
    readable = [file for file in every if file.needed_sessions <= there]
    needed = {session for file in readable for session in file.needed_sessions}
    incomplete += [
        file
        for file in every
        if file not in readable
        and file not in incomplete
        and file.session not in needed
    ]
    leftovers = [
        Item(folder, path.name)
        for folder in folders
        if isinstance(folder, DirectoryStorage)
        for path in find_leftovers(folder.folder, folder.least_leftover_age_s)
    ]
    return Garbage(leftovers, damaged, incomplete)


def _num_ranks(name: str) -> int:
    parts = FILE_NAME.fullmatch(name)
    assert parts is not None, "not a session file"
    return int(parts["ranks"])


def verify(file: Item) -> dict[str, str]:
    """Read a whole file and compare its digest; not those of files that it needs.

    Returns:
        Its text.

    Raises:
        SessionFileError: it is damaged or not a session file.
        StoreError: the object store failed.
    """
    about, *_ = verified(file.storage, file.name)
    return about
