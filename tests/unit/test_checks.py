"""The checks before a commit run offline, with tools that the extra [dev] installs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = {"ruff", "mypy", "clang-format", "codespell"}


def hooks() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    repos = yaml.safe_load(text)["repos"]
    assert [repo["repo"] for repo in repos] == ["local"], "others need the network"
    match: list[dict[str, Any]] = repos[0]["hooks"]
    return match


def test_hooks_are_of_the_environment():
    assert {hook["language"] for hook in hooks()} == {"system"}
    assert {hook["entry"].split()[0] for hook in hooks()} == TOOLS


def test_the_extra_dev_has_their_tools():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dev = re.search(r"^dev = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert dev is not None
    names = {re.split(r"[=<>\"]", line.strip(' ",'))[0] for line in dev[1].splitlines()}
    assert names >= TOOLS | {"pre-commit", "coverage", "mkdocs-material"}


def test_they_only_look():
    """A check that changes files would do so in the middle of scripts/test.sh."""
    entries = {hook["id"]: hook["entry"].split() for hook in hooks()}
    assert "--check" in entries["ruff-format"]
    assert {"--dry-run", "--Werror"} <= set(entries["clang-format"])
    assert "--fix" not in entries["ruff"]
    assert not {"-w", "--write-changes"} & set(entries["codespell"])


def test_scripts_test_runs_them():
    text = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    assert "-m pre_commit run --all-files || lint=1" in text


def test_mypy_is_strict():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "\nstrict = true\n" in text
    # every disabled rule has a reason, in the line above it or at the override's head
    for match in re.finditer(
        r"^(\w+) = false$", text.partition("[tool.mypy]")[2], re.M
    ):
        before = text[: text.index(match[0])].rsplit("\n\n", 1)[1]
        assert "#" in before, match[0]
