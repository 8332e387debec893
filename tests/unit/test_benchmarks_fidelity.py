"""The fidelity benchmark: its metrics, its choice of documents, its report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import fidelity
import fidelity_report
from _documents import Document

ROW = dict.fromkeys(fidelity_report.FIGURES, 0.25) | {"commit": "c", "command": "m"}


def test_kl_is_that_of_the_formula():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    expected = 0.5 * math.log(2) - 0.25 * math.log(2)
    actual = fidelity.kl_divergence(p.log() + 3, q.log() - 1)  # logits have no origin
    assert float(actual) == pytest.approx(expected)
    assert float(fidelity.kl_divergence(p, p)) == 0.0


def test_error_is_relative_to_the_reference():
    reference = torch.tensor([3.0, 4.0])
    assert fidelity.relative_error(reference, torch.zeros(2)) == pytest.approx(1.0)
    assert fidelity.relative_error(reference, reference * 1.1) == pytest.approx(0.1)


def test_documents_that_are_long_enough_are_chosen_by_seed():
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    texts = [Document(f"d{i}", "x" * (90 + i)) for i in range(20)]

    def names(seed: int) -> list[str]:
        chosen = fidelity.choose(list(texts), Letters(), 100, 4, seed)
        assert all(len(ids) == 100 for _, ids in chosen)
        return [name for name, _ in chosen]

    assert names(0) == names(0)
    assert names(0) != names(1)
    with pytest.raises(ValueError, match="only 10 documents"):
        fidelity.choose(list(texts), Letters(), 100, 11, 0)


def test_policies_are_named_by_their_settings():
    rows = fidelity.parse_rows(["tova", '{"name": "snapkv", "window": 8}'])
    assert rows == {
        "tova": {"name": "tova"},
        "snapkv window=8": {"name": "snapkv", "window": 8},
    }
    every = fidelity.parse_rows([])
    assert {"snapkv", "h2o", "kvzip", "random"} <= set(every)
    assert "full" not in every


def test_the_report_puts_files_together(tmp_path):
    def write(name: str, *rows: dict[str, Any]) -> Path:
        (tmp_path / name).write_text(json.dumps({"rows": [ROW | row for row in rows]}))
        return tmp_path / name

    def row(policy: str, document: str, kl: float) -> dict[str, Any]:
        return {"policy": policy, "budget": 0.1, "document": document, "kl": kl}

    first = write("a", row("b", "x", 9.0), row("b", "y", 1.0), row("a", "x", 3.0))
    second = write("b", row("b", "x", 2.0), row("a", "y", 5.0))
    rows = fidelity_report.read([first, second])
    assert list(fidelity_report.by_policy(rows, 0.1)) == ["b", "a"]
    lines = fidelity_report.markdown(rows, 0.1).splitlines()
    assert lines[2].startswith("| b | 1.500 ± 0.707 | 0.250 ± 0.000 |")
    assert lines[3].startswith("| a | 4.000 ± 1.414 |")
