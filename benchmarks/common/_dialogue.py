"""Seeded dialogues: facts told in early turns, questions about them in the last turns.

The first turns tell one fact each. The next turns are filler on other topics. The last
turns ask for the facts in random order. Instead of facts, the first turn can give a
rule for answers of one kind, which the last turn requests. The assistant's answers are
fixed, so every policy reads the same history.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from pathlib import Path

SYSTEM = (
    "You are a helpful assistant. You remember what the user told you and answer "
    "questions about it with one word."
)
FACTS, FILLERS = 3, 4

# (statement, question, subjects, values) of each kind of fact
_KINDS = (
    (
        "The code word of project {about} is {value}.",
        "What is the code word of project {about}?",
        ("Falcon", "Harbor", "Meadow", "Granite", "Comet", "Juniper"),
        ("amber", "velvet", "copper", "lantern", "marble", "thunder", "pepper"),
    ),
    (
        "My {about}'s name is {value}.",
        "What is my {about}'s name?",
        ("sister", "brother", "neighbour", "teacher", "cousin", "dentist"),
        ("Oscar", "Ruth", "Victor", "Clara", "Hugo", "Nora", "Felix"),
    ),
    (
        "My favourite {about} is {value}.",
        "What is my favourite {about}?",
        ("fruit", "dessert", "breakfast", "snack", "soup", "drink"),
        ("cherry", "ginger", "almond", "coconut", "pumpkin", "lemon", "honey"),
    ),
)
RULES_SYSTEM = (
    "You are a helpful assistant. You follow the rules that the user gave you earlier "
    "in the conversation."
)
_RULE_WORDS = ("Amber", "Velvet", "Copper", "Lantern", "Marble", "Thunder", "Pepper")
_LISTS = ("fruits", "colors", "animals", "tools", "rivers", "sports", "planets")
_LIST_RULE = "Whenever I ask you for a list, {rule}."
_RULES_NOTED = (
    "Understood, I will do that whenever you ask me for a list.",
    "All right, that is what I will do with every list.",
)
_ALSO = (
    "I wanted you to know that before we start.",
    "Please keep that in mind, I will come back to it later.",
    "It matters to me, so do not forget it.",
    "I thought I should mention it today.",
)
_NOTED = (
    "Thank you for telling me, I will remember it. Is there anything else that you "
    "would like to talk about? I am happy to help with whatever is on your mind.",
    "Understood, I have made a note of that and will keep it in mind. Feel free to go "
    "on with the next thing whenever you are ready to do so.",
    "Good to know, thanks for sharing this with me. Let me know what you would like to "
    "do next, we can look at it together and take our time.",
)
_REPEAT = "What did I tell you at the beginning? Repeat it word by word."
_TOPICS = ("the sea", "old bridges", "mountain weather", "city parks", "trains", "tea")
_REQUESTS = (
    "Tell me something about {topic}.",
    "What can you say about {topic}? A short paragraph will do.",
    "I have been reading about {topic}. What do you think of it?",
)
_SENTENCES = (
    "Many people find that {topic} can be a calm and interesting subject.",
    "There is a long history behind {topic}, and it differs from place to place.",
    "In the past, travellers often wrote about {topic} in their letters.",
    "Experts who study {topic} say that small details matter most.",
    "It helps to look at {topic} slowly and more than once.",
    "Some of the best known stories about {topic} come from the north.",
    "When the weather is good, {topic} can be enjoyed by everybody.",
    "A careful plan makes anything to do with {topic} much easier.",
    "Children in particular ask many good questions about {topic}.",
    "Books about {topic} can be found in almost every library.",
    "Somebody who has never cared for {topic} may still enjoy a short visit.",
    "Painters were drawn to {topic} because of the light in the evening.",
    "It is often said that {topic} teaches patience to those who wait.",
    "Local guides know {topic} well and are glad to share what they know.",
    "What people expect of {topic} has changed a good deal over the years.",
    "If you have only one afternoon, {topic} is still worth the time.",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact and its question, or a rule and a request to which it applies.

    Attributes:
        value: what a right answer has; for a rule the word that it asks for, if any.
        others: the other values of this kind.
        rule: name of the rule in ``RULES``; "" for a fact.
    """

    told: str
    question: str
    value: str
    others: tuple[str, ...]
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One question with its complete history.

    Attributes:
        messages: chat messages; the last one is the question.
        fact: the fact that the question is about.
        told_in, asked_in: turn numbers of the fact and of the question, from 1.
        forced: text to force as the answer, to measure its likelihood; "" lets the
            model answer.
    """

    messages: list[dict[str, str]]
    fact: Fact
    told_in: int
    asked_in: int
    forced: str = ""


def facts(rng: random.Random) -> list[Fact]:
    """One fact of each kind, in random order."""
    drawn = []
    for statement, question, about, values in rng.sample(_KINDS, len(_KINDS)):
        thing, value = rng.choice(about), rng.choice(values)
        others = tuple(other for other in values if other != value)
        statement = statement.format(about=thing, value=value)
        drawn.append(Fact(statement, question.format(about=thing), value, others))
    return drawn


def filler(rng: random.Random, sentences: int) -> tuple[str, str]:
    """A user's request and a long answer that contains no fact."""
    topic = rng.choice(_TOPICS)
    answer = [text.format(topic=topic) for text in rng.sample(_SENTENCES, sentences)]
    return rng.choice(_REQUESTS).format(topic=topic), " ".join(answer)


