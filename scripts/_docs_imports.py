"""The package's import graph, read from its source."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_kvplugins"
NAME = PACKAGE.name


def table() -> str:
    """A row per folder, and per module of the package's root that others need."""
    parts = sorted({_part(path) for path in PACKAGE.rglob("*.py")} - {"__init__"})
    uses = {part: _used_by(part) & set(parts) - {part} for part in parts}
    rows = ["| part | what it is | imports | imported by |", "|---|---|---|---|"]
    for part in parts:
        users = {other for other in parts if part in uses[other]}
        folder = (PACKAGE / part).is_dir()
        path = PACKAGE / part / "__init__.py" if folder else PACKAGE / f"{part}.py"
        said = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").strip()
        name = f"`{part}/`" if folder else f"`{part}.py`"
        first = " ".join(said.partition("\n\n")[0].replace("``", "`").split())
        rows.append(f"| {name} | {first} | {_names(uses[part])} | {_names(users)} |")
    return "\n".join([*rows, ""])


def _names(parts: set[str]) -> str:
    return ", ".join(sorted(parts)) or "–"


def _part(path: Path) -> str:
    """First component below the package: ``policies``, ``ops``, ``config``…"""
    return Path(path.relative_to(PACKAGE).parts[0]).stem


def _used_by(part: str) -> set[str]:
    """Parts that a part names in an import, also for types only or when needed."""
    folder = PACKAGE / part
    paths = folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{part}.py"]
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                package, _, rest = name.partition(".")
                if package == NAME and rest:
                    found.add(rest.partition(".")[0])
    return found
