"""Free host memory within the limits of control groups, from files as on Linux."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvplugins import free_memory
from vllm_kvplugins.free_memory import available_bytes, total_bytes

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712  # what version 1 shows for "no limit"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """64 GiB, of which 32 are free."""
    memory = SimpleNamespace(total=64 * GIB, available=32 * GIB)
    monkeypatch.setattr(free_memory.psutil, "virtual_memory", lambda: memory)


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def group(path: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    at = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        f"{at}/memory.max": limit,
        f"{at}/memory.current": used,
        f"{at}/memory.stat": f"anon {used - cached}\ninactive_file {cached}",
    }


def group_v1(path: str, limit: int, used: int, cached: int = 0) -> dict[str, object]:
    at = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    return {
        f"{at}/memory.limit_in_bytes": limit,
        f"{at}/memory.usage_in_bytes": used,
        f"{at}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached}",
    }


CASES = {
    "no control groups": ({}, 32, 64),
    "a container": (
        {"proc/self/cgroup": "0::/", **group("", 8 * GIB, 3 * GIB)},
        5,
        8,
    ),
    "cached files are free": (
        {"proc/self/cgroup": "0::/", **group("", 8 * GIB, 7 * GIB, 4 * GIB)},
        5,
        8,
    ),
    "no limit": ({"proc/self/cgroup": "0::/", **group("", "max", 3 * GIB)}, 32, 64),
    "more than the machine has free": (
        {"proc/self/cgroup": "0::/", **group("", 60 * GIB, 2 * GIB)},
        32,
        60,
    ),
    "a limit of an ancestor": (
        {
            "proc/self/cgroup": "0::/pod/app",
            **group("pod", 6 * GIB, 5 * GIB),
            **group("pod/app", 16 * GIB, GIB),
        },
        1,
        6,
    ),
    "more used than allowed": (
        {"proc/self/cgroup": "0::/", **group("", 2 * GIB, 3 * GIB)},
        0,
        2,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "12:cpu,cpuacct:/d/1\n9:memory:/d/1\n0::/d/1",
            **group_v1("d/1", 8 * GIB, 7 * GIB, 2 * GIB),
            **group_v1("", UNLIMITED_V1, 30 * GIB),
        },
        3,
        8,
    ),
    "version 1, only the own group is mounted": (
        {
            "proc/self/cgroup": "9:memory:/docker/0123",
            **group_v1("", 8 * GIB, 2 * GIB),
        },
        6,
        8,
    ),
}


@pytest.mark.parametrize(("files", "free", "total"), CASES.values(), ids=CASES)
def test_the_lowest_limit_counts(tmp_path, files, free, total):
    system = write(tmp_path, files)
    assert available_bytes(system) == free * GIB
    assert total_bytes(system) == total * GIB


def test_this_machine_has_memory():
    assert 0 < available_bytes() <= total_bytes()
