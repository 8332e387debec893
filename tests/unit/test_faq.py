"""docs/faq.md knows every refusal: what it quotes is in the code, and the other way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "vllm_kvplugins"
# Where refusals are written; in these every string of a function that lists problems,
# or that is raised, is one.
SOURCES = [
    PACKAGE / "config.py",
    *(PACKAGE / "vllm_adapter").rglob("*.py"),
    *(PACKAGE / "policies").glob("*.py"),
    PACKAGE / "budgets" / "allocators.py",
    PACKAGE / "budgets" / "amounts.py",
    PACKAGE / "budgets" / "registry.py",
    PACKAGE / "sessions" / "settings.py",
]
# Their messages are for who writes a policy, or answer a call of Python, or go to
# kvplugins, whose own page has them.
NOT_AT_START_UP = {
    "register_policy",
    "build",
    "insert",
    "offline.py",
    "record.py",
    "explain.py",
}
LISTS_PROBLEMS = re.compile(r"problem|too_l|missing|_is_a_compressor|model_post_init")
REFUSES = {"KVPolicyError", "VLLMValidationError", "ValueError"}
NO_MESSAGE = {"info", "warning", "debug", "join", "getattr", "get"}  # calls
LEAST = 18  # characters of a phrase that tells one message from another


def refusals(path: Path) -> Iterator[tuple[str, str]]:
    """Where, and the longest piece of a message before what to do about it."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef) or function.name in (
            NOT_AT_START_UP
        ):
            continue
        for node in messages(function):
            pieces = literal_pieces(node)
            if len(phrase := max(pieces, key=len, default="")) >= LEAST:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", phrase


def messages(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """Strings that a function raises, or collects if it lists problems."""
    if LISTS_PROBLEMS.search(function.name):
        kept = [n for n in ast.walk(function) if isinstance(n, ast.Return | ast.Call)]
    else:
        kept = []
    kept += [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in REFUSES
    ]
    seen: set[ast.expr] = set()
    for node in kept:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in NO_MESSAGE:
            continue
        for inner in ast.walk(node):
            text = isinstance(inner, ast.JoinedStr) or (
                isinstance(inner, ast.Constant) and isinstance(inner.value, str)
            )
            if text and isinstance(inner, ast.expr):
                seen.add(inner)
    parts = {part for node in seen for part in ast.walk(node) if part is not node}
    yield from (node for node in seen if node not in parts)


def literal_pieces(node: ast.expr) -> list[str]:
    """What a message holds word for word, up to its semicolon: after it is the cure."""
    values = node.values if isinstance(node, ast.JoinedStr) else [node]
    whole = "".join(
        str(value.value) if isinstance(value, ast.Constant) else "\0"
        for value in values
    )
    pieces = re.split(r"[\0;]|\. |, got|, such as", whole.partition("; ")[0])
    return [piece.strip(" ,:()'\"") for piece in pieces if " " in piece.strip()]


def flat(text: str) -> str:
    return " ".join(text.replace("`", "").split())


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.name not in NOT_AT_START_UP], ids=lambda p: p.name
)
def test_every_refusal_is_in_the_faq(path: Path):
    page = flat((ROOT / "docs" / "faq.md").read_text(encoding="utf-8"))
    lacking = [f"{at}: {said}" for at, said in refusals(path) if flat(said) not in page]
    assert lacking == [], "say in docs/faq.md why, and what to do"


def test_the_scan_finds_what_it_must():
    found = {said for path in SOURCES for _, said in refusals(path)}
    for said in (
        "speculative decoding is not supported",
        "has learned attention sinks",
        "has learned attention sinks",
        "each part would lengthen the prompt after it was compacted",
        "must be a JSON object",
    ):
        assert any(said in one for one in found), said
    assert len(found) > 50
