"""Free host memory within the limits of control groups, from files as on Linux."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvplugins import free_memory
from vllm_kvplugins.free_memory import available_bytes

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712  # what version 1 shows for "no limit"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """32 GiB are free."""
    memory = SimpleNamespace(available=32 * GIB)
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: memory)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group(path: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    """Files of a group of version 2."""
    return _files(
        path, ("memory.max", "memory.current", "inactive_file"), limit, used, cached
    )


def group_v1(path: str, limit: int, used: int, cached: int = 0) -> dict[str, object]:
    names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    return _files(f"memory/{path}", names, limit, used, cached)


def _files(
    path: str, names: tuple[str, str, str], limit: object, used: int, cached: int
) -> dict[str, object]:
    at = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{at}/{names[0]}": limit,
        f"{at}/{names[1]}": used,
        f"{at}/memory.stat": f"anon 7\n{names[2]} {cached}",
    }


CASES = {
    "no control groups": ({}, 32),
    "a container": (
        {"proc/self/cgroup": "0::/", **group("", 8 * GIB, 3 * GIB)},
        5,
    ),
    "cached files are free": (
        {"proc/self/cgroup": "0::/", **group("", 8 * GIB, 7 * GIB, 4 * GIB)},
        5,
    ),
    "no limit": ({"proc/self/cgroup": "0::/", **group("", "max", 3 * GIB)}, 32),
    "more than the machine has free": (
        {"proc/self/cgroup": "0::/", **group("", 60 * GIB, 2 * GIB)},
        32,
    ),
    "a limit of an ancestor": (
        {
            "proc/self/cgroup": "0::/pod/app",
            **group("pod", 6 * GIB, 5 * GIB),
            **group("pod/app", 16 * GIB, GIB),
        },
        1,
    ),
    "more used than allowed": (
        {"proc/self/cgroup": "0::/", **group("", 2 * GIB, 3 * GIB)},
        0,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "12:cpu,cpuacct:/d/1\n9:memory:/d/1\n0::/d/1",
            **group_v1("d/1", 8 * GIB, 7 * GIB, 2 * GIB),
            **group_v1("", UNLIMITED_V1, 30 * GIB),
        },
        3,
    ),
    "version 1, only the own group is mounted": (
        {
            "proc/self/cgroup": "9:memory:/docker/0123",
            **group_v1("", 8 * GIB, 2 * GIB),
        },
        6,
    ),
}


@pytest.mark.parametrize(("files", "free"), CASES.values(), ids=CASES)
def test_the_lowest_limit_counts(tmp_path, files, free):
    assert available_bytes(write(tmp_path, files)) == free * GIB


def test_this_machine_has_memory():
    assert available_bytes() > 0
