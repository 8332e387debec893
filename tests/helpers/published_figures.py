"""Figures in the documentation, and the committed rows that they come from.

A figure is a number with a unit or a ratio: "4.3 times", "11 of 18", "67 MiB". A
comment in front of a paragraph, list or table names its rows:

    <!-- figures: eighth/snapkv, budget 128; first-token/10; 7.6 = 3455 / 456 -->

``TABLE`` or ``TABLE/ROW`` are rows of ``benchmarks/results``: of a table in
``history.jsonl``, of ``evidence.json`` (``evidence/LABEL`` or ``… at 5 %``) or
of another ``.jsonl`` file whose rows have ``table`` and ``row``. Every figure of the
block must be a number of these rows, rounded as shown. ``A = B / C`` derives a figure
from two numbers of the rows; so do ``A = B - C`` and ``A = B % above C``.

``<!-- no figures: why -->`` marks a block whose numbers are no measurements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = (
    r"(?:%|times\b|nats\b|[KMG]iB\b|[kMG]B\b|ms\b|µs\b|s\b|seconds?\b|minutes?\b"
    r"|tokens/s\b|tokens per second\b|per minute\b|requests per)"
)
_LIST = rf"{_NUMBER}(?:\s*(?:,|to|and|or|\.\.|against)\s+(?:and )?{_NUMBER})*"
FIGURE = re.compile(
    rf"(?<![\w.#/-])(?:x {_NUMBER}"
    rf"|{_LIST}\s?{_UNIT}"
    rf"|{_LIST}(?:/| of (?:the )?)(?:{_NUMBER}|ten|twelve|twenty)\b"
    rf"|\b(?:p|F1|KL) {_NUMBER}|\*\*{_NUMBER})"
)
_COUNT = re.compile(rf"(?:/| of (?:the )?)({_NUMBER}|ten|twelve|twenty)$")
_COMMENT = re.compile(r"<!-- (no figures|figures): (.*?) -->", re.DOTALL)
_GENERATED = re.compile(r"<!-- generated: .*?<!-- end -->", re.DOTALL)
_FENCE = re.compile(r"^(```+|~~~+).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_WORDS = {"ten": "10", "twelve": "12", "twenty": "20"}


@dataclass(frozen=True, slots=True)
class Row:
    """One committed row: the numbers in it, and where it comes from."""

    table: str
    row: str
    text: str

    @property
    def numbers(self) -> list[float]:
        return numbers(self.text)


def numbers(text: str) -> list[float]:
    """All numbers of a text."""
    for word, digits in _WORDS.items():
        text = re.sub(rf"\b{word}\b", digits, text)
    return [float(n.replace(",", "")) for n in re.findall(_NUMBER, text)]


def committed_rows(folder: Path) -> list[Row]:
    """Every row that documentation may cite."""
    rows = list(_evidence(json.loads((folder / "evidence.json").read_text())))
    for file in sorted(folder.glob("*.jsonl")):
        columns: dict[str, list[str]] = {}
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "columns" in row:  # first line of a table of history.jsonl
                columns[row["table"]] = row["columns"]
            elif "table" in row and "row" in row:
                parts = [*columns.get(row["table"], ()), *_values(row)]
                rows.append(Row(row["table"], row["row"], " | ".join(parts)))
    return rows


def _values(row: Mapping[str, Any]) -> list[str]:
    """Cells of a transcribed row; else names and values of a measured one."""
    if "cells" in row:
        return list(row["cells"])
    return [f"{key} {value}" for key, value in row.items() if key != "table"]


def _evidence(models: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for model in models:
        for cell in model["cells"]:
            parts = []
            for task in ("passkey", "multikey", "kl"):
                if score := cell.get(task):
                    found = round(score["mean"] * score["samples"])
                    values = (score[name] for name in ("mean", "low", "high"))
                    parts.append(f"{found} of {score['samples']}, {[*values]}")
            parts += [
                f"{cell[field] / (1 << 20):.3f} MiB"
                for field in ("device_bytes", "peak_device_bytes", "host_bytes")
                if cell.get(field) is not None
            ]
            for field in ("tokens_per_s", "first_token_ms"):
                parts += [str(value) for value in cell.get(field, ())]
            share = cell["share"]
            shown = f" at {100 * share:g} %" if share else ""
            yield Row(
                "evidence", cell["label"] + shown, f"{shown} | {' | '.join(parts)}"
            )


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, list or table, and the comment in front of it."""

    text: str
    comment: str
    exempt: bool


def blocks(page: str) -> Iterator[Block]:
    """Blocks of a page without code and generated parts."""
    page = _FENCE.sub("", _GENERATED.sub("", page))
    comment, exempt = "", False
    for part in re.split(r"\n\s*\n", page):
        found = _COMMENT.search(part)
        if found:
            comment, exempt = found[2], found[1] == "no figures"
            part = _COMMENT.sub("", part)
        text = re.sub(r"<!--.*?-->", "", part, flags=re.DOTALL).strip()
        if text:
            yield Block(text, comment, exempt)
            comment, exempt = "", False


def problems(page: str, rows: Sequence[Row]) -> list[str]:
    """Figures of a page that no row bears out, and comments that name no rows."""
    return [problem for block in blocks(page) for problem in _problems(block, rows)]


