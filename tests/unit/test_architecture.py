"""Rules that keep the package's parts apart, read from the source itself."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_kvplugins"
ADAPTER = "vllm_kvplugins.vllm_adapter"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def part_of(path: Path) -> str:
    """First component below the package: ``policies``, ``ops``, ``config``…"""
    return Path(path.relative_to(PACKAGE).parts[0]).stem


def imported(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Every module that a file imports, at any level, with its line.

    ``from a import b`` gives both a and a.b, as b may be a module; names given
    to ``import_module`` as a literal count, names looked up by ``find_spec`` not.
    """
    package = ("vllm_kvplugins", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            literal = node.args and isinstance(node.args[0], ast.Constant)
            if called in ("import_module", "__import__") and literal:
                yield node.lineno, str(node.args[0].value)


class _WithoutTypes(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def without_types(path: Path) -> ast.Module:
    """A file's syntax tree without ``if TYPE_CHECKING:``."""
    tree: ast.Module = _WithoutTypes().visit(parsed(path))
    return tree


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def offences(path: Path, *forbidden: str) -> list[str]:
    """Imports of forbidden modules, with their places."""
    return sorted(
        f"{at(path, line)}: {module}"
        for line, module in imported(parsed(path), path)
        if any(within(module, package) for package in forbidden)
    )


def at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def files_of(*parts: str) -> list[Path]:
    matches = [path for path in FILES if part_of(path) in parts]
    assert matches, f"no part is called {parts}"
    return matches


def files_outside(*parts: str) -> list[Path]:
    return [path for path in FILES if part_of(path) not in parts]


# -- who may import what ------------------------------------------------------


def test_only_the_adapter_imports_vllm():
    files = files_outside("vllm_adapter")
    assert [matches for path in files for matches in offences(path, "vllm")] == []


def test_only_entry_points_import_the_adapter():
    files = files_outside("vllm_adapter", "plugin", "cli", "episodic")
    assert [matches for path in files for matches in offences(path, ADAPTER)] == []


def test_policies_and_episodes_know_neither_engine_nor_device():
    forbidden = ("vllm", "triton", "cuda", "cupy", "torch.cuda", ADAPTER)
    files = files_of("policies", "episodes")
    assert [matches for path in files for matches in offences(path, *forbidden)] == []
    uses = [
        at(path, node.lineno)
        for path in files
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    assert uses == [], "torch.cuda"


def test_no_files_import_each_other():
    """The package has no import cycles, not even inside functions.

    Imports for types alone do not count: the policy contract (``policies.base``) names
    the classes of optional capabilities, which are written in terms of the contract.
    """
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in FILES
        if path.stem != "__init__"
    }
    graph = {
        name: {module for _, module in imported(without_types(path), path)}
        & modules.keys()
        for name, path in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def import_with_blocked(blocked: tuple[str, ...], modules: list[str]) -> None:
    code = (
        "import importlib, sys\n"
        "class Block:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name.partition('.')[0] in {blocked!r}:\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Block())\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_everything_outside_the_adapter_loads_without_vllm():
    """The rule above at run time, including indirect imports."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FILES
        if part_of(path) != "vllm_adapter" and path.stem not in ("__init__", "__main__")
    ]
    import_with_blocked(("vllm",), modules)


def test_the_command_line_loads_without_torch_and_vllm():
    """``kvplugins doctor`` must be able to report them as missing."""
    import_with_blocked(("vllm", "torch"), ["vllm_kvplugins.cli"])


def test_the_import_scan_sees_every_form():
    source = """
import vllm.envs as e
def f():
    from vllm import LLM
    import importlib
    importlib.import_module("vllm.config")
if True:
    from ..vllm_adapter import compat
    from . import base
import vllm_kvplugins, vllm_other
"""
    path = PACKAGE / "policies" / "sample.py"
    imports = {module for _, module in imported(ast.parse(source), path)}
    assert {m for m in imports if within(m, "vllm")} == {
        "vllm.envs",
        "vllm",
        "vllm.LLM",
        "vllm.config",
    }
    assert f"{ADAPTER}.compat" in imports
    assert "vllm_kvplugins.policies.base" in imports


# -- the engine does not know which policy runs -------------------------------


def policy_classes() -> set[str]:
    """Names of the contract's classes and of all classes derived from them."""
    classes = [
        node
        for path in (PACKAGE / "policies").rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]
    matches, before = {"KVCachePolicy"}, 0
    while len(matches) > before:
        before = len(matches)
        for node in classes:
            bases = {getattr(b, "id", getattr(b, "attr", "")) for b in node.bases}
            if bases & matches:
                matches.add(node.name)
    return matches


def policy_names() -> set[str]:
    registry = (PACKAGE / "policies" / "registry.py").read_text(encoding="utf-8")
    return set(re.findall(r'"([\w-]+)": "vllm_kvplugins\.policies\.', registry))


def test_the_scans_find_the_policies():
    assert {"KVCachePolicy", "Compressor", "SnapKV", "FullKV"} <= policy_classes()
    assert {"full", "snapkv", "streaming-llm"} <= policy_names()


def class_tests(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names that ``isinstance``, ``match`` or a comparison tests for, with their
    lines.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and len(node.args) > 1:
            called = getattr(node.func, "id", "")
            tested = node.args[1] if called in ("isinstance", "issubclass") else None
        elif isinstance(node, ast.MatchClass):
            tested = node.cls
        elif isinstance(node, ast.Compare):  # type(policy) is SnapKV
            tested = ast.Tuple(node.comparators)
        else:
            continue
        for inner in ast.walk(tested) if tested is not None else ():
            yield node.lineno, getattr(inner, "id", getattr(inner, "attr", ""))


def test_nothing_tests_for_the_class_of_a_policy():
    classes = policy_classes()
    matches = [
        f"{at(path, line)}: {name}"
        for path in FILES
        for line, name in class_tests(parsed(path))
        if name in classes
    ]
    assert matches == []


def test_the_scan_sees_every_test_for_a_class():
    source = """
isinstance(p, (int, policies.SnapKV))
issubclass(p, H2O)
type(p) is Quest
match p:
    case IceCache(): pass
"""
    imports = {name for _, name in class_tests(ast.parse(source))}
    assert {"SnapKV", "H2O", "Quest", "IceCache"} <= imports


def test_the_engine_never_names_a_policy():
    names = policy_names()
    named = [
        f"{at(path, node.lineno)}: {node.value!r}"
        for path in files_of("engine", "vllm_adapter")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []


# -- what a reader can expect -------------------------------------------------


def test_public_functions_and_classes_are_explained():
    """Module-level names only; the reader of a class knows its methods."""
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    missing = []
    for path in FILES:
        tree = parsed(path)
        if not ast.get_docstring(tree):
            missing.append(f"{at(path, 1)}: the module itself")
        missing += [
            f"{at(path, node.lineno)}: {node.name}"
            for node in tree.body
            if isinstance(node, definitions)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
    assert missing == []
