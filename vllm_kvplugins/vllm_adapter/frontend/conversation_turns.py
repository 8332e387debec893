"""Divides the messages of a chat into turns, by their roles.

::

    system | user  assistant  tool  tool  assistant | user  user  assistant | user  tool
           └─ turn: a question, tool loop, answer ──┘└─ turn ───────────────┘└─ live

Knows neither templates nor tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    messages: Sequence[Mapping[str, Any]], starts: Sequence[int], mark: str
) -> list[dict[str, Any]]:
    """Copy the messages; the first message of each turn contains only the mark."""
    copies = [dict(message) for message in messages]
    for start in starts:
        copies[start]["content"] = mark
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
