"""No figure in README and documentation without its row in the committed data."""

from __future__ import annotations

import json
from pathlib import Path

import publish_evidence
import pytest
from published_figures import (
    Row,
    blocks,
    cells,
    committed_rows,
    figures,
    problems,
)

ROOT = Path(__file__).parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PAGES = [
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("speed", "quality", "conversations")),
    *sorted((DOCS / "policies").glob("*.md")),
]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return committed_rows(RESULTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_figure_has_its_row(page, rows):
    found = problems(page.read_text(encoding="utf-8"), rows)
    assert found == [], "cite rows, see tests/helpers/published_figures.py"


def test_transcribed_rows_are_the_tables_that_they_were_copied_from():
    """A table of a page and its rows in history.jsonl change together."""
    pages: dict[str, list[list[str]]] = {}
    where: dict[str, str | None] = {}
    for line in (RESULTS / "history.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "columns" in row:
            copied = row["transcribed"] == "from a table"
            where[row["table"]] = row["page"] if copied else None
            assert row["commit"]
            assert row["command"]
            continue
        page = where[row["table"]]
        if page is None:
            continue
        if page not in pages:
            text = (ROOT / page).read_text(encoding="utf-8")
            pages[page] = [cells(x) for x in text.splitlines() if x.startswith("|")]
        assert row["cells"] in pages[page], f"{page}: {row['row']}"


def test_the_data_of_docs_and_package_follow_from_the_rows():
    """``python scripts/publish_evidence.py`` writes both; test_docs checks the docs."""
    stale = publish_evidence.stale_data(publish_evidence.evidence())
    assert list(stale) == [], "run scripts/publish_evidence.py"


def test_the_picture_shows_every_measured_policy():
    picture = (DOCS / "img" / "evidence.svg").read_text(encoding="utf-8")
    for model in json.loads((RESULTS / "evidence.json").read_text()):
        for text in (model["model"], *(cell["label"] for cell in model["cells"])):
            assert f">{text}<" in picture


# -- the check itself --------------------------------------------------------------

ROWS = [
    Row("speed", "snapkv", "x | 2.34 (1.99..2.68) | 0 of 10 | 94.6"),
    Row("speed", "stock", "x | 1.0 | 10 of 10 | 45.1"),
    Row("score", "snapkv", "0.417 (0.2..0.6) | 12"),
]
CITED = "<!-- figures: speed/snapkv -->\n"


@pytest.mark.parametrize(
    "page",
    [
        "It is 2.3 times as fast.",
        "It needs 67 MiB.",
        "It finds 3 of 10 keys.",
        "Between 4.3 and 6.5 times.",
        "| a | b |\n|---|---|\n| x | 3 of 10 |",
        f"{CITED}It is 2.4 times as fast.",
        f"{CITED}It finds 10 of 10 keys.",
        f"{CITED}\nIt is 2.3 times as fast.\n\nThat is 2.3 times.",
        f"{CITED}| a | b |\n|---|---|\n| snapkv | 2.34 |\n| stock | 1.0 and 7 |",
        "<!-- figures: speed/tova -->\nNo figure.",
        "<!-- figures: score -->\nIt finds 6 of 12 keys.",
        "<!-- figures: speed; 2.2 = 94.6 / 45.1 -->\nIt is 2.2 times as fast.",
        "<!-- figures: speed; 2.1 = 94.6 / 45.2 -->\nIt is 2.1 times as fast.",
    ],
)
def test_a_figure_without_a_row_is_found(page):
    assert problems(page, ROWS)


@pytest.mark.parametrize(
    "page",
    [
        "At most 16 run at once, with a budget of 512.",
        f"{CITED}It is 2.3 times as fast, finds 0 of 10 keys; `x 7 times` is code.",
        f"{CITED}\n| a | b |\n|---|---|\n| snapkv | 2.34, 0 of 10 |",
        "<!-- no figures: limits of the load -->\nThe first token within 10 s.",
        "<!-- generated: x -->\n7 of 9 times, 3 MiB\n<!-- end -->",
        "```\n7 of 9 times\n```",
        "<!-- figures: score -->\nIt finds 5 of 12 keys.",
        "<!-- figures: speed; 2.1 = 94.6 / 45.1 -->\nIt is 2.1 times as fast.",
    ],
)
def test_a_figure_with_its_row_passes(page):
    assert problems(page, ROWS) == []


def test_blocks_and_figures_are_told_apart():
    page = "# T\n\n<!-- figures: a -->\n\n- 5 %\n- 6 %\n\nText of 7 ms.\n"
    assert [(b.text, b.comment) for b in blocks(page)] == [
        ("# T", ""),
        ("- 5 %\n- 6 %", "a"),
        ("Text of 7 ms.", ""),
    ]
    text = "5.2, 6.0 and 6.5 times; 3 and 10 of 12 keys; [x](a.md#5-ms) in 2 turns"
    assert figures(text) == ["5.2, 6.0 and 6.5 times", "3 and 10 of 12"]
