"""Metrics of the quality tasks, with values known from their definitions."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
import _quality_metrics as metrics
from _quality_metrics import METRICS, score
from _quality_samples import Sample


def scored(metric: str, answer: str, *truths: str, **more: object) -> float:
    return score(answer, Sample("t", "n", metric, truths, **more))


def test_ruler_counts_truths_in_any_case():
    assert scored("contains", "It is ABC and 12", "abc", "13", "12") == pytest.approx(
        2 / 3
    )
    assert scored("contains_any", "It is ABC", "abc", "13") == 1
    assert scored("contains_any", "It is", "abc", "13") == 0


def test_a_pass_key_is_a_whole_number():
    assert scored("number", "The key is 12345.", "12345") == 1
    assert scored("number", "123456", "12345") == 0


def test_f1_of_words():
    assert scored("word_f1", "The cat, sat!", "a cat sat down") == pytest.approx(0.8)
    # best of several truths; repeated words count as often as both contain them
    assert scored("word_f1", "b b b", "x", "b b") == pytest.approx(0.8)
    assert scored("word_f1", "", "x") == 0
    # LoCoMo drops "and" as well
    assert scored("locomo_f1", "tea and milk", "tea milk") == 1
    assert scored("word_f1", "tea and milk", "tea milk") == pytest.approx(0.8)


# Values of the package rouge 1.0.1, apart from its 1e-8 in the denominator.
@pytest.mark.parametrize(
    ("answer", "truth", "known"),
    [
        (
            "the cat sat on the mat. the dog ran",
            "the cat lay on the mat. a dog ran off",
            0.75,
        ),
        ("one two three", "three two one", 1 / 3),
        ("a b.c d", "a b c d", 1.0),
        ("", "a", 0.0),
        ("...", "a", 0.0),
    ],
)
def test_rouge_l_is_that_of_the_package(answer, truth, known):
    assert scored("rouge_l", answer, truth) == pytest.approx(known, abs=1e-6)


def test_longest_common_subsequences():
    assert "".join(metrics.common_words("abcbdab", "bdcaba")) in (
        "bcba",
        "bdab",
        "bcab",
    )
    assert metrics.common_words("", "abc") == []


def test_classes_are_shared_out():
    classes = ("Date", "Other number", "Number")
    assert scored("classes", "Type: Date", "Date", classes=classes) == 1
    assert scored("classes", "Date or Number", "Date", classes=classes) == 0.5
    assert scored("classes", "Number", "Date", classes=classes) == 0
    # a substring of the right answer
    names = ("Number", "Other Number")
    assert scored("classes", "Other Number", "Other Number", classes=names) == 1


def test_only_the_first_line_counts_where_longbench_says_so():
    classes = ("Date", "Place")
    two_lines = "\nDate\nPlace"
    assert scored("classes", two_lines, "Date", classes=classes) == 0.5
    assert scored("classes", two_lines, "Date", classes=classes, first_line=True) == 1


def test_numbers_of_paragraphs_and_counts():
    assert scored("counted", "5 or 7, I say 5", "5") == pytest.approx(2 / 3)
    assert scored("counted", "none", "5") == 0
    assert scored("paragraph", "Paragraph 15", "Paragraph 15") == 1
    assert scored("paragraph", "Paragraph 1", "Paragraph 15") == 0
    assert scored("paragraph", "段落3", "段落3") == 1


def test_a_line_of_code():
    assert scored("code", "return x + 1", "return x - 1") == 0.92  # fuzzywuzzy: 92
    assert scored("code", "\n# so\n```\nx = 1\ny", "x = 1") == 1
    assert scored("code", "", "x = 1") == 0


def test_the_final_number_of_gsm8k():
    truth = "It is 3 * 600 = <<3*600=1800>>1800.\n#### 1,800"
    assert scored("same_number", "so 1800 it is.\n#### 1800\nand 7", truth) == 1
    assert scored("same_number", "that makes $1,800.00", truth) == 1
    assert scored("same_number", "1800 or 7", truth) == 0
    assert scored("same_number", "no idea", truth) == 0
    assert metrics.final_number("-3.50 left") == "-3.5"
    assert metrics.final_number("#### $20") == "20"
    assert metrics.final_number("100") == "100"


def test_answers_of_several_questions_are_told_by_their_names():
    answer = "Answer_3:\n1+1. The answer is 2.\n\nAnswer_4:\nThe answer is 1,000."
    place = {"first": 3}
    case = ("numbers_in_order", answer)
    assert scored(*case, "#### 2", "#### 1000", place=place) == 1
    assert scored(*case, "#### 1000", "#### 2", place=place) == 0
    assert scored(*case, "#### 2", "#### 1000", "#### 5", place=place) == pytest.approx(
        2 / 3
    )


def test_parts_that_are_there():
    answer = (
        " a\n#*# Week 2 (x): b\n#*# Week 3: c\n#*# Week 3: c\n#*# Week 99: d\nWeek 4"
    )
    assert scored("parts", answer, "10", place={"type": "Week"}) == pytest.approx(0.3)
    assert scored("parts", "", "10", place={"type": "Week"}) == pytest.approx(0.1)


def test_the_first_letter_that_stands_alone():
    assert scored("letter", " B. The salad, not A.", "B") == 1
    assert scored("letter", "BA, A", "B") == 0
    assert scored("letter", "none", "B") == 0


def test_every_metric_has_a_test():
    source = Path(__file__).read_text()
    assert [name for name in METRICS if f'"{name}"' not in source] == []
