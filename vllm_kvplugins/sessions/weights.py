"""A digest of a model's weights that is the same on all machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_SAMPLE_BYTES = 1024
_SPANS = 64  # of a file whose tensors are not known
_MAX_HEADER_BYTES = 100 << 20


def weights_digest(folder: Path) -> str:
    """Digest of names, sizes and samples of the weight files in a folder.

    Weights that differ only between the samples, three of every tensor, have the same
    digest; training changes tensors as a whole. Times of files would not do: copies on
    other machines have others.

    Returns:
        "" if it is no folder.

    Cost: reads 3 KiB per tensor.
    """
    if not folder.is_dir():
        return ""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for start, stop in _spans(file, size):
                    middle = (start + stop) // 2
                    for first in (start, middle, max(stop - _SAMPLE_BYTES, start)):
                        file.seek(first)
                        digest.update(file.read(min(_SAMPLE_BYTES, stop - first)))
    return digest.hexdigest()[:16]


def _spans(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """The header of a safetensors file and its tensors; parts of another file."""
    length = int.from_bytes(file.read(8), "little")
    try:
        if length > min(size, _MAX_HEADER_BYTES):
            raise ValueError("no header")
        entries = json.loads(file.read(length))
        offsets = [v["data_offsets"] for k, v in entries.items() if k[:2] != "__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        step = -(-size // _SPANS) or 1
        yield from ((i, min(i + step, size)) for i in range(0, size, step))
        return
    start = 8 + length
    yield 0, start
    yield from sorted((start + int(a), start + int(b)) for a, b in offsets)
