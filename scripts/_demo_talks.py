"""Inputs of the demos: a document, a conversation, and a conversation about several
topics.

Each question has a known answer, which the default model (SmolLM2-135M-Instruct) gives
on stock vLLM. The wording matters: a model of this size answers few questions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _demo_client import Message

_DIALOGUE = Path(__file__).parents[1] / "docs" / "examples" / "dialogue.json"
_FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again. "
)
_FILLER_TOKENS = 25  # of SmolLM2's and Qwen's tokenizers, rounded up
_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it "
    "and memorize it. I will quiz you about the important information there.\n\n"
)
_PASS_KEY = "What is the pass key? Answer with the 5-digit number only."


@dataclass(frozen=True)
class Step:
    """One question of a conversation.

    Attributes:
        question: the user's message.
        before: messages since the answer to the last question.
        expected: words that the right answer contains; None: it is not judged.
        reply: what the conversation goes on with; None: the model's answer.
        max_tokens: of the answer.
        to_the_end: generate that many tokens even if the answer ends before, so that
            speed and blocks held can be measured; the rest is not shown.
    """

    question: str
    before: tuple[Message, ...] = ()
    expected: str | None = None
    reply: str | None = None
    max_tokens: int = 24
    to_the_end: bool = False


def document(tokens: int = 1500, seed: int = 0) -> list[Step]:
    """A document of about ``tokens`` tokens with a pass key in it, and a question.

    The classic pass-key test. The key lies in the second quarter.
    """
    rng = random.Random(seed)
    lines = [_FILLER] * max(4, tokens // _FILLER_TOKENS)
    key, line = _pass_key(rng)
    lines.insert(rng.randrange(len(lines) // 4, len(lines) // 2), line)
    text = f"{_TASK}{''.join(lines)}\n\n{_PASS_KEY}"
    return [Step(text, expected=key, max_tokens=32, to_the_end=True)]


def turns(turn_tokens: int = 320, seed: int = 0) -> list[Step]:
    """Three turns with a text each, the first with a pass key; the last asks for it.

    The answers to the texts are scripted: the model would repeat the key at each turn,
    and the last question would be about the newest one.
    """
    key, line = _pass_key(random.Random(seed))
    filler = _FILLER * max(2, turn_tokens // _FILLER_TOKENS // 2)
    texts = (_TASK + filler + line + filler, filler + filler, filler + filler)
    steps = [Step(text, reply="I have read it.", max_tokens=4) for text in texts]
    return [*steps, Step(_PASS_KEY, expected=key, max_tokens=32, to_the_end=True)]


def topics() -> list[Step]:
    """Questions about a balcony, a piano, a risotto and seeds, as the talk grows."""
    dialogue: list[Message] = json.loads(_DIALOGUE.read_text(encoding="utf-8"))
    asked = (
        (16, "What did I plant on the balcony?", "tomato"),
        (24, "Which instrument did I begin to learn?", "piano"),
        (32, "Which cheese goes into the risotto at the end?", "parmesan"),
        (40, "How often do I sow lettuce seeds?", "weeks"),
    )
    ends = [0, *(end for end, _, _ in asked)]
    return [
        Step(question, tuple(dialogue[start:end]), expected, to_the_end=True)
        for start, (end, question, expected) in zip(ends, asked, strict=False)
    ]


TALKS: dict[str, Callable[[], list[Step]]] = {
    "document": document,
    "turns": turns,
    "topics": topics,
}


def _pass_key(rng: random.Random) -> tuple[str, str]:
    key = str(rng.randrange(10_000, 100_000))
    return key, f"The pass key is {key}. Remember it. {key} is the pass key. "
