"""Writes the parts of the documentation that follow from code and measurements.

    python scripts/generate_docs.py            update all pages
    python scripts/generate_docs.py --check    list stale parts; exit status 1 if any

A page marks each generated part with two comments:

    <!-- generated: settings snapkv -->
    <!-- end -->

    settings NAME    table of settings of a policy, of ``auto``, ``sessions`` or
                     ``kernel``, from the pydantic models
    auto             what ``--kv-policy auto`` chooses and how it answers
    other-tasks      scores on tasks like RULER's, by which nothing is chosen
    figures POLICY   list of measured figures of a policy, from docs/research
    verdict POLICY   what the evidence shows about a policy, by paired tests
    evidence-summary, evidence-headline   the best policies; a bullet of the README
    evidence         tables of the evidence; publish_evidence.py updates its rows
    evidence-speed   the same rows: speed next to stock vLLM, with spreads
    imports          import graph of the package, from its source
    matrix           tested configurations, from the tests' ``proves`` marks
    tested KIND      tested architectures or requests, by policy, from the same marks
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import _docs_auto as auto
import _docs_evidence as evidence
import _docs_figures as figures
import _docs_imports as imports
import _docs_matrix as matrix
from pydantic import BaseModel

from vllm_kvplugins.choice.settings import AutoSettings
from vllm_kvplugins.cli.settings import Setting, settings_of
from vllm_kvplugins.config import KernelSettings, PrefixSettings
from vllm_kvplugins.policies.registry import get_policy_class
from vllm_kvplugins.sessions.settings import SessionSettings

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- generated: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OTHER_SETTINGS: dict[str, type[BaseModel]] = {
    "auto": AutoSettings,
    "sessions": SessionSettings,
    "kernel": KernelSettings,
    "prefix": PrefixSettings,
}
# Settings that have a page of their own, from docs/policies.
EXPLAINED = {
    "allocator": "../budgets.md",
    "prefill_block": "../prefill-blocks.md",
    "router": "#routers",
}


def settings_table(name: str) -> str:
    """The settings of a policy, or of one of ``OTHER_SETTINGS``."""
    settings = settings_of(OTHER_SETTINGS.get(name) or get_policy_class(name))
    if not settings:
        return "It has no settings.\n"
    rows = [
        f"| {linked(setting, name)} | {cell(setting.type)} "
        f"| `{json.dumps(setting.default)}` | {cell(setting.description)} |"
        for setting in settings
    ]
    head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def linked(setting: Setting, name: str) -> str:
    """A setting's name; with a link where there is more to say than fits a cell."""
    if name not in OTHER_SETTINGS and setting.name in EXPLAINED:
        return f"[`{setting.name}`]({EXPLAINED[setting.name]})"
    return f"`{setting.name}`"


def cell(text: str) -> str:
    """Text as it stands in a table."""
    return text.replace("|", "\\|")


KINDS: dict[str, Callable[..., str]] = {
    "settings": settings_table,
    "auto": auto.tables,
    "other-tasks": auto.other_tasks,
    "verdict": evidence.verdict,
    "evidence": evidence.evidence_tables,
    "evidence-speed": evidence.evidence_speed,
    "evidence-summary": evidence.summary,
    "evidence-headline": evidence.headline,
    "figures": figures.list_of,
    "imports": imports.table,
    "matrix": matrix.tables,
    "tested": matrix.rows,
}


def generated(page: str) -> str:
    """A page with its generated parts as they must be now.

    Raises:
        ValueError: a mark names a kind that there is not, or has no end.
    """

    def replaced(found: re.Match[str]) -> str:
        kind, *arguments = found[2].split()
        if kind not in KINDS:
            raise ValueError(f"{found[2]!r}: kinds are {', '.join(KINDS)}")
        return f"{found[1]}\n{KINDS[kind](*arguments)}\n{found[4]}"

    if page.count("<!-- generated: ") != len(PART.findall(page)):
        raise ValueError("a generated part has no <!-- end -->")
    return PART.sub(replaced, page)


def stale_pages() -> dict[Path, str]:
    """Pages that are not what they must be, and what that is."""
    found = {}
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        page = path.read_text(encoding="utf-8")
        try:
            wanted = generated(page)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(ROOT)}: {error}") from error
        if wanted != page:
            found[path] = wanted
    return found


def main() -> int:
    """Write, or with ``--check`` say what would be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = stale_pages()
    for path, wanted in stale.items():
        print(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}")
        if not check:
            path.write_text(wanted, encoding="utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
