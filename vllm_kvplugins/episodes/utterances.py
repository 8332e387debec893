"""Splits chat messages into utterances."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT_PARTS = ("text", "input_text", "output_text")
# A name of up to four words, a colon, a space, and text on the same line.
_NAMED_LINE = re.compile(
    r"([^\W\d_][\w.'’-]*(?: [\w.'’-]+){0,3}) ?(?::[ \t]+|：[ \t]*)(\S.*)"
)
_ROLES = frozenset(("user", "assistant", "human", "ai", "bot", "system"))
# Words that open lines of prose, logs or letters. They are not names.
_LABEL = re.compile(
    "attention|caution|cc|comment|conclusion|critical|date|debug|definition|edit|error|"
    "example|fatal|fixme|from|hint|https?|important|info|input|nb|notes?|output|ps|re|"
    "reminder|remark|result|sent|source|step|subject|summary|time|tip|title|tldr|to|"
    "todo|trace|update|usage|warn|warning",
    re.IGNORECASE,
)


class NotText(ValueError):
    """A message contains something other than text, such as an image."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A speaker and a text: (r_j, t_j) of eq. 1."""

    speaker: str
    text: str


def dialogue_text(utterances: Iterable[Utterance]) -> str:
    """Lines of the form ``speaker: text``."""
    return "\n".join(f"{item.speaker}: {item.text}" for item in utterances)


def utterances_of(messages: Sequence[Mapping[str, Any]]) -> list[Utterance]:
    """Utterances of chat messages, in order.

    A message is one utterance of its role, unless it contains a pasted dialogue. In a
    dialogue, each line ``Name: text`` begins an utterance of that name. Lines without a
    name continue the utterance before them. Text above the first name belongs to the
    role.

    A message is a dialogue if at least two lines, and more than half of the lines that
    are not blank, begin with a name, and if names repeat: n such lines contain at most
    1 + n / 2 names, so that lists of ``Key: value`` stay whole. A name has up to four
    words. It begins with a capital (in scripts with capitals) or is a role such as
    "user". ``Note:``, ``INFO:`` and similar words are not names.

    Each message is split independently. The utterances of a history's beginning are
    therefore the beginning of the history's utterances.

    Args:
        messages: each ``{"role", "content"}``. The content is a text, a list of texts
            and text parts, or None (an assistant that only called tools).

    Returns:
        Utterances with stripped texts; empty ones are left out.

    Raises:
        NotText: a part is not text, or a message lacks a role or has other content.

    Cost: one regular expression per line.
    """
    return [
        utterance
        for index, message in enumerate(messages)
        for utterance in _split(_role(message, index), _text(message, index))
    ]


def _role(message: Mapping[str, Any], index: int) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise NotText(f"message {index} is not {{'role': …, 'content': …}}")
    return role


def _text(message: Mapping[str, Any], index: int) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, bytes | Mapping):
        raise NotText(f"the content of message {index} is a {type(content).__name__}")
    return "\n".join(_part(part, index) for part in content)


def _part(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    kind, text = type(part).__name__, None
    if isinstance(part, Mapping):
        kind, text = part.get("type", "text"), part.get("text")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise NotText(f"message {index} has a part that is not text: {kind!r}")
    return text


def _split(role: str, text: str) -> list[Utterance]:
    """Utterances of one message."""
    lines = text.splitlines()
    named = [_name_and_words(line) for line in lines]
    if not _is_dialogue(named, sum(bool(line.strip()) for line in lines)):
        named = [None] * len(lines)
    parts: list[tuple[str, list[str]]] = [(role, [])]
    for line, name_and_words in zip(lines, named, strict=True):
        if name_and_words is None:
            parts[-1][1].append(line)
        else:
            name, words = name_and_words
            parts.append((name, [words]))
    joined = ((speaker, "\n".join(texts).strip()) for speaker, texts in parts)
    return [Utterance(speaker, text) for speaker, text in joined if text]


def _name_and_words(line: str) -> tuple[str, str] | None:
    """Name and text of a line ``Name: text``; None for other lines."""
    match = _NAMED_LINE.fullmatch(line)
    if match is None:
        return None
    name, words = match.groups()
    if _LABEL.fullmatch(name) or (name[0].islower() and name not in _ROLES):
        return None
    return name, words


def _is_dialogue(named: Sequence[tuple[str, str] | None], num_lines: int) -> bool:
    """See ``utterances_of``; ``num_lines`` does not count blank lines."""
    names = [name_and_words[0] for name_and_words in named if name_and_words]
    names_repeat = 2 * (len(set(names)) - 1) <= len(names)
    return len(names) >= 2 and 2 * len(names) > num_lines and names_repeat
