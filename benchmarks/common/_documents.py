"""Text that the user has: plain files, and JSON lines in published forms."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = {".txt", ".md", ".jsonl"}
# where the text stands in a JSON row: LongBench, RULER, and plain
FIELDS = ("context", "input", "text")


@dataclass(frozen=True, slots=True)
class Document:
    """One text. ``name``: its file, and the row where there are several."""

    name: str
    text: str


def read_documents(path: Path) -> list[Document]:
    """All documents of a file or, in order of their names, of a folder.

    Raises:
        ValueError: there are none.
    """
    files = [path]
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.suffix in SUFFIXES)
        files = sorted(found)
    documents = [document for file in files for document in _read(file)]
    if not documents:
        raise ValueError(f"no {', '.join(sorted(SUFFIXES))} with text under {path}")
    return documents


def _read(file: Path) -> list[Document]:
    text = file.read_text(encoding="utf-8", errors="replace")
    if file.suffix != ".jsonl":
        return [Document(file.name, text)] if text.strip() else []
    made = []
    for number, line in enumerate(text.split("\n")):
        row = json.loads(line) if line.strip() else {}
        body = next((row[field] for field in FIELDS if row.get(field)), "")
        if body:
            made.append(Document(f"{file.name}:{number}", body))
    return made
