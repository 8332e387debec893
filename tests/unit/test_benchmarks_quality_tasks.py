"""Quality tasks: parsing of published files, with generated rows of their format."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import _quality_tasks as tasks_module
from _quality_samples import Sample, Setting, TaskError, Tokens
from _quality_tasks import TASKS, samples_of

SETTING = Setting(
    model="m",
    dtype="float32",
    seed=0,
    limit=4,
    tokens=600,
    lengths=(200, 400),
    depths=4,
    keys=5,
    questions=2,
    shots=2,
    fillers=3,
    max_prompt_tokens=300,
)


class Words:
    """A tokenizer whose tokens are words."""

    def encode(self, text, add_special_tokens=True):
        return text.split()

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(ids)


TOKENS = Tokens(Words())


def made(task: str, **changes: object) -> list[Sample]:
    return list(TASKS[task](replace(SETTING, **changes), TOKENS))


def write(path: Path, rows: object) -> str:
    """Write rows as JSON, or as JSONL, according to the file's name."""
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    else:
        path.write_text(json.dumps(rows))
    return str(path)


# -- generated ------------------------------------------------------------------


def test_a_pass_key_stands_at_every_depth():
    samples = made("passkey")
    assert [s.place["depth"] for s in samples] == [0.125, 0.375, 0.625, 0.875]
    for sample in samples:
        (key,), (message,) = sample.truths, sample.messages
        text = message["content"]
        assert text.count(key) == 2
        assert text.index(key) / len(text) == pytest.approx(
            sample.place["depth"], abs=0.15
        )
    others = made("passkey", seed=1)
    assert {s.truths for s in samples}.isdisjoint(s.truths for s in others)


def test_the_grid_has_every_depth_of_every_length():
    cells = [(s.place["tokens"], s.place["depth"]) for s in made("needle")]
    depths = (0.125, 0.375, 0.625, 0.875)
    assert cells == [(n, d) for n in (200, 400) for d in depths]
    short, long = made("needle")[0], made("needle")[4]
    words = [TOKENS.count(sample.messages[0]["content"]) for sample in (short, long)]
    assert words[1] - words[0] == pytest.approx(200, abs=30)


def test_all_keys_stand_in_a_context_and_questions_share_it():
    samples = made("multikey", limit=6)
    assert [s.group for s in samples] == [f"context {i // 2}" for i in range(6)]
    first, second, third = samples[:3]
    question = "\nWhat is the special magic number for "
    texts = [s.messages[0]["content"].split(question)[0] for s in samples[:3]]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].count("One of the special magic numbers for ") == 5
    for sample in samples:
        key = sample.name.split(", ")[1]
        note = f"One of the special magic numbers for {key} is: {sample.truths[0]}."
        assert note in sample.messages[0]["content"]
        assert sample.opening.endswith(f"for {key} mentioned in the provided text is")
    assert first.truths != second.truths != third.truths
    assert TOKENS.count(texts[0]) == pytest.approx(600, abs=40)
    # a longer run begins with the same samples
    assert made("multikey", limit=3) == samples[:3]
    assert made("multikey", seed=1)[0] != first
    with pytest.raises(TaskError, match="raise --tokens"):
        made("multikey", tokens=20)
    with pytest.raises(TaskError, match="--questions 6"):
        made("multikey", questions=6)


@pytest.mark.parametrize(("task", "keys"), [("multivalue", 1), ("multiquery", 4)])
def test_all_numbers_of_the_requested_keys_count(task, keys):
    samples = made(task)
    for sample in samples:
        text, question = sample.messages[0]["content"].rsplit("\n", 1)
        notes = re.findall(r"magic numbers for (\S+) is: (\d+)\.", text)
        assert sorted(value for _, value in notes) == sorted(sample.truths)
        assert len({name for name, _ in notes}) == keys
        assert all(name in question and name in sample.opening for name, _ in notes)
        assert not any(value in question for value in sample.truths)
    assert_contexts(task, samples)


