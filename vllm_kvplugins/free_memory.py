"""Host memory that this process may take, within the limits of its container.

The operating system reports the memory of the whole machine, also to a container that
may take only a part of it. A process that takes more is ended by the kernel. Control
groups hold the limits: version 2 in one hierarchy, version 1 in one for memory. A limit
of any ancestor holds, too.

On systems without control groups, all memory of the machine counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of one version of control groups, below ``/sys/fs/cgroup``."""

    mount: str
    limit: str
    usage: str
    reclaimable: str


_V1 = _Version(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Version(".", "memory.max", "memory.current", "inactive_file")


def available_bytes(system: Path = Path("/")) -> int:
    """Memory that can be taken now without swapping or exceeding a limit.

    Pages of files that were not read lately count as free, as in the machine's figure.

    Args:
        system: root of the file system with ``proc`` and ``sys``.
    """
    free = [limit - used for limit, used in _limits(system)]
    return max(min([int(psutil.virtual_memory().available), *free]), 0)


def total_bytes(system: Path = Path("/")) -> int:
    """Memory of the machine, or the lowest limit on this process if that is lower."""
    limits = [limit for limit, _ in _limits(system)]
    return min([int(psutil.virtual_memory().total), *limits])


def _limits(system: Path) -> Iterator[tuple[int, int]]:
    """Limit and used bytes of each control group that has a limit."""
    for version, group in _groups(system):
        limit, used = _number(group / version.limit), _number(group / version.usage)
        if limit is not None and used is not None:
            yield limit, max(used - _reclaimable_bytes(group, version), 0)


def _groups(system: Path) -> Iterator[tuple[_Version, Path]]:
    """The groups of this process and their ancestors; some may not exist.

    In a container, the path of version 1 may be that on the host, of which only the
    end, the container's own group, is mounted: it is the root here.
    """
    for line in (_text(system / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version = _V2
        elif "memory" in controllers.split(","):
            version = _V1
        else:
            continue
        root = system / "sys/fs/cgroup" / version.mount
        own = PurePosixPath(path.strip("/"))
        for ancestor in (own, *own.parents):
            yield version, root / ancestor


def _reclaimable_bytes(group: Path, version: _Version) -> int:
    for line in (_text(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == version.reclaimable and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no file, or no limit ("max")."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
