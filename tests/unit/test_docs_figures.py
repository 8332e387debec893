"""Every table of figures in the documentation shows its command.

A table is one of figures if at least a quarter of its cells, without the first column,
begin with a number. Its section, or the text of an enclosing section, must show the
command that produces them, and the command must exist. A table without measurements,
such as defaults, is marked in front:

    <!-- not measured: defaults -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from vllm_kvplugins.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
NUMBER = re.compile(r"[*~<>≈]*[-+]?\d[\d,.]*")
SHARE = 0.25
EXCUSE = re.compile(r"<!-- not measured: \S.* -->\s*\Z")
# python benchmarks/x.py …, python -m pytest …, kvplugins x …, bash scripts/x.sh …
COMMAND = re.compile(
    r"(?:python3? (?:-m )?|bash )((?:benchmarks|scripts|tests)/\S+?\.(?:py|sh)|pytest)"
    r"|\b(pytest) tests/|(?:^|`|\$ )\s*kvplugins ([a-z][\w-]+)",
    re.MULTILINE,
)
SUBCOMMANDS = set(getattr(get_command(app), "commands", {}))


class Section(NamedTuple):
    """A heading's own text and the text of the sections around it."""

    title: str
    level: int
    text: str
    above: tuple[str, ...]


def sections(page: str) -> Iterator[Section]:
    """Sections of a page; a line that begins with # inside a fence is no heading."""
    parts: list[tuple[str, int, list[str]]] = [("", 0, [])]
    fence = ""
    for line in page.splitlines():
        match = re.match(r"\s*(```+|~~~+)", line)
        if match and (not fence or match[1].startswith(fence)):
            fence = "" if fence else match[1]
        heading = None if fence else re.match(r"(#+) (.*)", line)
        if heading:
            parts.append((heading[2], len(heading[1]), []))
        parts[-1][2].append(line)
    open_ones: list[tuple[int, str]] = []
    for title, level, lines in parts:
        open_ones = [one for one in open_ones if one[0] < level]
        text = "\n".join(lines)
        yield Section(title, level, text, tuple(one for _, one in open_ones))
        if level > 1:  # text below a page's title describes no measurement
            open_ones.append((level, text))


def tables(text: str) -> Iterator[tuple[str, str]]:
    """Tables, and the text before each of them."""
    for match in re.finditer(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        yield match[0], text[: match.start()]


def has_figures(table: str) -> bool:
    cells = []
    for row in table.strip().splitlines()[2:]:
        inner = row.strip().removeprefix("|").removesuffix("|")
        cells += [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)][1:]
    numbers = [cell for cell in cells if NUMBER.match(cell)]
    return bool(cells) and len(numbers) >= SHARE * len(cells)


def commands(text: str) -> list[str]:
    """The commands that a text shows."""
    joined = text.replace("\\\n", " ")
    return [next(filter(None, match)) for match in COMMAND.findall(joined)]


def measures(text: str) -> bool:
    """Whether a text shows a command; ``kvplugins x`` in a sentence does not count."""
    return bool(commands(re.sub(r"`kvplugins [^`\n]*`", "", text)))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_table_of_figures_has_its_command(path: Path):
    bare = []
    for section in sections(path.read_text(encoding="utf-8")):
        for table, before in tables(section.text):
            if not has_figures(table) or EXCUSE.search(before):
                continue
            if not any(map(measures, (section.text, *section.above))):
                bare.append(f"{section.title!r}: {table.splitlines()[0]}")
    assert bare == [], "show the command, or say: <!-- not measured: why -->"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_the_reader_is_told_to_run_is_there(path: Path):
    for command in commands(path.read_text(encoding="utf-8")):
        if "/" in command:
            assert (ROOT / command).is_file(), command
        elif command != "pytest":
            assert command in SUBCOMMANDS, f"kvplugins {command}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_options_of_benchmarks_are_known_to_them(path: Path):
    """Whether the script, or a module that it imports, defines the option."""
    shared = "".join(p.read_text() for p in sorted(ROOT.glob("benchmarks/*/_*.py")))
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for script, rest in re.findall(r"python (benchmarks/\w+/\w+\.py)([^\n`]*)", text):
        source = (ROOT / script).read_text(encoding="utf-8") + shared
        for option in re.findall(r"(?<!\S)--[a-z][\w-]+", rest.partition(" # ")[0]):
            argument = option.strip("-").replace("-", "_").removeprefix("no_")
            known = option in source or re.search(rf"\b{argument}: ", source)
            assert known, f"{script} {option}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_whole(path: Path):
    """A table needs a header, a separator, and rows of equal width; otherwise it is
    shown as text.
    """
    for table, _ in tables(path.read_text(encoding="utf-8")):
        head, line, *rows = (row.replace("\\|", "") for row in table.splitlines())
        assert re.fullmatch(r"[|: -]+", line), f"no line under the head: {head}"
        assert rows, f"no rows under {head}"
        widths = {row.strip().count("|") for row in (head, line, *rows)}
        assert len(widths) == 1, f"rows of {widths} columns under {head}"


def test_the_scan_sees_what_it_must():
    page = "# A\n\n## B\n\n    python benchmarks/kernels/index.py X\n\n### C\n\n"
    figures = "| a | b |\n|---|---|\n| x | 1.5 |\n| y | 2.5 |\n"
    *_, last = sections(page + figures)
    ((table, before),) = tables(last.text)
    assert has_figures(table)
    assert not EXCUSE.search(before)
    assert not measures(last.text)
    assert any(map(measures, last.above))
    assert not measures("see `kvplugins model`")
    assert not has_figures("| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |\n")
    assert EXCUSE.search("text\n<!-- not measured: defaults -->\n\n")
    assert commands("run `kvplugins size M` or `python -m pytest tests/unit`") == [
        "size",
        "pytest",
    ]
