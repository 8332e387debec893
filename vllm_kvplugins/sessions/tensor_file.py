"""Tensors and text in one safetensors file, written whole or not at all.

A file is written under a temporary name and then renamed. The writer holds a lock on
the temporary file, which the system releases when the process ends, also after
``kill -9``. A temporary file without a lock is a leftover.

``packed`` and ``unpacked`` do the same with bytes, for object stores.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import stat
import time
import uuid
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

_PART = ".part"
# The safetensors library has temporary files of its own, which it does not lock.
# Earlier versions of this package wrote with it.
_LIBRARY_PREFIX = ".tmp"
_LIBRARY_AGE_S = 3600.0

# Names of the safetensors format.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}
Contents = bytes | bytearray | memoryview  # of a file, or of its first part
_LENGTH_BYTES = 8  # length of the header, in front of it
# No header of a session is as long; a longer one would be read into memory.
_MAX_HEADER_BYTES = 16 << 20


class SessionFileError(Exception):
    """A file that cannot be loaded; the message says why."""


class UnreadableFileError(SessionFileError):
    """Not a file, or one that this process may not read: its contents are unknown."""


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
) -> int:
    """Write a file, readable by its owner only.

    Args:
        tensors: contiguous, in host memory. They are not copied.

    Returns:
        Its size in bytes.

    Raises:
        OSError: there is no room, no permission or no folder; no file remains.
    """
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_PART}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_contents(file, tensors, about)
            file.flush()
            os.fchmod(handle, 0o600)
            os.fsync(handle)
            num_bytes = file.tell()
            part.replace(path)
        return num_bytes
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _write_contents(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]
) -> None:
    header: dict[str, object] = {"__metadata__": dict(about)}
    start = 0
    for name, tensor in tensors.items():
        stop = start + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(as_bytes(tensor))


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a contiguous tensor in host memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def read(
    path: Path, only: Iterable[str] | None = None
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The text and the tensors of a file.

    The tensors are copies in memory. Whoever rewrites the file in place later, or cuts
    it off, changes nothing that was verified; a mapped file would change, or end the
    process with SIGBUS.

    Args:
        only: names of the tensors to read; None: all.

    Raises:
        SessionFileError: there is no such file, it is damaged, or it is a pipe, a link
            or a folder. Opening a pipe would block.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UnreadableFileError(f"{path.name}: not a regular file")
        with path.open("rb", buffering=0) as file:
            return unpacked(_contents(file, only), only)
    except PermissionError as error:
        raise UnreadableFileError(f"{path.name}: cannot be read ({error})") from error
    except (SessionFileError, OSError) as error:
        if isinstance(error, UnreadableFileError):
            raise
        raise SessionFileError(f"{path.name}: cannot be read ({error})") from error


def _contents(file: FileIO, only: Iterable[str] | None) -> memoryview:
    """A file up to the end of these tensors; None: all of it.

    Raises:
        SessionFileError: it is longer or shorter than its header says.
    """
    size = os.fstat(file.fileno()).st_size
    first = _read_exactly(file, 0, min(_LENGTH_BYTES, size))
    first = _read_exactly(file, 0, min(_header_end(first), size))
    _, entries = _header(first)
    whole = len(first) + max(
        (_offsets(each)[1] for each in entries.values()), default=0
    )
    if size != whole:
        raise SessionFileError(f"{size} bytes instead of {whole}")
    if only is None:
        return _read_exactly(file, 0, size)
    ends = [_offsets(entries[name])[1] for name in only if name in entries]
    return _read_exactly(file, 0, len(first) + max(ends, default=0))


def _read_exactly(file: FileIO, start: int, count: int) -> memoryview:
    """Bytes of a file; fewer if it has been cut off meanwhile."""
    # Not a bytearray, which would be filled with zeros first.
    contents, done = np.empty(count, np.uint8).data, 0
    file.seek(start)
    while done < count:
        num_read = file.readinto(contents[done:])
        if not num_read:
            break
        done += num_read
    return contents[:done]


# -- files as bytes, for object stores -----------------------------------------------


def packed(tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> bytes:
    """The contents of a file.

    Args:
        tensors: contiguous, in host memory. They are copied.
    """
    contents = io.BytesIO()
    _write_contents(contents, tensors, about)
    return contents.getvalue()


def first_tensor_end(first: Contents) -> int:
    """Where the first tensor ends; where the header ends, if ``first`` is shorter.

    Args:
        first: at least the first 8 bytes of a file.

    Raises:
        SessionFileError: it is not a file of this kind.
    """
    start = _header_end(first)
    if len(first) < start:
        return start
    _, entries = _header(first)
    return start + min((stop for _, stop in map(_offsets, entries.values())), default=0)


def unpacked(
    contents: Contents, only: Iterable[str] | None = None
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The text and the tensors of a file's contents.

    Args:
        contents: the tensors refer to it. With ``only``, a first part that contains
            these tensors is enough.
        only: names of the tensors to return; None: all.

    Raises:
        SessionFileError: it is not a file of this kind, or a part of one.
    """
    about, entries = _header(contents)
    start, names = _header_end(contents), list(entries) if only is None else only
    stop = start + max((stop for _, stop in map(_offsets, entries.values())), default=0)
    if only is None and stop != len(contents):
        raise SessionFileError(f"{len(contents)} bytes instead of {stop}")
    try:
        return about, {name: _unpack(contents, start, entries[name]) for name in names}
    except (KeyError, TypeError, ValueError) as error:
        raise SessionFileError(f"not a session file ({error})") from error


