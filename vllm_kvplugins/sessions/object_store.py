"""Session files in an object store, through fsspec: ``session_url``."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.sessions import tensor_file
from vllm_kvplugins.sessions.file_thread import FileThread
from vllm_kvplugins.sessions.storage import (
    DirectoryStorage,
    SessionStorage,
    StoredFile,
)
from vllm_kvplugins.sessions.tensor_file import SessionFileError

# A file is read in pieces, several at once: one connection alone is slow.
_PIECE_BYTES = 16 << 20
_PIECES_AT_ONCE = 8
# Header and token IDs of most sessions; a longer beginning takes a second read.
_FIRST_BYTES = 64 << 10
_MAX_FIRST_BYTES = 64 << 20  # a damaged header may claim more
# Errors of settings: they do not pass. "Credentials" in the name of an error, too.
_FINAL = (PermissionError, ValueError, TypeError, NotImplementedError)
_PREPARE_S = 20.0
# Names of the time of writing in the listings of fsspec's file systems: S3, Google,
# Azure and others, memory.
_TIMES = ("LastModified", "updated", "last_modified", "mtime", "created")


def url_problems(url: str) -> list[str]:
    """Why ``session_url`` cannot be used: its form, or packages that are missing."""
    parts = urlsplit(url)
    if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
        text = (
            f"session_url {url!r} is not a URL with a bucket or folder; write for "
            "example s3://bucket/prefix or file:///mnt/sessions"
        )
        return [coded("KVP314", text)]
    if "@" in parts.netloc or parts.query or parts.fragment:
        text = (
            "session_url contains a user, a query or a fragment; configure credentials "
            "and options in the environment (AWS_ACCESS_KEY_ID, FSSPEC_S3_...)"
        )
        return [coded("KVP314", text)]
    if parts.scheme == "file":
        return _file_problems(url)
    try:
        import fsspec

        fsspec.get_filesystem_class(parts.scheme)
    except ImportError as error:
        text = (
            f"session_url {url!r} needs packages that are not installed ({error}); "
            "`pip install vllm-kvplugins[fleet]` installs fsspec and s3fs; other "
            "stores need fsspec's package for them, such as gcsfs"
        )
        return [coded("KVP314", text)]
    except ValueError as error:
        return [coded("KVP314", f"session_url {url!r}: {error}; use another scheme")]
    return []


def _file_problems(url: str) -> list[str]:
    if urlsplit(url).netloc:
        text = f"session_url {url!r} names a host; write file:///path, for a local path"
        return [coded("KVP314", text)]
    return []


def open_storage(url: str, folder: str) -> SessionStorage:
    """The storage of a valid ``session_url``.

    A directory needs no fsspec: our own files are renamed, so that a file that another
    replica sees is complete.

    Args:
        folder: name of the engine's folder.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        root = Path(unquote(parts.path))
        return DirectoryStorage(root, root / folder, is_shared=True)
    return ObjectStorage(url, folder)


def start_up_problem(storage: SessionStorage) -> str | None:
    """Prepare a storage, and say what is wrong with it.

    Returns:
        A problem that may pass, such as a store that does not respond; None: none. The
        thread that waits for such a store may live on.

    Raises:
        KVPolicyError: the storage cannot be written to, for another reason.
    """
    thread = FileThread("kvp-session-prepare")
    prepared = thread.submit(storage.prepare)
    thread.close(_PREPARE_S)
    if not prepared.done():
        return f"{storage.location} did not respond in {_PREPARE_S:g} s"
    error = prepared.exception()
    if error is None:
        return None
    assert isinstance(error, OSError), error
    if isinstance(error, StoreError) and not error.is_final:
        return str(error)
    text = (
        f"session_url cannot be written to ({error or storage.location}); check the "
        "bucket or directory, the credentials and their permissions"
    )
    raise KVPolicyError(coded("KVP315", text)) from error


def list_folders(url: str) -> list[str]:
    """Names of the folders at a valid ``session_url`` of an object store.

    An object store has no empty folders: none are found where nothing is.

    Raises:
        StoreError: the store failed.
    """
    with _errors_of(url):
        fs, root = _opened(url)
        try:
            entries = fs.ls(root, detail=True)
        except FileNotFoundError:
            return []
    paths = [entry["name"] for entry in entries if entry["type"] == "directory"]
    return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)


class StoreError(OSError):
    """An object store failed; the message says how.

    Attributes:
        is_final: whether it will fail again, because of the settings.
    """

    is_final = False


