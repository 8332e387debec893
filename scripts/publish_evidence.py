"""Bring everything that shows the evidence up to date with its rows.

    python scripts/publish_evidence.py            write
    python scripts/publish_evidence.py --check    list stale data; status 1 if any

From ``benchmarks/results/evidence-*.jsonl``, in this order:

1. ``benchmarks/results/evidence.json``: a cell per model, policy and share
2. ``vllm_kvplugins/choice/evidence.json``: what ``kvplugins recommend`` reads
3. ``docs/img/evidence.svg``
4. the generated parts of the documentation

``--check`` compares 1 and 2, and ``generate_docs.py --check`` compares 4. Another
matplotlib draws another file, so nothing compares 3.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]
sys.path.append(str(ROOT / "benchmarks" / "quality"))

import _path  # noqa: E402, F401
from _evidence_package import written  # noqa: E402
from _evidence_report import Model, cells_of, draw  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CELLS = RESULTS / "evidence.json"
PICTURE = ROOT / "docs" / "img" / "evidence.svg"
PACKED = ROOT / "vllm_kvplugins" / "choice" / "evidence.json"


def evidence() -> list[Model]:
    """A model per file of rows; the default model first."""
    files = sorted(RESULTS.glob("evidence-*.jsonl"), reverse=True)
    return [cells_of(file) for file in files]


def data_files(models: list[Model]) -> Iterator[tuple[Path, str]]:
    """The data files, and what they must hold."""
    yield CELLS, json.dumps(models, indent=1) + "\n"
    yield PACKED, written(models)


def stale_data(models: list[Model]) -> dict[Path, str]:
    """Data files that are not what they must be, and what that is."""
    return {
        path: text
        for path, text in data_files(models)
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    """Write, or with ``--check`` say what would be written."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    models = evidence()
    wanted = stale_data(models)
    if not check:
        import generate_docs

        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:  # the PNG is not committed
            draw(models, Path(folder))
            shutil.copy(Path(folder, PICTURE.name), PICTURE)
        pages = generate_docs.stale_pages()
        for path, text in pages.items():
            path.write_text(text, encoding="utf-8")
        wanted |= pages
    for path in wanted:
        print(f"{'stale' if check else 'wrote'} {path.relative_to(ROOT)}")
    return int(check and bool(wanted))


if __name__ == "__main__":
    sys.exit(main())
