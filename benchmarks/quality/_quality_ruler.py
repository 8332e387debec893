"""Tasks of RULER (arXiv:2404.06654) that are generated, in our own words.

Several values of one key, several keys in one question, a chain of variables, and the
most common words of a list. Every sample has a context of its own, and scores the share
of the right answers that it names (``string_match_all``).

Differences from RULER: prompts have no worked example, and the words of a list no
numbers.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

from _quality_needles import (
    ADJECTIVES,
    MULTIKEY_NOTE,
    NOUNS,
    draw_names,
    draw_number,
    draw_places,
    haystack,
    insert_notes,
)
from _quality_samples import Sample, Setting, TaskError, Tokens

VALUES = 4  # of a key, and keys of a question
HOPS = 4  # variables that copy another one
COMMON_WORDS = 10
COMMON_TIMES = 10  # a common word is this many times as frequent as any other
ANSWER_TOKENS = 64

NUMBERS_TASK = (
    "The following text contains special magic numbers. Remember them. I will ask for "
    "them afterwards.\n"
)
NUMBERS_QUESTION = "\nList all special magic numbers of the text for {keys}."
NUMBERS_OPENING = "The special magic numbers for {keys} are"
VARIABLES_TASK = (
    "The following text contains assignments to variables. Remember them. I will ask "
    "for their values afterwards.\n"
)
FIRST_VARIABLE = "VAR {name} = {value}. "
COPIED_VARIABLE = "VAR {name} = VAR {other}. "
VARIABLES_QUESTION = (
    "\nWhich variables of the text have the value {value}, directly or through other "
    "variables?"
)
VARIABLES_OPENING = "{count} variables have the value {value}:"
WORDS_TASK = (
    "Some words of the following list occur more often than others. Remember those. I "
    "will ask for them afterwards.\n"
)
WORDS_QUESTION = "\nWhich {count} words occur most often in the list?"
WORDS_OPENING = "The {count} words that occur most often in the list are"


def multivalue(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """One key with several numbers, all of which are requested."""
    yield from _numbers("multivalue", 1, setting, tokens)


def multiquery(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Several keys with a number each, all of which are requested at once."""
    yield from _numbers("multiquery", VALUES, setting, tokens)


def _numbers(
    task: str, keys: int, setting: Setting, tokens: Tokens
) -> Iterator[Sample]:
    """Contexts with four numbers; the question asks for all of them."""
    rng = random.Random(f"{task} {setting.seed}")
    note = MULTIKEY_NOTE.format(key="careful-anchor", value="1234567")
    lines = _text(setting, tokens, [note] * VALUES)
    for number in range(setting.limit):
        names = draw_names(keys, rng)
        values = [draw_number(rng) for _ in range(VALUES)]
        notes = [
            MULTIKEY_NOTE.format(key=names[at % keys], value=value)
            for at, value in enumerate(values)
        ]
        places = draw_places(lines, VALUES, rng)
        listed = _listed(names)
        yield _sample(
            task,
            number,
            setting,
            truths=values,
            content=NUMBERS_TASK
            + insert_notes(lines, places, notes)
            + NUMBERS_QUESTION.format(keys=listed),
            opening=NUMBERS_OPENING.format(keys=listed),
        )


def variables(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """A value that goes from variable to variable; all of its variables count."""
    rng = random.Random(f"variables {setting.seed}")
    note = COPIED_VARIABLE.format(name="ABCDE", other="FGHIJ")
    lines = _text(setting, tokens, [note] * (HOPS + 1))
    for number in range(setting.limit):
        names = ["".join(rng.choices(string.ascii_uppercase, k=5))]
        value = str(rng.randrange(10_000, 100_000))
        notes = [FIRST_VARIABLE.format(name=names[0], value=value)]
        for _ in range(HOPS):
            name = "".join(rng.choices(string.ascii_uppercase, k=5))
            notes.append(COPIED_VARIABLE.format(name=name, other=names[-1]))
            names.append(name)
        places = draw_places(lines, len(notes), rng)
        yield _sample(
            "variables",
            number,
            setting,
            truths=names,
            content=VARIABLES_TASK
            + insert_notes(lines, places, notes)
            + VARIABLES_QUESTION.format(value=value),
            opening=VARIABLES_OPENING.format(count=len(names), value=value),
        )


def common_words(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """A shuffled list of words, ten of which are ten times as frequent as the rest."""
    rng = random.Random(f"common_words {setting.seed}")
    vocabulary = sorted({*ADJECTIVES, *NOUNS})
    once = _repeated(vocabulary[:COMMON_WORDS], vocabulary[COMMON_WORDS:], 1)
    rounds = setting.tokens // tokens.count(", ".join(once))
    if not rounds:
        raise TaskError("the shortest list does not fit; raise --tokens")
    for number in range(setting.limit):
        words = rng.sample(vocabulary, len(vocabulary))
        common, others = words[:COMMON_WORDS], words[COMMON_WORDS:]
        listed = _repeated(common, others, rounds)
        rng.shuffle(listed)
        yield _sample(
            "common_words",
            number,
            setting,
            truths=common,
            content=WORDS_TASK
            + ", ".join(listed)
            + WORDS_QUESTION.format(count=COMMON_WORDS),
            opening=WORDS_OPENING.format(count=COMMON_WORDS),
        )


def _repeated(common: list[str], others: list[str], rounds: int) -> list[str]:
    return common * (COMMON_TIMES * rounds) + others * rounds


def _text(setting: Setting, tokens: Tokens, notes: list[str]) -> list[str]:
    """Sentences that leave room for the notes."""
    room = setting.tokens - sum(map(tokens.count, notes))
    if room < 1:
        raise TaskError(f"the notes do not fit {setting.tokens} tokens; raise --tokens")
    return haystack(setting, tokens, room)


def _listed(names: list[str]) -> str:
    """Names as a sentence lists them."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _sample(
    task: str,
    number: int,
    setting: Setting,
    truths: list[str],
    content: str,
    opening: str,
) -> Sample:
    return Sample(
        task=task,
        name=f"context {number}",
        metric="contains",
        truths=tuple(truths),
        messages=({"role": "user", "content": content},),
        opening=opening,
        max_tokens=ANSWER_TOKENS,
        place={"tokens": setting.tokens},
    )
