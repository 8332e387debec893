"""Fidelity in a quality run: on the tiny model, with generated texts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
import _quality_fidelity as fidelity_module
from _masked_model import MaskedModel
from _quality_rows import Job, open_rows, read
from _quality_samples import Setting, TaskError
from _quality_stats import summarise
from fidelity import Reference
from texts import random_tokens
from tiny_model import KV_HEADS, LAYERS, VOCABULARY, write_tiny_model

SEED = 5
SOURCE = {"commit": "c", "command": "python benchmarks/quality/quality.py run"}
HEADER = {"settings": {"seed": 0}, "block_bytes": 1, "source": SOURCE}
TOKENS = 160


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    print("seed of the tiny model", SEED)
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "m", SEED)


def test_coverage_is_the_attention_that_falls_on_what_is_kept(model):
    ids = random_tokens(SEED, TOKENS + 4, VOCABULARY)
    reference = Reference(MaskedModel(model), ids, TOKENS)
    kept = torch.ones(LAYERS, KV_HEADS, TOKENS, dtype=torch.bool)
    assert fidelity_module.coverage(reference.full, kept) == pytest.approx(1.0)
    parts = [kept.clone() for _ in range(2)]
    parts[0][..., 50:], parts[1][..., :50] = False, False
    shares = [fidelity_module.coverage(reference.full, part) for part in parts]
    assert sum(shares) == pytest.approx(1.0)
    # one KV head of one layer, written out: two query heads over four tokens
    kept[1, 1, :50] = False
    mass = 0.0
    for head in (2, 3):
        query = reference.full.queries[1][0, head]
        logits = query @ reference.prompt.keys[1][1].T * reference.prompt.scales[1]
        mass += float(logits.softmax(-1)[:, :50].sum(-1).mean())
    lost = mass / 2 / (LAYERS * KV_HEADS)
    assert fidelity_module.coverage(reference.full, kept) == pytest.approx(1 - lost)


def test_rows_of_every_figure_are_written_once(model, tmp_path, monkeypatch):
    (folder := tmp_path / "texts").mkdir()
    words = ["Repeat", "the", "context", "Summarize", "other"]
    for number in range(3):
        text = " ".join(random.Random(number).choices(words, k=400))
        (folder / f"{number}.txt").write_text(text)
    setting = Setting(
        *(str(model), "float32", 0, 2, TOKENS, (9,), 1, 1, 1, 1, 1, 9),
        documents=str(folder),
    )
    jobs = [
        Job({}, None, "stock"),
        Job({"name": "full"}, None, "full"),
        Job({"name": "streaming-llm", "budget": 0.4}, 0.4, "streaming-llm"),
        Job({"name": "exact-topk", "budget": 0.4}, 0.4, "exact-topk"),
        Job({"name": "quest"}, 0.1, "quest", "holds too much"),
    ]
    out = tmp_path / "q.jsonl"
    open_rows(out, HEADER)

    def go() -> list[str]:
        _, rows = read(out)
        say = [].append
        return fidelity_module.measure_fidelity(setting, jobs, 1024, out, rows, say)

    (refused,) = go()
    assert refused.startswith("exact-topk at 0.4: fidelity hides tokens")
    _, rows = read(out)
    tasks = {"coverage", "error", "kl", "top1"}
    assert {row["task"] for row in rows} == {f"fidelity:{task}" for task in tasks}
    assert len({row["sample"] for row in rows}) == 2
    assert len(rows) == 8
    # A second run computes nothing
    monkeypatch.setattr(fidelity_module, "MaskedModel", None)
    go()
    assert len(read(out)[1]) == 8
    records = {record["task"]: record for record in summarise(rows)}
    assert 0 < records["fidelity:coverage"]["score"] < 1
    assert records["fidelity:kl"]["score"] > 0
    kept = records["fidelity:top1"]
    assert kept["resident_share"] == pytest.approx(0.4, abs=32 / TOKENS)
    assert kept["resident_bytes"] == kept["resident_share"] * TOKENS * 1024
    no_texts = replace(setting, documents="")
    with pytest.raises(TaskError, match="give --documents"):
        fidelity_module.measure_fidelity(no_texts, jobs, 1, out, [], print)
