"""Dialogues and their scoring; the retention of turn 1 against a plain computation."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import retention
import torch
import turns
from _dialogue import (
    FACTS,
    FILLERS,
    RULES,
    Fact,
    dialogue,
    is_right,
    mean_interval,
    preferences,
    rules,
    sign_test,
    wilson,
)

SETTING = turns.Setting("models/m", "float32", 16, 7, FILLERS)


def test_the_same_seed_gives_the_same_dialogue():
    assert dialogue(3) == dialogue(3)
    assert len({dialogue(seed)[0].messages[1]["content"] for seed in range(20)}) > 10


@pytest.mark.parametrize("seed", range(5))
def test_every_fact_is_told_once_early_and_asked_for_once_late(seed):
    samples = dialogue(seed)
    assert sorted(sample.told_in for sample in samples) == [1, 2, 3]
    assert [sample.asked_in for sample in samples] == [8, 9, 10]
    for sample in samples:
        roles = [message["role"] for message in sample.messages]
        answered = ["user", "assistant"] * (sample.asked_in - 1)
        assert roles == ["system", *answered, "user"]
        texts = [message["content"] for message in sample.messages]
        holding = [i for i, text in enumerate(texts) if sample.fact.value in text]
        assert holding == [2 * sample.told_in - 1], "stated in one message only"
        assert sample.fact.told in texts[holding[0]]
        assert sample.fact.question in texts[-1]


def test_a_later_question_has_the_earlier_ones_in_its_history():
    first, second, _ = dialogue(1)
    assert second.messages[: len(first.messages)] == first.messages
    answer = second.messages[len(first.messages)]
    assert answer == {"role": "assistant", "content": f"{first.fact.value}."}


@pytest.mark.parametrize("seed", range(3))
def test_a_rule_is_given_first_and_applies_last(seed):
    samples = rules(seed)
    assert [sample.fact.rule for sample in samples] == list(RULES)
    for sample in samples:
        texts = [message["content"] for message in sample.messages]
        assert len(texts) == 2 * (1 + FILLERS + FACTS) + 2
        assert texts[1] == sample.fact.told
        assert texts[-1] == sample.fact.question
        assert sum("list" in text.lower() for text in texts[3:-1]) == 0
    assert samples == rules(seed)
    assert samples != rules(seed + 1)


@pytest.mark.parametrize(
    ("rule", "followed", "broken"),
    [
        ("starts", "Amber: apple, pear", "apple, pear, amber"),
        ("ends", "1. apple\n2. pear\n\nAmber.", "Amber: apple and pear"),
        ("capitals", "1. APPLE 2. PEAR", "Apple, Pear"),
        ("semicolons", "apple; pear; plum", "apple;\npear; plum"),
    ],
)
def test_rules_are_checked_by_code(rule, followed, broken):
    fact = Fact("", "", "Amber", (), rule)
    assert is_right(followed, fact)
    assert not is_right(broken, fact)
    assert not is_right("", fact)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("amber", True),
        ("The code word is Amber.", True),
        ("AMBER\n", True),
        ("ambergris", False),
        ("amber or velvet", False),
        ("velvet", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_has_the_word_and_no_other(answer, right):
    fact = Fact("", "", "amber", ("velvet", "copper"))
    assert is_right(answer, fact) == right


def test_intervals_of_counts():
    """Against published values of Wilson's interval, and its limits."""
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert sign_test(0, 0) == 1
    assert sign_test(4, 4) == 1
    assert sign_test(0, 5) == sign_test(5, 0) == pytest.approx(2 / 32)
    assert sign_test(1, 9) == pytest.approx(2 * 11 / 1024)


def test_an_interval_of_a_mean_narrows_with_more_values():
    few, many = [1.0, 3.0, 2.0, 6.0], [1.0, 3.0, 2.0, 6.0] * 25
    assert mean_interval([2.5] * 9) == (2.5, 2.5, 2.5)
    mean, low, high = mean_interval(few)
    assert mean == 3
    assert 1 < low < 2.5 < 3.5 < high < 6
    # 1.96 standard errors; the deviation of these values is 1.87
    _, low, high = mean_interval(many)
    assert (low, high) == pytest.approx((3 - 0.367, 3 + 0.367), abs=0.06)