def test_a_value_goes_from_variable_to_variable():
    samples = made("variables")
    for sample in samples:
        text, question = sample.messages[0]["content"].rsplit("\n", 1)
        (first, value), *_ = re.findall(r"VAR (\w+) = (\d+)\.", text)
        copies = re.findall(r"VAR (\w+) = VAR (\w+)\.", text)
        chain = [first, *(name for name, _ in copies)]
        assert [other for _, other in copies] == chain[:-1]
        assert sample.truths == tuple(chain)
        assert len(chain) == 5
        assert value in question
        assert not any(name in question for name in chain)
    assert_contexts("variables", samples)


def test_common_words_are_ten_times_as_frequent():
    samples = made("common_words", tokens=1500)
    for sample in samples:
        text, _ = sample.messages[0]["content"].rsplit("\n", 1)
        counts = Counter(text.partition("afterwards.\n")[2].split(", "))
        common = dict(counts.most_common(10))
        assert set(common) == set(sample.truths)
        (least,) = {count for word, count in counts.items() if word not in common}
        assert set(common.values()) == {10 * least}
        assert TOKENS.count(text) < 1520
    assert_contexts("common_words", samples, tokens=1500)
    with pytest.raises(TaskError, match="raise --tokens"):
        made("common_words", tokens=50)


def assert_contexts(task: str, samples: list[Sample], **changes: object) -> None:
    """Each sample has its own context, and a longer run begins with the same ones."""
    assert len({sample.messages[0]["content"] for sample in samples}) == len(samples)
    assert made(task, limit=2, **changes) == samples[:2]
    assert made(task, seed=1, **changes)[0].truths != samples[0].truths


def test_keys_are_planted_in_the_user_s_text(tmp_path):
    (tmp_path / "a.txt").write_text("A word or two stand here. " * 200 + "End.")
    (sample, *_) = made("multikey", haystack=str(tmp_path))
    assert "A word or two stand here." in sample.messages[0]["content"]
    with pytest.raises(TaskError, match="--haystack"):
        made("passkey", haystack=str(tmp_path), tokens=5000)


# -- published ------------------------------------------------------------------


def test_ruler_rows_are_prompts_to_go_on_with(tmp_path):
    row = {"index": 3, "input": "Text. The magic number is", "length": 9}
    file = write(tmp_path / "niah_single_1.jsonl", [row | {"outputs": ["12", "34"]}])
    (sample,) = made("ruler", ruler=file)
    assert (sample.task, sample.name) == ("ruler:niah_single_1", "3")
    assert (sample.prompt, sample.messages) == ("Text. The magic number is", ())
    assert (sample.truths, sample.metric) == (("12", "34"), "contains")
    assert sample.max_tokens == 128
    qa = write(tmp_path / "qa_1.jsonl", [row | {"outputs": ["x"]}])
    (sample,) = made("ruler", ruler=qa)
    assert (sample.metric, sample.max_tokens) == ("contains_any", 32)
    with pytest.raises(TaskError, match="5 tokens; raise"):
        made("ruler", ruler=qa, max_prompt_tokens=4)
    with pytest.raises(TaskError, match="row 0 lacks outputs"):
        made("ruler", ruler=write(tmp_path / "bad.jsonl", [row]))
    with pytest.raises(TaskError, match="give --ruler"):
        made("ruler")
    with pytest.raises(TaskError, match="does not exist"):
        made("ruler", ruler=str(tmp_path / "none.jsonl"))


def longbench(tmp_path: Path, name: str, **fields: object) -> Sample:
    """The sample that one synthetic row gives."""
    (config := tmp_path / "config").mkdir(exist_ok=True)
    prompt = "Read.\n{context}\nNow: {input}\nAnswer:"
    write(config / "dataset2prompt.json", {name: prompt})
    write(config / "dataset2maxlen.json", {name: 64})
    row = {"input": "why {x}?", "context": "because", "answers": ["a", "b"]}
    row |= {"dataset": name, "_id": "e4", "all_classes": None} | fields
    file = write(tmp_path / f"{name}.jsonl", [row])
    (sample,) = made("longbench", longbench=file, longbench_config=str(config))
    return sample


