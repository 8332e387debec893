"""Host memory that this process may take, within the limits of its container.

Linux reports the free memory of the whole machine, even inside a container that may
take only a part of it. The kernel kills a process that exceeds its container's limit.
Control groups hold the limits: version 2 in one hierarchy, version 1 in a hierarchy of
its own for memory. The limits of all ancestors apply.

Without control groups, all free memory of the machine counts.
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
    """Memory that this process can take now without swapping or exceeding a limit.

    Cached files that were not read lately count as free, because the kernel drops them
    first.

    Args:
        system: root of the file system with ``proc`` and ``sys``.
    """
    return max(min([int(psutil.virtual_memory().available), *_free(system)]), 0)


def _free(system: Path) -> Iterator[int]:
    """Bytes that each control group with a limit may still take; below 0 if none."""
    for version, group in _groups(system):
        limit, used = _number(group / version.limit), _number(group / version.usage)
        if limit is not None and used is not None:
            yield limit - used + _reclaimable_bytes(group, version)


def _groups(system: Path) -> Iterator[tuple[_Version, Path]]:
    """The groups of this process and their ancestors; some may not exist.

    Version 1 may show a container the path of its group on the host, while the
    container sees its own group as the root. Only the root then exists here.
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