def test_preferences_are_told_first_and_repeated_last(tmp_path):
    (tmp_path / "deep").mkdir()
    rows = [{"preference": f"I like {n}.", "question": "?"} for n in range(4)]
    (tmp_path / "a.json").write_text(json.dumps(rows[:1]))
    (tmp_path / "deep" / "b.json").write_text(json.dumps(rows[1:]))
    samples = preferences(tmp_path, 4, 6, FILLERS)
    assert sorted(sample.forced for sample in samples) == [
        f"I like {n}." for n in range(4)
    ]
    for sample in samples:
        assert sample.messages[1]["content"] == sample.forced
        assert len(sample.messages) == 2 * (1 + FILLERS + FACTS) + 2
        assert sum(sample.forced in m["content"] for m in sample.messages) == 1
    assert samples == preferences(tmp_path, 4, 6, FILLERS)
    with pytest.raises(ValueError, match="only 4 preferences"):
        preferences(tmp_path, 5, 6, FILLERS)


def test_how_unlikely_a_forced_answer_is():
    logprobs = [{7: SimpleNamespace(logprob=-1.0)}, {8: SimpleNamespace(logprob=-4.0)}]
    answer = SimpleNamespace(token_ids=[7, 8], logprobs=logprobs, text="said")
    assert turns._said(answer, "said") == {"nats": 2.5, "answer_tokens": 2}
    assert turns._said(answer, "") == {"answer": "said"}
    rows = [{"sample": str(n), "nats": float(n)} for n in range(3)]
    worse = [row | {"nats": row["nats"] + 0.5} for row in rows]
    assert turns.difference(rows, worse[::-1]).endswith(": 0.500 (0.500..0.500)")
    assert turns.rate(worse).startswith("1.500 (")


# -- a run -------------------------------------------------------------------


def test_jobs_are_stock_and_pairs():
    jobs = turns.make_jobs(['{"name": "snapkv", "window": 8}', "knorm"], [0.1, 0.5], 16)
    assert [job.label for job in jobs] == [
        "stock",
        *("snapkv 0.1", "nested snapkv 0.1", "snapkv 0.5", "nested snapkv 0.5"),
        *("knorm 0.1", "nested knorm 0.1", "knorm 0.5", "nested knorm 0.5"),
    ]
    from vllm_kvplugins.config import parse_policy

    for job in jobs[1:]:
        assert parse_policy(job.options).floor == 16


def test_only_missing_answers_are_asked_for(tmp_path, monkeypatch):
    calls: list[tuple[str, str]] = []
    fail_at = [3]
    facts = {name: sample.fact for name, sample in SETTING.samples(2)}

    def fake(setting, job, todo, seeds):
        for name in todo:
            if len(calls) == fail_at[0]:
                raise RuntimeError("interrupted")
            calls.append((job.label, name))
            value = facts[name].value if job.label != "nested knorm 0.5" else "no"
            yield {
                "sample": name,
                "answer": f"It is {value}.",
                "prompt_tokens": 100,
                "resident_tokens": 50,
            }

    monkeypatch.setattr(turns, "ask_engine", fake)
    jobs = turns.make_jobs(["knorm"], [0.5], 16)
    out = tmp_path / "rows.jsonl"
    with pytest.raises(RuntimeError, match="interrupted"):
        turns.measure(SETTING, jobs, 2, 4, out)
    with out.open("a") as file:
        file.write('{"cut off')
    fail_at[0] = -1
    turns.measure(SETTING, jobs, 2, 4, out)
    names = [f"0.{number}" for number in range(FACTS)] + ["1.0"]
    assert calls == [(job.label, name) for job in jobs for name in names]
    turns.measure(SETTING, jobs, 2, 4, out)
    assert len(calls) == 12
    rows = list(turns.read_rows(out).values())
    assert len(rows) == 12
    assert [row["right"] for row in rows] == [True] * 8 + [False] * 4
    assert {row["model"] for row in rows} == {"m"}, (
        "a path of this machine was recorded"
    )
    assert turns.rate(rows) == "8/12 (39%..86%)"
    assert turns.disagreement(rows[4:8], rows[8:]) == (4, 0)
    assert turns.disagreement(rows[8:], rows[4:8]) == (0, 4)


