"""Divides the messages of a chat into turns, by their roles.

::

    system | user  assistant  tool  tool  assistant | user  user  assistant | user  tool
           └─ turn: a question, tool loop, answer ──┘└─ turn ───────────────┘└─ live

Knows neither templates nor tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# Roles of messages that ask; all others (assistant, tool, function, ...) answer.
_ASKING = ("user", "system", "developer")
# Templates may treat the last question in their own way; the first added one is not it.
ADDED_QUESTIONS = 3


class TurnsUnknown(Exception):
    """Why the turns of a chat were not found; the chat is not compressed."""


def turn_starts(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Index of the first message of each turn, ascending. The last turn is live.

    A turn starts where a user asks something after an answer. Consecutive messages of
    users are one question. Instructions (roles ``system`` and ``developer``) directly
    before a question belong to it, except before the first one: there they are the
    preamble, which belongs to no turn. Tool calls and their results are answers, so
    that a tool loop is part of the turn that caused it.
    """
    starts: list[int] = []
    run: int | None = None  # first of the latest consecutive messages that ask
    has_question = False  # among these
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in _ASKING:
            run, has_question = None, False
            continue
        if run is None:
            run = index
        if role == "user" and not has_question:
            starts.append(run if starts else index)
            has_question = True
    return starts


@dataclass(frozen=True, slots=True)
class TurnParts:
    """Messages at which the parts of a turn end, by index.

    Attributes:
        question: the last message of its question.
        results: of each round of a tool loop, the last result.
        finished_rounds: how many first rounds the model has answered.
    """

    question: int
    results: tuple[int, ...]
    finished_rounds: int


def turn_parts(
    messages: Sequence[Mapping[str, Any]], starts: Sequence[int]
) -> list[TurnParts]:
    """The parts of every turn.

    A round is a message of the assistant with the results of its calls. The next
    message of the assistant answers it, unless it is the last of the chat, which the
    model may be about to continue.
    """
    roles = [message.get("role") for message in messages]
    parts = []
    for start, stop in pairwise([*starts, len(messages)]):
        asks = [role in _ASKING for role in roles[start:stop]] + [False]
        first = start + asks.index(False)
        answers = [i for i in range(first, stop) if roles[i] == "assistant"]
        is_result = [role not in (*_ASKING, "assistant") for role in roles]
        results = [
            i
            for i in range(first, stop)
            if is_result[i] and not (i + 1 < stop and is_result[i + 1])
        ]
        last = max((i for i in answers if i + 1 < len(messages)), default=0)
        finished = sum(i < last for i in results)
        parts.append(TurnParts(first - 1, tuple(results), finished))
    return parts


def questions_of(
    messages: Sequence[Mapping[str, Any]], start: int
) -> list[Mapping[str, Any]]:
    """Messages of users with which the turn at ``start`` begins."""
    questions = []
    for message in messages[start:]:
        if message.get("role") not in _ASKING:
            break
        if message["role"] == "user":
            questions.append(message)
    return questions


def text_of(message: Mapping[str, Any]) -> str:
    """Text of a message; texts of several parts are joined without a separator.

    Raises:
        TurnsUnknown: a part is not text, such as an image.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            raise TurnsUnknown("a message has parts that are not text")
        texts.append(text)
    return "".join(texts)


def marked(
    messages: Sequence[Mapping[str, Any]], indices: Sequence[int], mark: str
) -> list[dict[str, Any]]:
    """Copy the messages; those at the indices contain only the mark."""
    copies = [dict(message) for message in messages]
    for index in indices:
        copies[index]["content"] = mark
    return copies


def grown(
    messages: Sequence[Mapping[str, Any]], mark: str, answer: str
) -> list[dict[str, Any]]:
    """Messages of a later request: the live turn has an answer, and more turns follow.

    The content of the ``ADDED_QUESTIONS`` added questions is the mark, that of every
    added answer ``answer``.
    """
    question = {"role": "user", "content": mark}
    answered = {"role": "assistant", "content": answer}
    is_answered = messages[-1].get("role") == "assistant"
    first = [] if is_answered else [answered]
    added = [question, answered] * (ADDED_QUESTIONS - 1)
    return [*map(dict, messages), *first, *added, question]
