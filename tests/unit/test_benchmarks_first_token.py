"""Splitting dialogues into turns, for the time to the first token."""

from __future__ import annotations

import pytest
import typer
from first_token import turns_of


def dialogue(*sessions: tuple[int, list[str]]) -> dict:
    """LoCoMo's format: numbered sessions next to other entries."""
    spoken: dict = {"speaker_a": "Ann", "session_2_date_time": "8 May"}
    for number, texts in sessions:
        spoken[f"session_{number}"] = [
            {"speaker": "AnnBob"[3 * (i % 2) :][:3], "text": text}
            for i, text in enumerate(texts)
        ]
    return {"conversation": spoken}


def test_messages_are_joined_until_a_turn_has_its_words():
    # sessions in the order of their numbers, not of their names
    sample = dialogue((10, ["k l m n"]), (2, ["a b c", "d", "e f g h"]), (9, ["i j"]))
    assert turns_of(sample, 3, words=4) == [
        "Ann: a b c\n",
        "Bob: d\nAnn: e f g h\n",
        "Ann: i j\nAnn: k l m n\n",
    ]
    assert turns_of(sample, 2, words=4) == turns_of(sample, 3, words=4)[:2]


def test_a_dialogue_with_too_few_turns_is_refused():
    sample = dialogue((1, ["a b c d", "e f"]))
    with pytest.raises(typer.BadParameter, match="has 1 turns, not 2"):
        turns_of(sample, 2, words=4)
