"""Patched prompts by similarity, and the share of evidence that a cache holds."""

from __future__ import annotations

import json

import locomo
import numpy as np
import patched_prompts as benchmark
import pytest
import typer


def test_tenths_are_taken_by_similarity_and_keep_the_dialogue_s_order():
    # the most similar of 20 is number 19, the next one 0, then 18, 1, …
    ranks = [19, 0, 18, 1, 17, 2, 16, 3, 15, 4, 14, 5, 13, 6, 12, 7, 11, 8, 10, 9]
    similarity = np.empty(20, np.float32)
    similarity[ranks] = np.linspace(1, 0, 20)
    shares = {k: benchmark.tenth(similarity, at) for k, at in benchmark.BANDS.items()}
    assert shares == {
        benchmark.CLOSEST: [0, 19],
        benchmark.MIDDLE: [4, 14],
        benchmark.LEAST: [9, 10],
    }
    assert benchmark.tenth(np.array([0.1, 0.3], np.float32), 0.9) == [0]


def test_patched_prompts_are_lines_and_the_random_ones_come_from_a_seed():
    lines = [f"Ann: {n}" for n in range(30)]
    similarity = np.linspace(0, 1, 30, dtype=np.float32)
    texts = benchmark.patched_texts(lines, "Which one?", similarity, 3)
    assert texts[benchmark.EXACT] == "Which one?"
    assert texts[benchmark.CLOSEST] == "Ann: 27\nAnn: 28\nAnn: 29"
    assert texts[benchmark.INSTRUCTION] == ""
    random_text = texts[benchmark.RANDOM]
    assert len(random_text.split("\n")) == 3
    again = benchmark.patched_texts(lines, "Which one?", similarity, 3)
    assert again[benchmark.RANDOM] == random_text
    other = benchmark.patched_texts(lines, "Which one?", similarity, 4)
    assert other[benchmark.RANDOM] != random_text


def test_of_the_evidence_counts_what_is_kept_and_what_was_never_compressed():
    text = "aa bb cc dd ee ff"
    offsets = [(3 * n, 3 * n + 2) for n in range(6)]
    question = locomo.Question("?", "!", 1, ("bb cc", "ee ff"))
    # tokens 1, 2, 4 and 5 are evidence; compacted at 4
    kept = [[[0, 1, 3], [0, 3]], [[1, 2, 3], [2, 3]]]
    evidence = benchmark.evidence_at(offsets, text, question)
    assert evidence == [1, 2, 4, 5]
    share = benchmark.evidence_kept(kept, evidence)
    assert share == pytest.approx((3 + 2 + 4 + 3) / 4 / 4)


def test_lines_of_the_evidence_may_stand_in_the_patched_prompt():
    question = locomo.Question("?", "!", 1, ("Ann: Hi.", "Bob: 7"))
    assert benchmark.evidence_in("Bob: 7\nAnn: Hi.", question) == 1
    assert benchmark.evidence_in("Ann: Hi.\nBob: 8", question) == 0.5
    assert benchmark.evidence_in("", question) == 0


def test_chance_keeps_less_of_what_was_compressed_more_often():
    # 8 tokens, then 4 more; two heads that keep 4 and 2 tokens, later 6 and 1
    first = [[[0, 1, 2, 7], [6, 7]]]
    second = [[[0, 1, 8, 9, 10, 11], [11]]]
    once = [4 / 8, 2 / 8]
    twice = [4 / 8 * 6 / 8, 2 / 8 * 1 / 6]
    later = [6 / 8, 1 / 6]
    assert benchmark.kept_by_chance([first], [3]) == pytest.approx(sum(once) / 2)
    both = [first, second]
    assert benchmark.kept_by_chance(both, [3]) == pytest.approx(sum(twice) / 2)
    assert benchmark.kept_by_chance(both, [8]) == pytest.approx(sum(later) / 2)
    assert benchmark.kept_by_chance(both, [12]) == 1  # never compressed
    mixed = (sum(twice) + sum(later) + 2) / 6
    assert benchmark.kept_by_chance(both, [3, 8, 12]) == pytest.approx(mixed)


def test_chance_is_what_random_compactions_keep_on_average():
    seed = 3
    random, trials, kept_shares = np.random.default_rng(seed), 400, []
    evidence, sizes = [5, 40, 70], [(50, 20), (60, 25), (55, 30)]
    for _ in range(trials):
        positions, compactions = [[], []], []
        for number, stay in enumerate(sizes):
            start, cut = (0, 64) if not number else (32 + 32 * number, 64 + 32 * number)
            positions = [[*head, *range(start, cut)] for head in positions]
            positions = [
                sorted(random.permutation(head[:-1])[: n - 1].tolist()) + head[-1:]
                for head, n in zip(positions, stay, strict=True)
            ]
            compactions.append([positions])
        kept_shares.append(benchmark.evidence_kept(compactions[-1], evidence))
    expected = benchmark.kept_by_chance(compactions, evidence)
    assert np.mean(kept_shares) == pytest.approx(expected, abs=0.04), f"seed {seed}"


