"""Scores of answers from 0 to 1, as the benchmarks define them; own implementation."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from locomo import f1 as locomo_f1
from needle import says

if TYPE_CHECKING:
    from _quality_samples import Sample

Metric = Callable[[str, "Sample"], float]
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def contains(answer: str, sample: Sample) -> float:
    """RULER's ``string_match_all``: share of truths that the answer contains."""
    lowered = answer.lower()
    matches = [truth.lower() in lowered for truth in sample.truths]
    return sum(matches) / len(matches)


def contains_any(answer: str, sample: Sample) -> float:
    """RULER's ``string_match_part``: whether the answer contains any truth."""
    return float(any(truth.lower() in answer.lower() for truth in sample.truths))


def number(answer: str, sample: Sample) -> float:
    """Whether the answer contains a number that is not part of a longer one."""
    return float(any(says(answer, truth) for truth in sample.truths))


# -- words ------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as in SQuAD."""
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def word_f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words."""
    answered, expected = Counter(words(answer)), Counter(words(truth))
    common = (answered & expected).total()
    if not common:
        return 0.0
    precision, recall = common / answered.total(), common / expected.total()
    return 2 * precision * recall / (precision + recall)


def best(score: Callable[[str, str], float]) -> Metric:
    """The best score over a sample's truths."""

    def over_truths(answer: str, sample: Sample) -> float:
        return max((score(answer, truth) for truth in sample.truths), default=0.0)

    return over_truths


# -- ROUGE-L ------------------------------------------------------------------------


def common_words(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Length of a longest common subsequence. Cost: O(product of the lengths)."""
    rows, columns = len(first), len(second)
    table = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i, one in enumerate(first, 1):
        for j, other in enumerate(second, 1):
            longer = max(table[i - 1][j], table[i][j - 1])
            table[i][j] = table[i - 1][j - 1] + 1 if one == other else longer
    matches, i, j = [], rows, columns
    while i and j:
        if first[i - 1] == second[j - 1]:
            matches.append(first[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return matches[::-1]


def rouge_l(answer: str, truth: str) -> float:
    """ROUGE-L of summaries, as in the package ``rouge`` 1.0.1 that LongBench uses.

    Sentences end at every full stop. Each word counts once, in the texts and in the
    union of common subsequences.
    """
    answered, expected = _sentences(answer), _sentences(truth)
    said_words = {word for sentence in answered for word in sentence}
    true_words = {word for sentence in expected for word in sentence}
    union: set[str] = set()
    for true_sentence in expected:
        for sentence in answered:
            union.update(common_words(true_sentence, sentence))
    if not union:
        return 0.0
    return 2 * len(union) / (len(said_words) + len(true_words))


def _sentences(text: str) -> list[list[str]]:
    """Words between full stops; a blank stretch counts as one empty word."""
    return [part.split() or [""] for part in text.split(".") if part]


# -- others of LongBench -------------------------------------------------------------


def one_of_classes(answer: str, sample: Sample) -> float:
    """1 / number of classes in the answer, if the right one is among them.

    A class whose name is part of the right class's name does not count.
    """
    (truth, *_) = sample.truths
    named = [name for name in sample.classes if name in answer]
    named = [name for name in named if name == truth or name not in truth]
    return 1 / len(named) if truth in named else 0.0


def _share_equal(answer: str, number: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def counted(answer: str, truth: str) -> float:
    """Share of the numbers in the answer that are the right one."""
    return _share_equal(answer, truth)


def paragraph(answer: str, truth: str) -> float:
    """The same for the number in "Paragraph 7"."""
    (number,) = re.findall(r"(?:Paragraph |段落)(\d+)", truth)[:1]
    return _share_equal(answer, number)


def similar_line(answer: str, truth: str) -> float:
    """Similarity of the answer's first line of code and the true line.

    Twice the longest common subsequence of characters over both lengths, rounded to
    percent.
    """
    lines = answer.lstrip("\n").split("\n")
    skipped = ("`", "#", "//")
    line = next((one for one in lines if not any(s in one for s in skipped)), "")
    both = len(line) + len(truth)
    return round(200 * len(common_words(line, truth)) / both) / 100 if both else 0.0


# -- numbers, parts and letters ------------------------------------------------------


def final_number(text: str) -> str:
    """The number after "####", or else the last number; without commas. "" = none."""
    marked = re.search(rf"####\s*\$?({_NUMBER})", text)
    matches = [marked[1]] if marked else re.findall(_NUMBER, text)
    if not matches:
        return ""
    plain = matches[-1].replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def same_number(answer: str, sample: Sample) -> float:
    """Whether the answer's final number is the true one."""
    (truth, *_) = sample.truths
    return float(bool(number := final_number(answer)) and number == final_number(truth))


def numbers_in_order(answer: str, sample: Sample) -> float:
    """Share of numbered answers that end in the right number.

    ``place`` has the number of the first question.
    """
    named = dict(re.findall(r"Answer_(\d+):?(.*?)(?=Answer_\d+|\Z)", answer, re.DOTALL))
    right = 0
    for index, truth in enumerate(sample.truths, sample.place["first"]):
        numbers = re.findall(_NUMBER, named.get(str(index), "").split("Question_")[0])
        right += bool(numbers) and final_number(numbers[-1]) == final_number(truth)
    return right / len(sample.truths)


def parts(answer: str, sample: Sample) -> float:
    """Share of the expected numbered parts whose headings exist.

    The prompt ends with the first heading.
    """
    (count,) = map(int, sample.truths)
    pattern = rf"#\*#\s*{re.escape(sample.place['type'])}\s+(\d+)"
    matches = {1, *map(int, re.findall(pattern, answer))}
    return len(matches & set(range(1, count + 1))) / count


def letter(answer: str, sample: Sample) -> float:
    """Whether the first stand-alone letter is the right one."""
    matches = re.search(r"\b([A-Z])\b", answer)
    return float(matches is not None and matches[1] in sample.truths)


METRICS: dict[str, Metric] = {
    "contains": contains,
    "contains_any": contains_any,
    "number": number,
    "word_f1": best(word_f1),
    "locomo_f1": best(locomo_f1),
    "rouge_l": best(rouge_l),
    "classes": one_of_classes,
    "counted": best(counted),
    "paragraph": best(paragraph),
    "code": best(similar_line),
    "same_number": same_number,
    "numbers_in_order": numbers_in_order,
    "parts": parts,
    "letter": letter,
}


def score(answer: str, sample: Sample) -> float:
    """Score an answer with the sample's metric."""
    if sample.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return METRICS[sample.metric](answer, sample)