def _problems(block: Block, rows: Sequence[Row]) -> Iterator[str]:
    if block.exempt:
        return
    lines = block.text.splitlines()
    table = len(lines) > 2 and all(line.startswith("|") for line in lines)
    chosen, derived = [], []
    for selector in filter(None, (part.strip() for part in block.comment.split(";"))):
        if " = " in selector:
            derived.append(selector)
            continue
        cited = select(selector, rows)
        if not cited:
            yield f"no committed row is {selector!r}"
        chosen += cited
    known = [number for row in chosen for number in row.numbers]
    for selector in derived:
        shown, why = derive(selector, known)
        if why:
            yield why
        known.append(shown)
    if table and chosen:
        yield from _table_problems(lines, chosen, known)
        return
    yield from _figure_problems(block.text, chosen, known)


def figures(text: str) -> list[str]:
    """The figures of a text, without code and targets of links."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`\n]*`", "``", text))
    return [match[0] for match in FIGURE.finditer(text)]


def missing(figure: str, known: Sequence[float]) -> list[str]:
    """Numbers of a figure that no known number rounds to; 0.98 is 98 %."""
    if figure.endswith("%"):
        known = [*known, *(100 * number for number in known)]
    for word, digits in _WORDS.items():
        figure = re.sub(rf"\b{word}\b", digits, figure)
    return [
        shown
        for shown in re.findall(_NUMBER, figure)
        if not any(rounds_to(number, shown) for number in known)
    ]


def unmatched_count(figure: str, chosen: Sequence[Row]) -> str:
    """A count "A of B" that no row has: as "A of B", "A/B", or its mean score.

    Rows that hold bare counts must have both numbers.
    """
    match = _COUNT.search(figure)
    assert match is not None
    total = _WORDS.get(match[1], match[1])
    for count in re.findall(_NUMBER, figure[: match.start()]):
        pair = re.compile(rf"(?<![\d.]){count}(?:/| of ){total}(?!\d)")
        mean = float(count) / float(total.replace(",", "")) if float(total) else 0.0
        if not any(
            pair.search(row.text)
            or (total in row.text and f"{mean:.3f}" in row.text)
            or not re.search(r"\d(?:/| of )\d|\d\.\d{3}", row.text)
            for row in chosen
        ):
            return f"{count} of {total}"
    return ""


def rounds_to(number: float, shown: str) -> bool:
    """Whether a number, rounded to the digits of a text, is this text."""
    shown = shown.replace(",", "")
    digits = len(shown.partition(".")[2])
    return abs(number - float(shown)) <= 0.5 * 10**-digits + 1e-9


def select(selector: str, rows: Sequence[Row]) -> list[Row]:
    """Rows of ``TABLE`` or ``TABLE/ROW``; a row may be named by its beginning."""
    table, _, wanted = selector.partition("/")
    return [row for row in rows if row.table == table and row.row.startswith(wanted)]


def derive(selector: str, known: Sequence[float]) -> tuple[float, str]:
    """Value of ``A = B / C`` and the like, and why it does not hold; "" if it does."""
    match = re.fullmatch(
        rf"({_NUMBER}) = ({_NUMBER}) (/|-|% above) ({_NUMBER})",
        " ".join(selector.split()),
    )
    if match is None:
        return 0.0, f"{selector!r} is not 'A = B / C', '-' or '% above'"
    shown, left, operator, right = match.groups()
    for part in (left, right):
        if not any(rounds_to(number, part) for number in known):
            return float(shown), f"{selector!r}: no cited row has {part}"
    a, b = (float(part.replace(",", "")) for part in (left, right))
    value = {"/": a / b, "-": a - b, "% above": 100 * (a / b - 1)}[operator]
    if not rounds_to(value, shown):
        return float(shown), f"{selector!r} gives {value:.4g}"
    return float(shown), ""


def _table_problems(
    lines: Sequence[str], chosen: Sequence[Row], known: Sequence[float]
) -> Iterator[str]:
    """Every number of a line must be in the committed row of the same label.

    A table without a line that is named like a row is checked like text.
    """
    by_label: dict[str, list[float]] = {}
    for row in chosen:
        by_label.setdefault(plain(row.row), []).extend(row.numbers)
    measured = any(plain(cells(line)[0]) in by_label for line in lines[2:])
    for line in lines[2:]:
        label, *values = cells(line)
        text = re.sub(r"\]\([^)]*\)", "]", " | ".join(values))
        text = re.sub(r"`[^`]*`", "", text)
        if not measured:
            yield from _figure_problems(text, chosen, known)
            continue
        for shown in missing(text, by_label.get(plain(label), ())):
            yield f"{shown} in the line {label!r}: no cited row has it"


def _figure_problems(
    text: str, chosen: Sequence[Row], known: Sequence[float]
) -> Iterator[str]:
    for figure in figures(text):
        count = _COUNT.search(figure)
        wrong = unmatched_count(figure, chosen) if count else missing(figure, known)
        if wrong:
            yield f"{wrong} in {' '.join(figure.split())!r}: no cited row has it"


def cells(line: str) -> list[str]:
    """Cells of a line of a table."""
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", inner)]


def plain(text: str) -> str:
    """A label without marks for code, bold text and links."""
    return re.sub(r"[`*]|\]\([^)]*\)|\[", "", text).strip()
