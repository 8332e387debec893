"""Depth of the pass key, and resuming an interrupted run."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("transformers")
import needle
from _documents import read_documents
from _pass_key import QUESTION, filler, plant, sentences

SETTING = needle.Setting("m", "", 500, 4, "float32")


def test_the_key_stands_at_every_depth_once():
    depths, haystack = 5, filler(1000)
    for depth in range(depths):
        prompt, key = plant(haystack, depth, depths)
        assert prompt.endswith(QUESTION)
        assert prompt.count(key) == 2
        share = prompt.index(key) / len(prompt)
        assert share == pytest.approx((depth + 0.5) / depths, abs=0.1)


def test_text_is_cut_at_sentences(tmp_path):
    (tmp_path / "b.txt").write_text("Four five. Six seven! Eight nine ten.")
    (tmp_path / "a.txt").write_text("One two three.")

    def first_words(text: str, count: int) -> str:
        return text[: text.index("five.") + 5] if count == 5 else text

    lines = sentences(tmp_path, 5, first_words)
    assert lines == ["One two three.", "\n\nFour five."]
    with pytest.raises(ValueError, match="fewer than 50 tokens"):
        sentences(tmp_path, 50, first_words)


def test_documents_come_from_rows_and_files(tmp_path):
    rows = [{"context": "first", "input": "?"}, {}, {"input": "second"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "plain.txt").write_text("third")
    (tmp_path / "other.py").write_text("code")
    documents = [
        (document.name, document.text) for document in read_documents(tmp_path)
    ]
    texts = [("plain.txt", "third"), ("rows.jsonl:0", "first")]
    assert documents == [*texts, ("rows.jsonl:2", "second")]
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="with text under"):
        read_documents(empty)


def test_jobs_are_one_engine_per_policy_and_budget():
    jobs = needle.make_jobs(["{}", "snapkv", '{"name": "tova", "budget": 64}'], [8, 9])
    assert [(job.label, job.budget) for job in jobs] == [
        ("stock", None),
        ("snapkv", 8),
        ("snapkv", 9),
        ("tova", 64),
    ]
    labels = {job.label for job in needle.make_jobs([], [128])}
    assert {"stock", "random", "snapkv", "snapkv window=20"} <= labels


def test_only_missing_answers_are_asked_for(tmp_path, monkeypatch):
    calls: list[tuple[str, int]] = []
    fail_at = [3]

    def fake(setting, job, todo):
        for depth in todo:
            if len(calls) == fail_at[0]:
                raise RuntimeError("interrupted")
            calls.append((job.label, depth))
            yield {"depth": depth, "key": "1", "answer": "1", "prompt_tokens": 5}

    monkeypatch.setattr(needle, "ask_engine", fake)
    jobs = needle.make_jobs(["{}", "random"], [8])
    out = tmp_path / "rows.jsonl"
    with pytest.raises(RuntimeError, match="interrupted"):
        needle.measure(SETTING, jobs, "engine", out)
    with out.open("a") as file:
        file.write('{"cut off')
    fail_at[0] = -1
    needle.measure(SETTING, jobs, "engine", out)
    depths = needle.order(4)
    assert sorted(depths) == [0, 1, 2, 3]
    every = [(label, depth) for label in ("stock", "random") for depth in depths]
    assert calls == every
    needle.measure(SETTING, jobs, "engine", out)
    assert calls == every


def test_a_longer_number_is_no_answer():
    assert needle.says("It is 12345.", "12345")
    assert not needle.says("It is 123450000.", "12345")
    assert not needle.says("It is 1234.", "12345")
