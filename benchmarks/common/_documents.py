"""Reads the user's texts: plain files, and JSON lines in published formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = {".txt", ".md", ".jsonl"}
# fields that can hold the text of a JSON row: LongBench, RULER, plain
FIELDS = ("context", "input", "text")


@dataclass(frozen=True, slots=True)
class Document:
    """One text. ``name``: its file, plus the row number if the file has several
    rows."""

    name: str
    text: str


def read_documents(path: Path) -> list[Document]:
    """All documents of a file, or of a folder in order of file names.

    Raises:
        ValueError: ``path`` contains no documents.
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
    documents = []
    for number, line in enumerate(text.split("\n")):
        row = json.loads(line) if line.strip() else {}
        body = next((row[field] for field in FIELDS if row.get(field)), "")
        if body:
            documents.append(Document(f"{file.name}:{number}", body))
    return documents