def dialogue(seed: int, sentences: int = 12, fillers: int = FILLERS) -> list[Sample]:
    """The questions of one dialogue; the same seed gives the same dialogue.

    Args:
        sentences: length of a filler answer; answers to facts have half as many filler
            sentences.
        fillers: number of filler turns between the facts and the questions.
    """
    rng = random.Random(f"dialogue {seed}")
    told_facts = facts(rng)
    turns = []
    for fact in told_facts:
        _, more = filler(rng, sentences // 2)
        noted = f"{rng.choice(_NOTED)} {more}"
        turns.append((f"{fact.told} {rng.choice(_ALSO)}", noted))
    turns += [filler(rng, sentences) for _ in range(fillers)]
    samples = []
    for number in rng.sample(range(FACTS), FACTS):
        fact = told_facts[number]
        question = f"{fact.question} Answer with one word."
        messages = _chat(SYSTEM, turns, question)
        samples.append(Sample(messages, fact, number + 1, len(turns) + 1))
        turns.append((question, f"{fact.value}."))
    return samples


def preferences(path: Path, seeds: int, sentences: int, fillers: int) -> list[Sample]:
    """PrefEval's preferences: told in the first turn, to be repeated in the last.

    PrefEval's own questions need a judge model to decide whether an answer respects the
    preference. Here we measure how likely the model finds the preference's words.

    Args:
        path: a JSON file of PrefEval, or a folder of them.
        seeds: number of preferences to draw.
        sentences, fillers: as in :func:`dialogue`.

    Raises:
        ValueError: the files have fewer than ``seeds`` preferences.
    """
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    items = [
        item["preference"] for file in files for item in json.loads(file.read_text())
    ]
    if len(items) < seeds:
        raise ValueError(f"{path} has only {len(items)} preferences")
    samples = []
    for seed, preference in enumerate(
        random.Random("preferences").sample(items, seeds)
    ):
        rng = random.Random(f"filler {seed}")
        turns = _told_first(rng, preference, _NOTED, sentences, fillers)
        messages = _chat(SYSTEM, turns, _REPEAT)
        fact = Fact(preference, _REPEAT, preference, ())
        samples.append(Sample(messages, fact, 1, len(turns) + 1, forced=preference))
    return samples


def rules(seed: int, sentences: int = 12, fillers: int = FILLERS) -> list[Sample]:
    """A rule for lists in the first turn, and the request for a list in the last one.

    One sample per rule, with fillers of its own. No turn between them has a list, so
    the history does not show the rule. What an answer must have is checked by code.

    Args:
        sentences, fillers: as in :func:`dialogue`.
    """
    samples = []
    for name, (text, _) in RULES.items():
        rng = random.Random(f"rule {name} {seed}")
        word = rng.choice(_RULE_WORDS)
        told = _LIST_RULE.format(rule=text.format(word=word))
        about = rng.choice(_LISTS)
        question = f"List three {about}. Follow the rule that I gave you for lists."
        turns = _told_first(rng, told, _RULES_NOTED, sentences, fillers)
        messages = _chat(RULES_SYSTEM, turns, question)
        fact = Fact(told, question, word, (), name)
        samples.append(Sample(messages, fact, 1, len(turns) + 1))
    return samples


def _told_first(
    rng: random.Random, told: str, noted: Sequence[str], sentences: int, fillers: int
) -> list[tuple[str, str]]:
    """Turns that begin with what the user tells; fillers follow."""
    _, more = filler(rng, sentences // 2)
    first = (told, f"{rng.choice(noted)} {more}")
    return [first, *(filler(rng, sentences) for _ in range(fillers + FACTS))]


def _chat(
    system: str, turns: Sequence[tuple[str, str]], request: str
) -> list[dict[str, str]]:
    """The messages of complete turns, and a last request."""
    messages = [_message("system", system)]
    for user, assistant in turns:
        messages += [_message("user", user), _message("assistant", assistant)]
    return [*messages, _message("user", request)]


def _starts(answer: str, word: str) -> bool:
    return re.findall(r"\w+", answer.lower())[:1] == [word.lower()]


def _ends(answer: str, word: str) -> bool:
    return re.findall(r"\w+", answer.lower())[-1:] == [word.lower()]


def _is_upper(answer: str, word: str) -> bool:
    return answer.isupper()


def _has_semicolons(answer: str, word: str) -> bool:
    return answer.count(";") >= 2 and "\n" not in answer.strip()


# What a rule asks for, and whether an answer follows it, given the rule's word.
RULES: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    "starts": ("start your answer with the word {word}", _starts),
    "ends": ("end your answer with the word {word}", _ends),
    "capitals": ("write your whole answer in capital letters", _is_upper),
    "semicolons": (
        "write it on one line and put semicolons between the items",
        _has_semicolons,
    ),
}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def is_right(answer: str, fact: Fact) -> bool:
    """Whether the answer contains the value, as a word, and no other value of its kind;
    or whether it follows the rule."""
    if fact.rule:
        return RULES[fact.rule][1](answer, fact.value)
    words = set(re.findall(r"\w+", answer.lower()))
    return fact.value.lower() in words and not any(
        other.lower() in words for other in fact.others
    )


# -- counts ----------------------------------------------------------------------


def wilson(right: float, total: int) -> tuple[float, float]:
    """95 % interval of a rate from counts (Wilson's score interval)."""
    if not total:
        return 0.0, 1.0
    z = 1.959964
    rate, square = right / total, z * z / total
    middle = (rate + square / 2) / (1 + square)
    half = z / (1 + square) * sqrt(rate * (1 - rate) / total + square / (4 * total))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def sign_test(first_only: int, second_only: int) -> float:
    """Two-sided p-value of the sign test, over the samples where the two disagree."""
    n, few = first_only + second_only, min(first_only, second_only)
    tail = sum(comb(n, k) for k in range(few + 1)) / 2**n
    return min(1.0, 2 * tail)


def mean_interval(values: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Mean and its 95 % bootstrap interval."""
    rng, count = random.Random("bootstrap"), len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(draws))
    return (
        sum(values) / count,
        means[int(0.025 * draws)],
        means[int(0.975 * draws) - 1],
    )