def test_a_dialogue_that_is_too_short_is_followed_by_the_next(tmp_path):
    def dialogue(name, *texts):
        turns = [
            {"speaker": name, "dia_id": f"D1:{n}", "text": text}
            for n, text in enumerate(texts)
        ]
        question = {"question": "?", "answer": 7, "category": 1, "evidence": ["D1:0"]}
        return {
            "conversation": {"session_1": turns, "session_1_date_time": "May"},
            "qa": [
                question,
                question | {"category": 5},
                question | {"evidence": ["D9:1"]},
            ],
        }

    path = tmp_path / "l.json"
    path.write_text(json.dumps([dialogue("Z", "0"), dialogue("A", "1", "2")] * 2))
    setting = locomo.Setting("m", str(path), 1, 12, 9, "float32")
    # a line counts its words plus one; "A: 1 (May)" has 3 words
    history, questions = locomo.excerpt(setting, lambda text: len(text.split()))
    assert history[0]["content"] == "A: 1 (May)\nA: 2\nZ: 0 (May)"
    assert questions == [locomo.Question("?", "7", 1, ("A: 1 (May)",))]


def test_a_configuration_goes_before_the_other_options():
    policy = benchmark.policy_of(1024, 512, 4, "{}")
    assert (policy["budget"], policy["prefill_block"], policy["episodes"]) == (
        1024,
        512,
        4,
    )
    allocator = {"name": "sensitivity", "alpha": 2}
    more = {"segment_utterances": 2, "prefill_block": 256, "allocator": allocator}
    changed = benchmark.policy_of(1024, 512, 4, json.dumps(more))
    assert changed == policy | more
    for bad, why in (("{", "no JSON"), ("[1]", "give an object")):
        with pytest.raises(typer.BadParameter, match=why) as raised:
            benchmark.policy_of(1024, 512, 4, bad)
        assert bad in str(raised.value)


def row_of(config, question, nats, kept, kind=benchmark.EPISODE):
    return {
        "config": config,
        "question": question,
        "kind": kind,
        "patched_tokens": 10 * (question + 1),
        "nats": nats,
        "evidence_in": kept / 4,
        "evidence_kept": kept,
        "kept_by_chance": kept / 2,
    }


def cells_of(table):
    columns = [list(column.cells) for column in table.columns]
    return [dict(zip(HEADS, line, strict=False)) for line in zip(*columns, strict=True)]


ALONE = ("kind", "questions", "tokens", "nats", "full", "exact", "in", "kept", "chance")
HEADS = (*ALONE, "nats_first", "kept_first")


def test_configurations_are_compared_with_the_first_question_by_question():
    full = {0: 1.0, 1: 3.0}
    rows = [row_of("{}", 0, 2.0, 0.5), row_of("{}", 1, 4.0, 0.25)]
    rows += [row_of("E8", 1, 3.5, 0.5), row_of("E8", 0, 1.5, 0.75)]
    first, other = cells_of(benchmark.table_of(rows, full))
    assert first["kind"] == "episode {}"
    assert other["kind"] == "episode E8"
    assert first["kept"] == "0.375 (0.250..0.500)"
    assert (first["in"], first["chance"]) == ("0.094", "0.188")
    assert first["full"] == "1.000 (1.000..1.000)"
    assert other["full"] == "0.500 (0.500..0.500)"
    assert (first["nats_first"], first["kept_first"]) == ("", "")
    assert other["nats_first"] == "-0.500 (-0.500..-0.500)"
    assert other["kept_first"] == "0.250 (0.250..0.250)"


def test_one_configuration_is_compared_with_the_exact_question_alone():
    rows = [row_of("{}", 0, 2.0, 0.5), row_of("{}", 0, 1.25, 0.5, benchmark.EXACT)]
    episode, exact = cells_of(benchmark.table_of(rows, {0: 1.0}))
    assert episode["kind"] == "episode"
    assert episode["exact"] == "0.750 (0.750..0.750)"
    assert exact["exact"] == ""
    assert "nats_first" not in episode
    # the exact answer of another configuration does not count
    rows.append(row_of("E8", 0, 1.5, 0.5))
    *_, other = cells_of(benchmark.table_of(rows, {0: 1.0}))
    assert (other["kind"], other["exact"]) == ("episode E8", "")
