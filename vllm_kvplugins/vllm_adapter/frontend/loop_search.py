"""Finds where the questions and rounds of tool loops end in the prompt of a chat.

The chat is rendered once more, with a mark in place of every question and of the last
result of every round. What the template writes between the marks is also in the
prompt::

    marked   <user>MARK<end> <assistant>call 1<end> <tool>MARK<end> <assistant>call 2...
    prompt   <user>Why?<end> <assistant>call 1<end> <tool>rain<end> <assistant>call 2...
                       │                                  │
                       └─ the question ends               └─ round 1 ends

Templates write results in their own way, trimmed or as JSON. If a result is written in
no way that we know, its round ends at the first place behind its beginning where the
text behind its mark follows. A result that quotes this text then makes the round end
too early. That is harmless: no question and no newer round comes before this place, and
later requests find the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import (
    TurnsUnknown,
    marked,
    text_of,
    turn_parts,
)
from vllm_kvplugins.vllm_adapter.frontend.rendered_turns import (
    Rewritten,
    after_question,
)
from vllm_kvplugins.vllm_adapter.frontend.turn_search import (
    RenderedChat,
    Steps,
    View,
    log,
    render,
    token_counts,
    unused_word,
)

_MARK = "Kvppartmark"


async def loop_ends(
    chat: RenderedChat,
    turn_ends: Sequence[int],
    loop_tokens: int | None,
    tokenizer: Any,
    steps: Steps,
) -> list[int]:
    """Numbers of tokens before the ends of questions and of finished rounds.

    Of each turn with a finished round, the end of the question comes first.

    Args:
        turn_ends: of the chat, in tokens.
        loop_tokens: if no turn has more tokens, or None, nothing is searched.

    Returns:
        Ascending. Empty, with a message in the log, if they are unknown.

    Cost: one rendering of the template, if a turn is long enough.
    """
    if loop_tokens is None:
        return []
    longest = max(b - a for a, b in pairwise([0, *turn_ends, len(chat.tokens)]))
    # Fewer ends than finished turns: they are unknown, or the prompt is truncated.
    are_known = 0 < len(chat.starts) <= len(turn_ends) + 1
    if longest <= loop_tokens or not are_known:
        return []
    try:
        return await _loop_ends(chat, tokenizer, steps)
    except TurnsUnknown as unknown:
        log(
            f"tool loops of a chat are compressed only when they end: {unknown}",
            unknown.__cause__,
        )
        return []


async def _loop_ends(chat: RenderedChat, tokenizer: Any, steps: Steps) -> list[int]:
    turns = turn_parts(chat.messages, chat.starts)
    if not any(turn.finished_rounds for turn in turns):
        return []
    marks = [index for turn in turns for index in (turn.question, *turn.results)]
    questions = {turn.question for turn in turns}
    mark = unused_word(_MARK, chat.text)
    with_marks = marked(chat.messages, marks, mark)
    rendered = await render(with_marks, chat.chat_params, steps)
    view = View(tokenizer, is_text="prompt_token_ids" not in rendered)
    found = locate_ends(
        view.string(chat.text, chat.tokens),
        view.of(rendered).split(view.word(mark)),
        [text_of(chat.messages[index]) for index in marks],
        [index in questions for index in marks],
        view.plain,
    )
    ends = dict(zip(marks, found, strict=True))
    wanted = [
        ends[index]
        for turn in turns
        if turn.finished_rounds
        for index in (turn.question, *turn.results[: turn.finished_rounds])
    ]
    counts = await token_counts(chat, view, wanted, steps)
    # Truncated prompts, and parts without a token: no longer one count for each end.
    return counts if len(counts) == len(wanted) else []


def locate_ends(
    prompt: str,
    segments: Sequence[str],
    texts: Sequence[str],
    are_questions: Sequence[bool],
    plain: Callable[[str], str] = str,
) -> list[int]:
    """Where the marked messages end in a prompt, as numbers of characters.

    Args:
        segments: what is before, between and behind the marks.
        texts: of the marked messages.
        are_questions: of each, whether it is a question; others are results of tools.
        plain: turns a piece of the prompt into text.

    Raises:
        TurnsUnknown: the template leaves out, moves, repeats or changes messages.

    Cost: compares every character once or twice.
    """
    if len(segments) != len(texts) + 1:
        raise TurnsUnknown("the chat template does not write every message once")
    if not prompt.startswith(segments[0]) or not prompt.endswith(segments[-1]):
        raise Rewritten("the chat template writes other text around messages")
    ends: list[int] = []
    position = len(segments[0])
    for text, is_question, segment in zip(
        texts, are_questions, segments[1:], strict=True
    ):
        if is_question:
            found = after_question(prompt, position, text, segment, plain)
        else:
            found = _after_result(prompt, position, text, segment)
        if found is None:
            raise Rewritten("the chat template writes other text around messages")
        ends.append(found)
        position = found + len(segment)
    return ends


def _after_result(prompt: str, position: int, text: str, expected: str) -> int | None:
    """Where ``expected`` begins behind a result of a tool; None if nowhere."""
    forms = (
        *(text, text.strip()),
        *(json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True)),
    )
    for written in forms:
        found = position + len(written)
        if prompt.startswith(written, position) and prompt.startswith(expected, found):
            return found
    found = prompt.find(expected, position)
    return None if found < 0 else found
