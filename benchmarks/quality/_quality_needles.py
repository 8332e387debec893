"""Generated retrieval tasks: a pass key, one of many keys, a grid of needles."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from _pass_key import FILLER, plant, sentences
from _quality_samples import Sample, Setting, TaskError, Tokens

# Texts of RULER's niah_multikey tasks. As there, keys are an adjective and a noun, but
# from a shorter list.
MULTIKEY_TASK = (
    "A special magic number is hidden within the following text. Make sure to "
    "memorize it. I will quiz you about the number afterwards.\n"
)
MULTIKEY_NOTE = "One of the special magic numbers for {key} is: {value}. "
MULTIKEY_QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text?"
)
MULTIKEY_OPENING = (
    "The special magic number for {key} mentioned in the provided text is"
)


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words(
    """
    abrupt absorbing ancient bashful bitter boundless brave calm careful cheerful
    clumsy curious dusty eager elegant faint fierce frosty gentle grumpy hollow
    humble idle jolly lively lonely mellow modest nimble odd patient polite proud
    quiet rapid rusty silent sleepy stormy sturdy sunny tender tidy vivid wild
    wise
    """
)
NOUNS = _words(
    """
    acorn anchor apron badger basket beacon bonnet bridge bucket candle canyon
    carpet cellar cherry cobbler compass copper cottage dagger falcon feather
    fiddle garden goblet hammer harbor kettle lantern locket magnet meadow mitten
    needle orchard paddle pebble pepper pigeon pillow rocket saddle tunnel turnip
    violin walnut window
    """
)


def haystack(setting: Setting, tokens: Tokens, count: int) -> list[str]:
    """Sentences with ``count`` tokens in total: filler, or the user's text.

    Raises:
        TaskError: the user's text is too short.
    """
    if not setting.haystack:
        each = tokens.count(FILLER * 20) / 20
        return [FILLER] * max(int(count / each), 1)
    try:
        return sentences(Path(setting.haystack), count, tokens.first)
    except (OSError, ValueError) as error:
        raise TaskError(f"--haystack: {error}") from error


def passkey(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """A pass key at every depth of one context."""
    lines = haystack(setting, tokens, setting.tokens)
    for depth in range(setting.depths):
        yield _planted(
            "passkey", lines, depth, setting.depths, setting.tokens, setting.seed
        )


def needle(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """A pass key at every depth of contexts of every length."""
    for length in setting.lengths:
        lines = haystack(setting, tokens, length)
        for depth in range(setting.depths):
            yield _planted("needle", lines, depth, setting.depths, length, setting.seed)


def _planted(
    task: str, lines: list[str], depth: int, depths: int, length: int, seed: int
) -> Sample:
    prompt, key = plant(lines, depth, depths, seed)
    share = round((2 * depth + 1) / (2 * depths), 4)
    return Sample(
        task=task,
        name=f"{length} tokens, depth {share}",
        metric="number",
        truths=(key,),
        messages=({"role": "user", "content": prompt},),
        max_tokens=16,
        place={"depth": share, "tokens": length},
    )


def multikey(setting: Setting, tokens: Tokens) -> Iterator[Sample]:
    """Many key-number pairs in one context, with questions about some of them.

    Every context has its own keys, numbers and depths. The questions about a context
    are not independent samples, so they form a group.
    """
    if not 1 <= setting.questions <= setting.keys:
        raise TaskError(
            f"--questions {setting.questions} must be 1 to --keys {setting.keys}"
        )
    rng = random.Random(f"multikey {setting.seed}")
    if setting.keys > len(ADJECTIVES) * len(NOUNS):
        raise TaskError(f"--keys {setting.keys} is more than there are names for")
    notes = MULTIKEY_NOTE.format(key="careful-anchor", value="1234567")
    room = setting.tokens - tokens.count(notes) * setting.keys
    if room < 1:
        raise TaskError(
            f"{setting.keys} keys do not fit {setting.tokens} tokens; raise --tokens"
        )
    lines = haystack(setting, tokens, room)
    count = 0
    while count < setting.limit:
        group = f"context {count // setting.questions}"
        text, found = _strewn(lines, setting.keys, rng)
        for key, value, share in rng.sample(found, setting.questions):
            if count == setting.limit:
                return
            question = MULTIKEY_QUESTION.format(key=key)
            yield Sample(
                task="multikey",
                name=f"{group}, {key}",
                metric="contains",
                truths=(value,),
                messages=(
                    {"role": "user", "content": MULTIKEY_TASK + text + question},
                ),
                opening=MULTIKEY_OPENING.format(key=key),
                max_tokens=16,
                group=group,
                place={"depth": share, "tokens": setting.tokens, "keys": setting.keys},
            )
            count += 1


def _strewn(
    lines: list[str], keys: int, rng: random.Random
) -> tuple[str, list[tuple[str, str, float]]]:
    """A context with key-number pairs at random depths, and (key, number, depth) of
    each.
    """
    names = draw_names(keys, rng)
    places = draw_places(lines, keys, rng)
    values = [draw_number(rng) for _ in names]
    notes = [
        MULTIKEY_NOTE.format(key=name, value=value)
        for name, value in zip(names, values, strict=True)
    ]
    shares = [round(place / len(lines), 4) for place in places]
    found = list(zip(names, values, shares, strict=True))
    return insert_notes(lines, places, notes), found


def draw_names(count: int, rng: random.Random) -> list[str]:
    """Different keys of an adjective and a noun."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"] = None
    return list(names)


def draw_places(lines: list[str], count: int, rng: random.Random) -> list[int]:
    """Places between the sentences of a text, in their order."""
    return sorted(rng.randrange(len(lines) + 1) for _ in range(count))


def draw_number(rng: random.Random) -> str:
    """A number of seven digits."""
    return str(rng.randrange(1_000_000, 10_000_000))


def insert_notes(lines: list[str], places: list[int], notes: list[str]) -> str:
    """The text with each note before the sentence of its place."""
    parts: list[str] = []
    before = 0
    for note, place in zip(notes, places, strict=True):
        parts += lines[before:place]
        if parts and not parts[-1].endswith(" "):
            parts.append(" ")
        parts.append(note)
        before = place
    return "".join([*parts, *lines[before:]])
