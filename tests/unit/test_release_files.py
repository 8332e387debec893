"""CHANGELOG.md and CITATION.cff: well-formed, complete, and of this version."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from vllm_kvplugins import __version__
from vllm_kvplugins.budgets import ALLOCATORS
from vllm_kvplugins.cli import app
from vllm_kvplugins.policies import available_policies

ROOT = Path(__file__).parents[2]
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
COMMANDS = sorted(getattr(get_command(app), "commands", {}))


def changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def citation() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    content: dict[str, Any] = yaml.safe_load(text)
    return content


def test_the_changelog_has_the_form_that_it_names():
    versions = re.findall(r"^## (.*)$", changelog(), re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    for version in versions[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version)
    for section in re.split(r"^## ", changelog(), flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        assert kinds == sorted(set(kinds), key=KINDS.index), "unknown, twice, or order"


@pytest.mark.parametrize("name", [*available_policies(), *ALLOCATORS])
def test_the_changelog_names_every_policy_and_allocator(name):
    assert f"`{name}`" in changelog()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_changelog_names_every_command(name):
    assert re.search(rf"`(kvplugins )?{name}\b", changelog())


def test_there_are_commands_to_look_for():
    assert "size" in COMMANDS


def test_the_citation_is_of_this_version_and_license():
    fields = citation()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert fields["cff-version"] == "1.2.0"
    assert fields["type"] == "software"
    assert fields["message"]
    assert fields["title"]
    assert fields["version"] == __version__
    assert f'license = "{fields["license"]}"' in project


def test_the_five_papers_are_cited_with_what_the_format_requires():
    fields = citation()
    references = fields["references"]
    titles = [reference["title"].partition(":")[0] for reference in references]
    assert titles == ["EpiCache", "FlowKV", "IceCache", "ProtoKV", "SeKV"]
    for reference in [fields, *references]:
        assert reference["type"] in (
            "software",
            "article",
            "conference-paper",
            "unpublished",
        )
        for author in reference["authors"]:
            # a person, or an entity
            assert set(author) in ({"given-names", "family-names"}, {"name"})
    for reference in references:
        assert reference["year"] in (2025, 2026)
        for identifier in reference.get("identifiers", ()):
            assert identifier["type"] == "other"
            assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", identifier["value"])