def test_longbench_rows_take_their_published_prompt(tmp_path):
    question = longbench(tmp_path, "hotpotqa")
    assert question.messages[0]["content"] == "Read.\nbecause\nNow: why {x}?\nAnswer:"
    assert (question.metric, question.max_tokens, question.truths) == (
        *("word_f1", 64),
        ("a", "b"),
    )
    assert (question.task, question.name) == ("longbench:hotpotqa", "e4")
    # few-shot tasks are texts to continue
    classes = ["City", "Food"]
    shots = longbench(tmp_path, "trec", all_classes=classes)
    assert (shots.messages, shots.classes) == ((), ("City", "Food"))
    assert shots.prompt.startswith("Read.")
    assert shots.first_line
    with pytest.raises(TaskError, match="Chinese"):
        longbench(tmp_path, "dureader")
    with pytest.raises(TaskError, match="no LongBench dataset 'other'"):
        longbench(tmp_path, "other")


def test_what_is_too_long_loses_its_middle(tmp_path):
    context = " ".join(f"w{i}" for i in range(1000))
    text = longbench(tmp_path, "qmsum", context=context).messages[0]["content"]
    assert TOKENS.count(text) == 299  # the halves meet inside a word
    assert text.startswith("Read. w0 w1 ")
    assert text.endswith("Now: why {x}? Answer:")
    assert "w148" in text
    assert "w500" not in text


def test_gsm8k_questions_follow_the_same_worked_examples(tmp_path):
    rows = [{"question": f"q{i}?", "answer": f"because\n#### {i}"} for i in range(5)]
    file = write(tmp_path / "test.jsonl", rows)
    samples = made("gsm8k", gsm8k=file)
    assert len(samples) == 3  # five minus two shots
    prefixes = {s.prompt.rpartition("Question: ")[0] for s in samples}
    assert len(prefixes) == 1
    (examples,) = prefixes
    assert examples.count("Question: ") == examples.count("\nAnswer: because") == 2
    for sample in samples:
        question = sample.prompt.rpartition("Question: ")[2]
        assert question.endswith("?\nAnswer:")
        assert question[1] == sample.truths[0][-1]
        assert f"{question[:2]}?" not in examples
    with pytest.raises(TaskError, match="too few for --shots 9"):
        made("gsm8k", gsm8k=file, shots=9)


def test_gsm8k_without_examples_asks_for_the_steps(tmp_path):
    rows = [{"question": f"q{i}?", "answer": f"because\n#### {i}"} for i in range(5)]
    file = write(tmp_path / "test.jsonl", rows)
    samples = made("gsm8k", gsm8k=file, shots=0, limit=4, answer_tokens=77)
    assert len(samples) == 4
    for sample in samples:
        (message,) = sample.messages
        assert message["content"].startswith(f"q{sample.truths[0][-1]}?\n\n")
        assert (sample.prompt, sample.max_tokens) == ("", 77)


def test_longgenbench_asks_several_questions_at_once(tmp_path):
    rows = [{"question": f"q{i}?", "answer": f"so\n#### {i}"} for i in range(7)]
    file = write(tmp_path / "test.jsonl", rows)
    samples = made("longgen_gsm8k", gsm8k=file)
    assert [len(s.truths) for s in samples] == [2, 2]  # a fifth question remains
    system, user = samples[0].messages
    assert system["role"] == "system"
    assert user["content"].count("The answer is") == 2
    assert "Question_4:" in user["content"]
    assert "Answer_3:" not in user["content"]
    assert samples[0].place["first"] == 3


def test_longgenbench_s_instructions_are_as_published(tmp_path):
    row = {"prompt": "Write.\n#*# Floor 1:", "type": "Floor", "number": 100}
    file = write(tmp_path / "short.json", [row | {"prefix": "#*# Floor 1:"}])
    (sample,) = made("longgenbench", longgenbench=file, answer_tokens=77)
    assert (sample.prompt, sample.truths) == ("Write.\n#*# Floor 1:", ("100",))
    assert (sample.max_tokens, sample.place) == (77, {"type": "Floor"})