# -- retention ---------------------------------------------------------------


def test_attention_mass_is_what_plain_attention_gives():
    rng = torch.Generator().manual_seed(0)
    heads, group, tokens, count, dim = 2, 3, 11, 4, 8
    queries = torch.randn(heads * group, count, dim, generator=rng)
    keys = torch.randn(heads, tokens, dim, generator=rng)
    expected = torch.zeros(heads, tokens)
    for head in range(heads * group):
        for number in range(count):
            visible = tokens - count + number + 1
            logits = keys[head // group, :visible] @ queries[head, number] * 0.3
            expected[head // group, :visible] += logits.softmax(0)
    result = retention.attention_mass(queries, keys, 0.3)
    torch.testing.assert_close(result, expected)


def test_the_last_question_of_a_prompt_is_what_asks():
    rng = torch.Generator().manual_seed(1)
    queries = [torch.randn(2, 9, 4, generator=rng) for _ in range(2)]
    keys = [torch.randn(1, 9, 4, generator=rng) for _ in range(2)]
    prompt = SimpleNamespace(queries=queries, keys=keys, scales=[0.5, 0.5])
    model = SimpleNamespace(read=lambda tokens: prompt)
    mass = retention.masses(model, {"prompt": [0] * 9, "ends": [2, 6]})
    assert mass.shape == (2, 1, 9)
    whole = [
        (q @ k.transpose(1, 2) * 0.5)
        .masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        .softmax(-1)
        for q, k in zip(queries, keys, strict=True)
    ]
    expected = torch.stack([w[:, 6:].sum((0, 1)) for w in whole])[:, None]
    torch.testing.assert_close(mass, expected)


def test_retention_counts_what_is_kept_of_turn_1():
    """Turn 1 is tokens 2 to 5; sums are computed by hand, one position at a time."""
    layers, heads, tokens = 2, 2, 14
    mass = torch.rand(layers, heads, tokens, generator=torch.Generator().manual_seed(2))
    everything = [[[2, 3, 4, 5]] * heads] * layers
    some = [[[2, 5], [3, 4]], [[4, 5], []]]
    fewer = [[[2], [3, 4]], [[5], []]]
    row = {
        "ends": [2, 6, 9, 12],
        "compactions": [
            {"at": 2, "kept": [[[], []], [[], []]]},  # before turn 1
            {"at": 9, "kept": some},
            {"at": 12, "kept": fewer},
        ],
    }
    whole = mass[..., 2:6].sum()
    expected = [
        sum(
            mass[layer, head, position]
            for layer in range(layers)
            for head in range(heads)
            for position in kept[layer][head]
        )
        / whole
        for kept in (everything, some, fewer)
    ]
    assert retention.retention(row, mass) == pytest.approx([float(e) for e in expected])


def test_a_compaction_inside_turn_1_leaves_what_came_after_it():
    mass = torch.ones(1, 1, 8)
    compactions = [{"at": 4, "kept": [[[3]]]}]
    row = {"ends": [2, 6], "compactions": compactions}
    assert retention.retention(row, mass) == pytest.approx([3 / 4])


def test_what_is_written_can_be_read(tmp_path):
    from vllm_kvplugins.cli.retention import (
        Retention,
        Run,
        read_retention,
        write_retention,
    )

    runs = [Run("flowkv", 0, [0.5, 0.5]), Run("nested", 0, [0.5, 0.25])]
    result = Retention("m", {"base": "knorm"}, 16, runs, {"commit": "c"})
    write_retention(result, tmp_path / "r.json")
    assert read_retention(tmp_path / "r.json") == result
    assert json.loads((tmp_path / "r.json").read_text())["version"] == 1
    table = retention.summary(result)
    assert [list(column.cells) for column in table.columns][3:] == [
        ["0.500", "0.500"],
        ["0.500", "0.250"],
    ]
