"""Utterances of a conversation, from chat messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT_PARTS = ("text", "input_text", "output_text")
# A name of up to four words, a colon, a space, and something said on the same line.
_SPOKEN = re.compile(
    r"([^\W\d_][\w.'’-]*(?: [\w.'’-]+){0,3}) ?(?::[ \t]+|：[ \t]*)(\S.*)"
)
_ROLES = frozenset(("user", "assistant", "human", "ai", "bot", "system"))
# Words that open a line of prose, of a log or of a letter, and are nobody's name.
_LABEL = re.compile(
    "attention|caution|cc|comment|conclusion|critical|date|debug|definition|edit|error|"
    "example|fatal|fixme|from|hint|https?|important|info|input|nb|notes?|output|ps|re|"
    "reminder|remark|result|sent|source|step|subject|summary|time|tip|title|tldr|to|"
    "todo|trace|update|usage|warn|warning",
    re.IGNORECASE,
)


class NotText(ValueError):
    """A message holds something that is no text, such as an image."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """What one speaker said at once: (r_j, t_j) of eq. 1."""

    speaker: str
    text: str


def dialogue_text(utterances: Iterable[Utterance]) -> str:
    """``speaker: text`` lines."""
    return "\n".join(f"{said.speaker}: {said.text}" for said in utterances)


def utterances_of(messages: Sequence[Mapping[str, Any]]) -> list[Utterance]:
    """Utterances of chat messages, in order.

    A message is one utterance of its role, unless a dialogue was pasted into it: then
    each line ``Name: text`` begins an utterance of that name, lines without a name go
    on with the last one, and what stands above the first name is the role's. It is a
    dialogue if at least two lines, and more than half of all that are not blank, begin
    with a name, and names come back: with n such lines there are at most 1 + n / 2
    names, so that lists of ``Key: value`` stay whole. A name has up to four words, and
    begins with a capital (in scripts that have them) or is a role such as "user".
    ``Note:``, ``INFO:`` and the like are no names.

    What a message gives does not depend on other messages: the utterances of a
    history's beginning are the beginning of its utterances.

    Args:
        messages: ``{"role", "content"}`` each; the content a text, a list of texts and
            text parts, or None (an assistant that only called tools).

    Returns:
        Texts are stripped; empty ones are left out.

    Raises:
        NotText: a part is no text, or a message has no role or no such content.

    Cost: one regular expression per line.
    """
    return [
        said
        for number, message in enumerate(messages)
        for said in _utterances(_role(message, number), _text(message, number))
    ]


def _role(message: Mapping[str, Any], number: int) -> str:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise NotText(f"message {number} is not {{'role': …, 'content': …}}")
    return role


def _text(message: Mapping[str, Any], number: int) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Iterable) or isinstance(content, bytes | Mapping):
        raise NotText(f"the content of message {number} is a {type(content).__name__}")
    return "\n".join(_part(part, number) for part in content)


def _part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return part
    kind, text = type(part).__name__, None
    if isinstance(part, Mapping):
        kind, text = part.get("type", "text"), part.get("text")
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise NotText(f"message {number} has a part that is no text: {kind!r}")
    return text


def _utterances(role: str, text: str) -> list[Utterance]:
    lines = text.splitlines()
    found = [_spoken(line) for line in lines]
    if not _is_dialogue(found, sum(bool(line.strip()) for line in lines)):
        found = [None] * len(lines)
    said: list[tuple[str, list[str]]] = [(role, [])]
    for line, spoken in zip(lines, found, strict=True):
        if spoken is None:
            said[-1][1].append(line)
        else:
            said.append((spoken[0], [spoken[1]]))
    joined = ((speaker, "\n".join(parts).strip()) for speaker, parts in said)
    return [Utterance(speaker, text) for speaker, text in joined if text]


def _spoken(line: str) -> tuple[str, str] | None:
    """Name and words of a line that somebody speaks."""
    match = _SPOKEN.fullmatch(line)
    if match is None:
        return None
    name, words = match.groups()
    if _LABEL.fullmatch(name) or (name[0].islower() and name not in _ROLES):
        return None
    return name, words


def _is_dialogue(found: Sequence[tuple[str, str] | None], lines: int) -> bool:
    names = [spoken[0] for spoken in found if spoken is not None]
    few_names = 2 * (len(set(names)) - 1) <= len(names)
    return len(names) >= 2 and 2 * len(names) > lines and few_names