def test_a_preference_is_told_first_and_needed_last(tmp_path):
    row = {
        "preference": "I eat no meat.",
        "question": "Where to eat?",
        "implicit_query": "What is for lunch?",
        "options": ["Steak.", "Salad.", "Bacon.", "Ham."],
        "aligned_op": "Salad.",
    }
    (folder := tmp_path / "choice-based").mkdir()
    write(folder / "food.json", [row, row])
    samples = made("prefeval", prefeval=str(folder), limit=2)
    assert {s.name for s in samples} == {"food 0", "food 1"}
    for sample in samples:
        assert sample.messages[0] == {"role": "user", "content": "I eat no meat."}
        assert len(sample.messages) == 2 * (1 + 3) + 1
        question = sample.messages[-1]["content"]
        assert question.startswith("What is for lunch?\nA. ")
        assert f"{sample.truths[0]}. Salad." in question
        assert sample.task == "prefeval:choice"
    assert made("prefeval", prefeval=str(folder), limit=1) == samples[:1]
    plain = {name: row[name] for name in ("preference", "question")}
    (repeat,) = made("prefeval", prefeval=write(tmp_path / "food.json", [plain]))
    assert (repeat.task, repeat.metric) == ("prefeval:repeat", "word_f1")
    assert repeat.truths == ("I eat no meat.",)
    write(folder / "food.json", [row | {"aligned_op": "Rice."}])
    with pytest.raises(TaskError, match="aligned_op"):
        made("prefeval", prefeval=str(folder))


def test_locomo_asks_what_the_excerpt_answers(tmp_path):
    def dialogue(name: str) -> dict:
        turn = {"speaker": name, "text": "I went to Rome. " * 3}
        spoken = [turn | {"dia_id": f"D1:{i}"} for i in range(40)]
        qa = [
            {"question": "Who?", "answer": name, "category": 1, "evidence": ["D1:0"]},
            {"question": "Late?", "answer": 9, "category": 2, "evidence": ["D1:39"]},
            {"question": "No?", "answer": "x", "category": 5, "evidence": ["D1:0"]},
        ]
        return {"conversation": {"session_1": spoken}, "qa": qa}

    file = write(tmp_path / "locomo.json", [dialogue("Ann"), dialogue("Bob")])
    samples = made("locomo", locomo=file)
    assert [s.truths for s in samples] == [("Ann",), ("Bob",)]
    assert [s.group for s in samples] == ["dialogue 0", "dialogue 1"]
    user, assistant, question = samples[0].messages
    assert user["content"].startswith("Ann: I went to Rome.")
    assert (assistant["role"], question["role"]) == ("assistant", "user")
    assert question["content"].startswith("Who?")
    assert TOKENS.count(user["content"]) <= 300 - 128


# -- all tasks ------------------------------------------------------------------


def test_samples_of_all_tasks_come_in_order(monkeypatch):
    monkeypatch.setattr(Tokens, "of", classmethod(lambda cls, model: TOKENS))
    samples = samples_of(SETTING, ["multikey", "passkey"])
    assert [s.task for s in samples] == ["multikey"] * 4 + ["passkey"] * 4
    assert samples_of(SETTING, []) == []
    same = Sample("t", "one", "letter", ("A",))
    monkeypatch.setitem(tasks_module.TASKS, "twice", lambda *_: [same, same])
    monkeypatch.setitem(tasks_module.TASKS, "none", lambda *_: [])
    with pytest.raises(TaskError, match="two samples of one name"):
        samples_of(SETTING, ["twice"])
    with pytest.raises(TaskError, match="no samples"):
        samples_of(SETTING, ["none"])


def test_a_header_tells_files_by_their_contents(tmp_path):
    (file := tmp_path / "test.jsonl").write_text("a")
    before = replace(SETTING, gsm8k=str(file)).header()
    assert before["gsm8k"].startswith("test.jsonl ")
    assert str(tmp_path) not in json.dumps(before)
    assert "limit" not in before  # fewer or more of the same samples
    file.write_text("b")
    assert replace(SETTING, gsm8k=str(file)).header() != before
    (moved := tmp_path / "elsewhere").mkdir()
    (moved / "test.jsonl").write_text("a")
    assert replace(SETTING, gsm8k=str(moved / "test.jsonl")).header() == before
