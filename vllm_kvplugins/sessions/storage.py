"""Where session files lie: a local directory, or an object store (``object_store``).

::

    SessionFiles     names, contents and checks of session files
      SessionStorage list, read, write, delete, with sizes and times
        DirectoryStorage   session_dir, and session_url of a shared directory
        ObjectStorage      session_url of an object store, through fsspec

Names of session files are unique: no two writers use the same one, and a file is never
rewritten. So no storage needs conditional writes, and a file is absent, complete or
damaged, but never another one than before.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from vllm_kvplugins.sessions import tensor_file

# A file is written in less time, so an older temporary file is a leftover, also where
# the locks of another machine are not visible.
_SHARED_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in a storage.

    Attributes:
        name: without folder.
        modified: seconds since the epoch, of its last use in a directory, and of
            writing it in an object store.
    """

    name: str
    num_bytes: int
    modified: float


class SessionStorage(Protocol):
    """The files of one folder.

    All methods but ``prepare`` may be called in several threads at once. They may take
    long or not return, so no engine step calls them.
    """

    @property
    def location(self) -> str:
        """Where it is, for messages."""

    def prepare(self) -> None:
        """Create the folder, and check that it can be written to.

        Raises:
            OSError: it cannot.
        """

    def list(self, prefix: str = "") -> Iterable[StoredFile]:
        """Files whose names begin with a prefix; without those that vanish meanwhile.

        Raises:
            OSError: the storage failed. A folder that does not exist has no files.
        """

    def read(
        self, name: str, only: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """Text and tensors of a file; see ``tensor_file.read``.

        Raises:
            SessionFileError: the file is missing or damaged.
            OSError: the storage failed.
        """

    def write(
        self, name: str, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
    ) -> int:
        """Write a file, of which others see all or nothing.

        Args:
            name: unique.

        Returns:
            Its size in bytes.

        Raises:
            OSError: the storage failed; no file remains.
        """

    def delete(self, name: str) -> None:
        """Delete a file, if it exists.

        Raises:
            OSError: the storage failed.
        """

    def touch(self, name: str) -> None:
        """Set the time of a file's last use to now, where the storage has one."""


@dataclass(frozen=True, slots=True)
class DirectoryStorage:
    """Files in a local or mounted directory.

    Attributes:
        root: created with ``folder``, if it does not exist.
        folder: the folder of the files, in ``root``.
        is_shared: whether other machines use it, whose locks are not always visible.
    """

    root: Path
    folder: Path
    is_shared: bool = False

    @property
    def location(self) -> str:
        return str(self.folder)

    @property
    def least_leftover_age_s(self) -> float:
        """Younger temporary files may be those of a process that runs elsewhere."""
        return _SHARED_AGE_S if self.is_shared else 0.0

    def prepare(self) -> None:
        """Create the folder, readable only by its owner, and remove leftovers."""
        # A mode applies to the last folder of a path only.
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder):
            pass
        remove_leftovers(self.folder, self.least_leftover_age_s)

    def list(self, prefix: str = "") -> Iterator[StoredFile]:
        """Entries of all kinds, also links and folders. An unreadable one has none."""
        for path, status in files_in(self.folder, prefix):
            yield StoredFile(path.name, status.st_size, status.st_mtime)

    def read(
        self, name: str, only: Iterable[str] | None = None
    ) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        return tensor_file.read(self.folder / name, only)

    def write(
        self, name: str, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
    ) -> int:
        return tensor_file.write(self.folder / name, tensors, about)

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def touch(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.folder / name)


def files_in(folder: Path, prefix: str = "") -> Iterator[tuple[Path, os.stat_result]]:
    """Files of a folder and their status; without those that vanish meanwhile.

    Args:
        prefix: only those whose names begin with it.
    """
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.startswith(prefix))
        for path in map(folder.joinpath, names):
            with contextlib.suppress(OSError):
                yield path, path.lstat()


def find_leftovers(folder: Path, min_age_s: float = 0.0) -> list[Path]:
    """Temporary files of processes that no longer run.

    Args:
        min_age_s: leave out files that were changed later.
    """
    now = time.time()
    return [
        path
        for path, status in files_in(folder)
        if tensor_file.is_temporary(path.name)
        and now - status.st_mtime >= min_age_s
        and tensor_file.is_leftover(path)
    ]


def remove_leftovers(folder: Path, min_age_s: float = 0.0) -> int:
    """Delete what ``find_leftovers`` finds.

    Returns:
        The number of deleted files.
    """
    removed = 0
    for path in find_leftovers(folder, min_age_s):
        with contextlib.suppress(OSError):
            path.unlink()
            removed += 1
    return removed