class ObjectStorage:
    """Files of one folder in an object store.

    Nothing is opened before the first operation, in each process of an engine.

    Args:
        url: as fsspec understands it; the place of ``folder``.
        folder: name of the folder.
    """

    def __init__(self, url: str, folder: str) -> None:
        self._url = f"{url.rstrip('/')}/{folder}"
        self._opened: tuple[Any, str] | None = None
        self._lock = threading.Lock()

    @property
    def location(self) -> str:
        return self._url

    def prepare(self) -> None:
        """Write a file and delete it.

        Raises:
            StoreError: this fails.
        """
        with self._store() as (fs, root):
            path = f"{root}/probe-{uuid.uuid4().hex}"
            fs.pipe_file(path, b"")
            fs.rm_file(path)

    def list(self, prefix: str = "") -> list[StoredFile]:
        with self._store() as (fs, root):
            try:
                # Object stores list by the beginning of a name; other file systems
                # ignore the argument and list everything.
                found = fs.find(root, detail=True, prefix=prefix)
            except FileNotFoundError:
                return []
            files = []
            for path, entry in found.items():
                folder, _, name = path.rpartition("/")
                in_root = folder.strip("/") == root.strip("/")
                if in_root and name.startswith(prefix):
                    size = int(entry.get("size") or 0)
                    files.append(StoredFile(name, size, _modified(entry)))
            return files

    def read(
        self, name: str, only: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        with self._store() as (fs, root):
            path = f"{root}/{name}"
            try:
                contents = _whole(fs, path) if only is None else _beginning(fs, path)
            except FileNotFoundError as error:
                raise SessionFileError(f"{name}: does not exist") from error
        try:
            return tensor_file.unpacked(contents, only)
        except SessionFileError as error:
            raise SessionFileError(f"{name}: {error}") from error

    def write(
        self, name: str, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
    ) -> int:
        """Write a file at once: others see it when it is complete.

        The contents are in memory once more while they are written, and large ones
        twice more: drivers copy the parts that they send.
        """
        contents = tensor_file.packed(tensors, about)
        with self._store() as (fs, root):
            fs.pipe_file(f"{root}/{name}", contents)
        return len(contents)

    def delete(self, name: str) -> None:
        with self._store() as (fs, root), contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{name}")

    def touch(self, name: str) -> None:
        """Do nothing: an object has only the time of writing it."""

    @contextlib.contextmanager
    def _store(self) -> Iterator[tuple[Any, str]]:
        """fsspec's file system and the path of the folder.

        Raises:
            StoreError: see ``_errors_of``.
        """
        with _errors_of(self._url):
            with self._lock:
                if self._opened is None:
                    self._opened = _opened(self._url)
            yield self._opened


@contextlib.contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Raise errors of a driver as ours. Drivers raise exceptions of their own.

    Raises:
        StoreError: the block raised another exception than FileNotFoundError and
            SessionFileError.
    """
    try:
        yield
    except (FileNotFoundError, SessionFileError):
        raise
    except Exception as error:
        name = type(error).__name__
        failed = StoreError(f"{url}: {name}: {error}")
        failed.is_final = isinstance(error, _FINAL) or "Credentials" in name
        raise failed from error


def _opened(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    # Other replicas change the listings. An instance of our own, because a cached one
    # may have other options.
    fs, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    return fs, str(path).rstrip("/")


def _modified(entry: Mapping[str, Any]) -> float:
    """Time of writing, in seconds since the epoch."""
    for name in _TIMES:
        time = entry.get(name)
        if isinstance(time, str):
            time = datetime.fromisoformat(time)
        if isinstance(time, datetime):
            return time.timestamp()
        if isinstance(time, int | float):
            return float(time)
    raise ValueError(f"no time of writing in {sorted(entry)}")


def _whole(fs: Any, path: str) -> bytearray:
    """The contents of a file."""
    size = int(fs.info(path)["size"])
    contents = bytearray(size)
    starts = range(0, size, _PIECE_BYTES)
    for i in range(0, len(starts), _PIECES_AT_ONCE):
        some = list(starts[i : i + _PIECES_AT_ONCE])
        stops = [min(start + _PIECE_BYTES, size) for start in some]
        pieces = fs.cat_ranges([path] * len(some), some, stops, on_error="raise")
        for start, stop, piece in zip(some, stops, pieces, strict=True):
            if len(piece) != stop - start:
                raise SessionFileError(f"{len(piece)} bytes instead of {stop - start}")
            contents[start:stop] = piece
    return contents


def _beginning(fs: Any, path: str) -> bytearray:
    """A first part of a file: header and token IDs, which are its first tensor."""
    wanted = _FIRST_BYTES
    while True:
        first = bytearray(fs.cat_file(path, start=0, end=wanted))
        stop = tensor_file.first_tensor_end(first)
        if stop <= len(first) or len(first) < wanted:
            return first
        if stop > _MAX_FIRST_BYTES:
            raise SessionFileError(f"its beginning takes {stop} bytes")
        wanted = stop
