"""Benchmarks import each other across folders, and the README lists every script."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


# Runs every script with --help in one process, so that libraries are imported once.
ALL_HELPS = """
import contextlib, io, json, runpy, sys
from pathlib import Path
results = {}
for path in sys.argv[1:]:
    before = list(sys.path)
    sys.path.insert(0, str(Path(path).parent))  # as `python path` does
    sys.argv = [path, "--help"]
    output = io.StringIO()
    status = "ended without an exit status"
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
    except BaseException as error:
        status = f"{type(error).__name__}: {error}"
    sys.path[:] = before
    for name, module in list(sys.modules.items()):  # no script relies on another
        if "/benchmarks/" in str(getattr(module, "__file__", "")):
            del sys.modules[name]
    results[path] = [status, "Usage" in output.getvalue().title()]
print("RESULT " + json.dumps(results))
"""


@pytest.mark.slow
def test_every_script_shows_its_help():
    for library in ("transformers", "typer", "aiohttp"):
        pytest.importorskip(library)
    scripts = [
        str(path)
        for path in FILES
        if not path.name.startswith("_")
        and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    assert len(scripts) > 30
    done = subprocess.run(
        [sys.executable, "-c", ALL_HELPS, *scripts],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    results = json.loads(line.removeprefix("RESULT "))
    assert {
        path: result for path, result in results.items() if result != [0, True]
    } == {}
