"""Finds the turns of a rendered chat by comparing it with a marked rendering.

The marked rendering has a mark in place of every question, and more turns. Between
its marks is exactly what the template writes between questions, in the form that it
keeps when the conversation grows::

    marked   system <user>MARK<end> <assistant>answer 1<end> <user>MARK<end> ...
    prompt   system <user>Why?<end> <assistant>answer 1<end> <user>And then?<end> ...
                   │                                   │
                   └─ the preamble ends                └─ turn 1 ends

A turn ends after the text of its answer. The tokens that close the answer and open the
next question belong to the next turn, so that the live question stays whole. Their
text is the *gap*, which the added turns show.

A rendering is a string: text, or one character per token if the template writes tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import TurnsUnknown

# Places to look for a segment, if the template changes the text of a question.
_MAX_PLACES = 16


class Rewritten(TurnsUnknown):
    """The prompt does not contain what the marked rendering contains."""


def gap_of(rendering: str, mark: str, answer: str) -> str:
    """What the template writes between an answer and the next question.

    Args:
        rendering: marked rendering that ends with added turns.
        answer: text of the added answers.

    Raises:
        TurnsUnknown: the template leaves out answers or questions.
    """
    _before, found, after = rendering.partition(answer)
    gap, next_question, _ = after.partition(mark)
    if not found or not next_question:
        raise TurnsUnknown("the chat template does not write every message")
    return gap


def locate(
    prompt: str,
    rendering: str,
    mark: str,
    num_marks: int,
    questions: Sequence[str],
    gap: str,
    names: Collection[str],
    plain: Callable[[str], str] = str,
) -> list[int]:
    """Where the preamble and every turn before the live one end in a prompt.

    Args:
        prompt: the rendered prompt.
        rendering: marked rendering of the same messages, or of more.
        num_marks: number of messages whose content is the mark.
        questions: text of the first message of each turn.
        gap: see ``gap_of``.
        names: names of special tokens, one of which opens a question.
        plain: turns a piece of the prompt into text.

    Returns:
        Numbers of characters, ascending. The first is the end of the preamble; 0 if
        there is none, or if the first question contains it.

    Raises:
        Rewritten: prompt and rendering differ outside of questions.
        TurnsUnknown: the template leaves out, moves or repeats questions, or no text
            opens them.

    Cost: compares every character once or twice.
    """
    segments = rendering.split(mark)
    # Tokens of a mark may differ if other text precedes it in the last question.
    if not len(questions) < len(segments) <= num_marks + 1:
        raise TurnsUnknown("the chat template does not write every question once")
    ends: list[int] = []
    position = 0  # in the prompt: the end of the previous segment
    for index, segment in enumerate(segments[: len(questions)]):
        opening = _opening_length(segment, gap, names)
        if opening is None and index:
            raise TurnsUnknown("the chat template opens questions in different ways")
        body = len(segment) - (opening or 0)
        # Templates may insert text before the live question, such as tool definitions.
        is_live = index == len(questions) - 1
        expected = segment[:body] if is_live else segment
        if not index:
            found = 0 if prompt.startswith(expected) else None
        else:
            question = questions[index - 1]
            found = after_question(prompt, position, question, expected, plain)
        if found is None:
            raise Rewritten("the chat template writes earlier messages differently")
        ends.append(found + body if opening is not None else 0)
        position = found + len(segment)
    return ends


def _opening_length(segment: str, gap: str, names: Collection[str]) -> int | None:
    """Number of last characters that close an answer and open a question.

    The gap follows answers. A preamble or a tool's result may be closed by other
    tokens; then only the special tokens that open a question are part of the opening.

    Returns:
        None if the segment ends in another way: its last text is part of the question.
    """
    if segment.endswith(gap):
        return len(gap)
    pairs = zip(reversed(segment), reversed(gap), strict=False)
    shorter = min(len(segment), len(gap))
    common = next(
        (i for i, (left, right) in enumerate(pairs) if left != right), shorter
    )
    opening = segment[len(segment) - common :]
    first = min(
        (opening.index(name) for name in names if name in opening), default=None
    )
    return None if first is None else common - first


def after_question(
    prompt: str,
    position: int,
    question: str,
    expected: str,
    plain: Callable[[str], str],
) -> int | None:
    """Where ``expected`` begins, if only the question is before it; None if nowhere.

    Templates may trim a question or join its parts; only white space may differ. The
    question may contain the expected text, for example a quoted conversation.
    """
    for text in (question, question.strip()):
        if prompt.startswith(text, position):
            found = position + len(text)
            if prompt.startswith(expected, found):
                return found
    wanted = "".join(question.split())
    found = prompt.find(expected, position)
    for _ in range(_MAX_PLACES):
        if found < 0:
            break
        written = "".join(plain(prompt[position:found]).split())
        if written == wanted:
            return found
        if len(written) > len(wanted):
            break
        found = prompt.find(expected, found + 1)
    return None


def tokens_before(offsets: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """Number of tokens that end at or before each character, ascending and distinct.

    A token with characters on both sides belongs to what follows.

    Args:
        offsets: first and last character of each token; ``(0, 0)`` for a token that
            the tokenizer adds before the prompt.
        ends: numbers of characters, ascending. 0 is left out, and so are ends that the
            prompt does not reach, because it was truncated.
    """
    counts: list[int] = []
    token = 0
    for end in ends:
        while token < len(offsets) and offsets[token][1] <= end:
            token += 1
        if end and 0 < token < len(offsets) and token not in counts[-1:]:
            counts.append(token)
    return counts


def tokens_of_pieces(
    tokens: Sequence[int], pieces: Sequence[Sequence[int]]
) -> list[int]:
    """Number of tokens up to the end of each piece.

    For tokenizers that do not report the characters of a token.

    Args:
        tokens: token IDs of the prompt.
        pieces: token IDs of its pieces, each tokenized alone.

    Raises:
        TurnsUnknown: tokens reach across the end of a piece.
    """
    counts = []
    count = 0
    for piece in pieces:
        if list(tokens[count : count + len(piece)]) != list(piece):
            raise TurnsUnknown("the tokens of the prompt reach across turns")
        count += len(piece)
        if piece:
            counts.append(count)
    return counts
