"""Deterministic English-like text, so that no test needs a data file."""

from __future__ import annotations

import random

_PEOPLE = [
    "The engineer",
    "A gardener",
    "The old captain",
    "My neighbour",
    "The librarian",
    "A young doctor",
    "The baker",
    "An astronomer",
    "The ferryman",
    "Her teacher",
    "The clockmaker",
    "A farmer",
]
_DEEDS = [
    "explained",
    "carried",
    "repaired",
    "remembered",
    "measured",
    "sold",
    "painted",
    "described",
    "buried",
    "counted",
    "borrowed",
    "followed",
    "ignored",
    "collected",
    "translated",
    "opened",
]
_THINGS = [
    "a broken compass",
    "the northern bridge",
    "three letters",
    "the harvest",
    "a map of the coast",
    "an unfinished melody",
    "the winter road",
    "seven copper coins",
    "the city's water",
    "a theory of tides",
    "the last telegram",
    "a garden of pears",
    "the wooden clock",
    "an oath",
]
_PLACES = [
    "near the harbour",
    "in the small village",
    "behind the observatory",
    "before the storm",
    "during the long war",
    "at the edge of the desert",
    "after the festival",
    "under the stairs",
    "on the third day",
    "beside the railway",
    "in the year of the flood",
]
_LINKS = [
    "because nobody else would",
    "although it was forbidden",
    "and told no one",
    "while the others slept",
    "so that the children could eat",
    "until the money was gone",
    "but the answer never came",
    "as the law required",
    "which surprised everyone",
]


def english(seed: int, sentences: int) -> str:
    """Sentences from a small grammar; the same seed gives the same text."""
    rng = random.Random(seed)
    text = []
    for number in range(sentences):
        words = [rng.choice(part) for part in (_PEOPLE, _DEEDS, _THINGS, _PLACES)]
        sentence = " ".join(words)
        if rng.random() < 0.5:
            sentence += ", " + rng.choice(_LINKS)
        if rng.random() < 0.2:
            sentence += f", on page {rng.randrange(1, 900)} of the ledger"
        text.append(sentence + ("." if rng.random() < 0.9 else "?"))
        if number % 6 == 5:
            text.append("\n\n")
    return " ".join(text)


def english_tokens(tokenizer: object, seed: int, count: int) -> list[int]:
    """Exactly ``count`` token ids of English-like text."""
    # A sentence of the grammar has more than eight tokens in every vocabulary.
    ids = tokenizer.encode(english(seed, count // 8 + 4))  # type: ignore[attr-defined]
    assert len(ids) >= count
    return list(ids[:count])


def random_tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    """``count`` ids for a model without a tokenizer; 0 to 9 are left out."""
    rng = random.Random(seed)
    return [rng.randrange(10, vocabulary) for _ in range(count)]


def two_topics() -> list[dict[str, str]]:
    """Twelve messages about fruit, then twelve about trains."""
    topics = (
        "apples, pears and plums ripen in the orchard behind the old farm",
        "trains leave the station on rails for the mountains every morning",
    )
    return [
        {
            "role": ("user", "assistant")[number % 2],
            "content": f"{topics[number // 12]}, as I said {number} times before",
        }
        for number in range(24)
    ]
