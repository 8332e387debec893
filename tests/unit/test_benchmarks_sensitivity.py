"""The benchmark of allocators: its samples, its pairs, and its rows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers")
import sensitivity_kl as bench

SETTING = bench.Setting("models/m", "rows.jsonl", True, 40, 3, 2, 0, "float32", 32)


class Letters:
    """One token per letter."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]


def written(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return replace(SETTING, documents=str(path), prompt_tokens=len(bench.QUESTION) + 5)


def test_answers_follow_a_context_cut_to_length_and_the_question(tmp_path):
    rows = [
        {"context": "abcdefgh", "answers": [" xyzw"]},
        {"context": "abc", "answers": ["long enough, but not its context"]},
        {"context": "hgfedcba", "answers": ["p"]},
        {"context": "ABCDEFGH", "answers": ["rs tu"]},
    ]
    samples = bench.make_samples(written(tmp_path, rows), Letters())
    assert {sample.name for sample in samples} == {"rows.jsonl:0", "rows.jsonl:3"}
    (first,) = (sample for sample in samples if sample.name.endswith(":0"))
    assert "".join(map(chr, first.prompt)) == "abcde" + bench.QUESTION
    assert "".join(map(chr, first.next)) == " xy"


def test_too_few_rows_are_said(tmp_path):
    rows = [{"context": "abcdefgh", "answers": ["xyz"]}]
    with pytest.raises(ValueError, match="only 1 rows of"):
        bench.make_samples(written(tmp_path, rows), Letters())


def test_documents_go_on_with_their_own_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    setting = replace(
        SETTING, documents=str(path), answers=False, prompt_tokens=6, count=1
    )
    (sample,) = bench.make_samples(setting, Letters())
    assert "".join(map(chr, sample.prompt)) == "abcdef"
    assert "".join(map(chr, sample.next)) == "ghi"


@pytest.mark.parametrize(
    ("allocator", "base"),
    [
        ("uniform", "uniform"),
        ("pyramid", "uniform"),
        ("head-adaptive", "head-adaptive"),
        ("sensitivity", "head-adaptive"),
        ('{"name": "sensitivity", "alpha": 2, "heads": "uniform"}', "uniform"),
    ],
)
def test_each_is_compared_with_equal_layers_and_the_same_heads(allocator, base):
    config = bench.config_of("snapkv", allocator, 256, 64)
    options = json.loads(config)
    assert (options["budget"], options["prefill_block"]) == (256, 64)
    assert bench.base_of(config) == bench.config_of("snapkv", base, 256, 64)


def test_the_summary_shows_changes_of_the_same_samples():
    configs = [
        bench.config_of('{"name": "snapkv", "window": 9}', name, 256, 64)
        for name in ("head-adaptive", "sensitivity")
    ]
    report = {
        configs[0]: {"a": 1.0, "b": 2.0, "c": 5.0},
        configs[1]: {"a": 0.5, "b": 2.25},
    }
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(bench.summary(report))
    text = console.export_text()
    for part in ("1 of 2", "-0.500 +0.250", "-0.1250", "1.3750", "2.6667"):
        assert part in text, text


def test_rows_that_were_cut_off_are_measured_again(tmp_path):
    out = tmp_path / "out.jsonl"
    row = SETTING.shared() | {"config": "{}", "sample": "a", "kl": 1.0}
    assert "models" not in json.dumps(row), "a path of this machine was recorded"
    out.write_text(json.dumps(row) + "\n" + json.dumps(row)[:30])
    assert bench.read_rows(out) == [row]
    other = SETTING.shared() | {"config": "{}", "seed": 1}
    assert bench.key_of(row) != bench.key_of(other)


def test_logits_are_those_in_front_of_each_prescribed_token():
    """Chunks of a prompt must not add logits."""
    vllm = pytest.importorskip("vllm")
    from _talk import Recorded

    recorded = Recorded(None, torch.device("cpu"), False)
    params = vllm.SamplingParams(extra_args={"prescribed": [2, 0]})
    say = recorded.new_req_logits_processor(params)
    Recorded.seen.clear()
    logits = [torch.tensor([float(i), 0.0, 1.0]) for i in range(4)]
    progress: list[int] = []
    for chunk in logits[:3]:
        assert say(progress, chunk).argmax() == 2
    progress.append(2)
    assert say(progress, logits[3]).argmax() == 0
    assert [seen[0].item() for seen in Recorded.seen] == [2.0, 3.0]
    assert recorded.new_req_logits_processor(vllm.SamplingParams()) is None


def test_who_reads_what_an_engine_saw_runs_it_in_its_own_process():
    """Records and logits exist only in the engine's process, which is another one by
    default.
    """
    readers = []
    for script in sorted(Path(bench.__file__).parent.glob("[!_]*.py")):
        text = script.read_text(encoding="utf-8")
        if "take_records" in text or "import Recorded" in text:
            readers.append(script.name)
            assert 'environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"' in text, script
    assert "sensitivity_kl.py" in readers
