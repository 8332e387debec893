"""Imports point down: every part of the package imports lower layers only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm_kvplugins"
SUBDIVIDED = ("vllm_adapter",)
# Highest first. Parts on one line do not import each other.
LAYERS = [
    "cli episodic plugin",
    "vllm_adapter.offline",
    "vllm_adapter.startup",
    "vllm_adapter.frontend vllm_adapter.attention",
    "vllm_adapter.worker",
    "vllm_adapter.scheduler",
    "vllm_adapter.config",
    "testing training",
    "config",
    "sessions",
    "engine",
    "policies",
    "routers",
    "spans episodes index budgets choice",
    "ops model_memory",
    "scoring plan",
    "model_config log_throttle default_model amounts calibration_job key_salt",
    "other_layers recurrent_states",
    "errors free_memory",
]
LEVEL = {part: level for level, line in enumerate(LAYERS) for part in line.split()}
# Import edges that remain to be removed, with the reason.
WAIVED: dict[tuple[str, str], str] = {}


def part_of(module: str) -> str:
    """``vllm_kvplugins.engine.heap`` -> ``engine``; the adapter's parts count
    separately.
    """
    parts = module.split(".")[1:]
    depth = 2 if parts[0] in SUBDIVIDED and len(parts) > 1 else 1
    return ".".join(parts[:depth])


def edges(source: str, module: str) -> Iterator[tuple[str, str]]:
    """Every import of a file, including imports inside functions and for types."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("vllm_kvplugins.") and part_of(name) in LEVEL:
                yield part_of(module), part_of(name)


def upward(source: str, module: str) -> list[str]:
    return [
        f"{module} ({a}) imports {b}, which is not below it"
        for a, b in edges(source, module)
        if a != b and LEVEL[a] >= LEVEL[b] and (a, b) not in WAIVED
    ]


def files() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if part_of(name) not in ("__init__", "vllm_adapter.__init__"):
            yield name, path


def test_every_part_has_a_layer():
    assert {part_of(name) for name, _ in files()} == set(LEVEL)


def test_no_import_points_up():
    upward_imports = [
        problem
        for name, path in files()
        for problem in upward(path.read_text(encoding="utf-8"), name)
    ]
    assert upward_imports == []


def test_waived_edges_still_exist():
    used = {
        edge
        for name, path in files()
        for edge in edges(path.read_text(encoding="utf-8"), name)
    }
    assert set(WAIVED) <= used, "remove the waiver"


def test_an_upward_import_is_seen():
    code = "def f():\n    from vllm_kvplugins.engine.heap import Heap\n"
    assert upward(code, "vllm_kvplugins.policies.snapkv")
    assert not upward(code, "vllm_kvplugins.sessions.store")