def _header_end(first: Contents) -> int:
    length = int.from_bytes(first[:_LENGTH_BYTES], "little")
    if len(first) < _LENGTH_BYTES or not 0 < length <= _MAX_HEADER_BYTES:
        raise SessionFileError("no header")
    return _LENGTH_BYTES + length


def _header(first: Contents) -> tuple[dict[str, str], dict[str, Any]]:
    """Text, and an entry per tensor."""
    try:
        entries = json.loads(bytes(first[_LENGTH_BYTES : _header_end(first)]))
        about = {str(k): str(v) for k, v in entries.pop("__metadata__", {}).items()}
        for entry in entries.values():
            _offsets(entry)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SessionFileError(f"a damaged header ({error})") from error
    return about, entries


def _offsets(entry: Mapping[str, Any]) -> tuple[int, int]:
    first, stop = entry["data_offsets"]
    return int(first), int(stop)


def _unpack(contents: Contents, start: int, entry: Mapping[str, Any]) -> torch.Tensor:
    """A tensor that refers to the contents of a file.

    Raises:
        ValueError: it does not lie in the contents.
    """
    first, stop = (start + offset for offset in _offsets(entry))
    dtype, shape = _TORCH_DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
    num_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=1) < 0 or first < start or stop - first != num_bytes:
        raise ValueError(f"a tensor of {shape} in {stop - first} bytes")
    if stop > len(contents):
        raise ValueError(f"a tensor ends at {stop} of {len(contents)} bytes")
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    elements = torch.frombuffer(
        contents, dtype=torch.uint8, count=num_bytes, offset=first
    )
    if first % dtype.itemsize or isinstance(contents, bytes):
        # A view of a larger dtype must be aligned, and torch wants a writable buffer.
        elements = elements.clone()
    return elements.view(dtype).reshape(shape)


def digest(about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """Digest of text and tensors."""
    result = hashlib.blake2b(digest_size=16)
    result.update(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        result.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        result.update(as_bytes(tensor.contiguous()))
    return result.hexdigest()


# -- what killed processes leave behind ------------------------------------------------


def is_temporary(name: str) -> bool:
    """Whether a file of this name is written or was left behind."""
    return name.endswith(_PART) or name.startswith(_LIBRARY_PREFIX)


def is_leftover(path: Path) -> bool:
    """Whether a temporary file belongs to no running process.

    False if that is unknown, for example without permission or on a file system without
    locks.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return False
        if path.name.startswith(_LIBRARY_PREFIX):
            return time.time() - status.st_mtime > _LIBRARY_AGE_S
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
