"""Benchmarks import each other across folders, and the README lists every script."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(BENCHMARKS.glob("*/*.py"))
FOLDER = {path.stem: path.parent.name for path in FILES}


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_scripts_that_import_other_folders_make_them_importable():
    for path in FILES:
        used = imports(path)
        other = {
            name
            for name in used
            if FOLDER.get(name, path.parent.name) != path.parent.name
        }
        is_script = "__main__" in path.read_text(encoding="utf-8")
        if is_script and path.parent.name != "common" and other - {"_path"}:
            assert "_path" in used, f"{path}: import _path before {sorted(other)}"


def test_no_module_hides_one_of_python_or_of_a_library():
    installed = set(sys.stdlib_module_names) | {"torch", "numpy", "vllm", "typer"}
    assert installed.isdisjoint(FOLDER)


def test_the_readme_lists_every_script():
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in FILES if not path.name.startswith("_")}
    assert sorted(name for name in scripts if name not in text) == []
