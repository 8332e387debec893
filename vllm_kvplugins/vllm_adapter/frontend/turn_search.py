"""Renders a chat with marks and finds the turn ends of its prompt.

Cost per chat: one more rendering of the template, without tokenizing it; a second one
if the template writes earlier messages differently when the conversation grows. Neither
depends on the number of turns. Tokenizers that do not report the characters of a token
tokenize the prompt once more, in pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm.logger import init_logger

from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.vllm_adapter.frontend.conversation_turns import (
    ADDED_QUESTIONS,
    TurnsUnknown,
    grown,
    marked,
    text_of,
)
from vllm_kvplugins.vllm_adapter.frontend.rendered_turns import (
    Rewritten,
    gap_of,
    locate,
    tokens_before,
    tokens_of_pieces,
)

logger = init_logger("vllm.kv_policy")

# Contents of messages in marked renderings. Letters only: templates may trim the rest.
_MARK, _ANSWER = "Kvpquestionmark", "Kvpansweradded"
_SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTES = re.compile("(<0x[0-9A-F]{2}>)+")
_throttle = LogThrottle()


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """Steps of vLLM's rendering; synchronous ones return before the first await.

    Attributes:
        render: a conversation and chat parameters to its text, or to its tokens.
        tokenize: texts and tokenization parameters to token IDs.
        in_thread: calls a function that takes long.
    """

    render: Callable[[Any, Any], Awaitable[dict[str, Any]]]
    tokenize: Callable[[Sequence[str], Any], Awaitable[list[list[int]]]]
    in_thread: Callable[..., Awaitable[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat and what vLLM made of it.

    Attributes:
        starts: see ``turn_starts``.
        chat_params: vLLM's settings of the chat template.
        tok_params: vLLM's settings of the tokenizer.
        tokens: token IDs of the prompt.
        text: the prompt; None if the template writes tokens.
        offsets: characters of each token; None if the tokenizer does not report them.
    """

    messages: Sequence[Any]
    starts: list[int]
    chat_params: Any
    tok_params: Any
    tokens: list[int]
    text: str | None
    offsets: Sequence[tuple[int, int]] | None


async def turn_ends(chat: RenderedChat, tokenizer: Any, steps: Steps) -> list[int]:
    """Numbers of tokens before the ends of the preamble and of finished turns.

    Returns:
        Ascending. Empty, with a message in the log, if they are unknown.
    """
    if not chat.starts:
        return []
    try:
        return await _turn_ends(chat, tokenizer, steps)
    except TurnsUnknown as unknown:
        log(f"a chat is not compressed: {unknown}", unknown.__cause__)
        return []


def log(message: str, cause: BaseException | None = None) -> None:
    """Log a message about a request, unless there were many of its kind.

    Args:
        cause: an error to log with it. Its text does not make a kind of its own,
            because it may contain text of the request.
    """
    text = _throttle.format(message)
    if text is not None:
        logger.warning("%s%s", text, f" ({cause})" if cause else "")


async def _turn_ends(chat: RenderedChat, tokenizer: Any, steps: Steps) -> list[int]:
    mark, answer = (unused_word(word, chat.text) for word in (_MARK, _ANSWER))
    with_marks = marked(chat.messages, chat.starts, mark)
    questions = [text_of(chat.messages[start]) for start in chat.starts]
    longer = grown(with_marks, mark, answer)
    later = await render(longer, of_history(chat.chat_params), steps)
    view = View(tokenizer, is_text="prompt_token_ids" not in later)
    find = functools.partial(
        locate,
        view.string(chat.text, chat.tokens),
        mark=view.word(mark),
        questions=questions,
        gap=gap_of(view.of(later), view.word(mark), view.word(answer)),
        names=view.names(),
        plain=view.plain,
    )
    try:
        num_marks = len(questions) + ADDED_QUESTIONS
        ends = find(rendering=view.of(later), num_marks=num_marks)
    except Rewritten:
        now = await render(with_marks, chat.chat_params, steps)
        ends = find(rendering=view.of(now), num_marks=len(questions))
        log(
            "the chat template writes earlier messages differently when a conversation "
            "grows; the next request cannot use the session of this one"
        )
    return await token_counts(chat, view, ends, steps)


async def token_counts(
    chat: RenderedChat, view: View, ends: Sequence[int], steps: Steps
) -> list[int]:
    """Numbers of tokens before places in a prompt, ascending and distinct.

    Args:
        ends: numbers of characters of ``view``'s string, ascending; 0 is left out.

    Raises:
        TurnsUnknown: tokens reach across a place, and the tokenizer does not report
            their characters.
    """
    if not view.is_text:
        return [end for end in ends if end]
    assert chat.text is not None, "as the marked rendering"
    if chat.offsets is not None:
        return tokens_before(chat.offsets, ends)
    pieces = [
        chat.text[start:end] for start, end in zip([0, *ends], ends, strict=False)
    ]
    params = dataclasses.replace(chat.tok_params, add_special_tokens=False)
    return tokens_of_pieces(chat.tokens, await steps.tokenize(pieces, params))


def unused_word(word: str, text: str | None) -> str:
    """A word that the text does not contain."""
    while text and word in text:
        word += "x"
    return word


async def render(messages: Any, chat_params: Any, steps: Steps) -> dict[str, Any]:
    """A rendering.

    Raises:
        TurnsUnknown: the template refuses the messages.
    """
    try:
        return await steps.render(messages, chat_params)
    except Exception as error:  # templates can raise any exception
        reason = "the chat template cannot render it with further turns"
        raise TurnsUnknown(reason) from error


def of_history(chat_params: Any) -> Any:
    """The same template settings, without the tokens that open an answer."""
    history = {"add_generation_prompt": False, "continue_final_message": False}
    kwargs = chat_params.chat_template_kwargs | history
    return dataclasses.replace(chat_params, chat_template_kwargs=kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Renderings as strings: their text, or one character per token."""

    tokenizer: Any
    is_text: bool

    def of(self, rendered: dict[str, Any]) -> str:
        """A rendering as a string."""
        return self.string(rendered.get("prompt"), rendered.get("prompt_token_ids"))

    def string(self, text: str | None, tokens: Sequence[int] | None) -> str:
        """The text or the tokens as a string."""
        if not self.is_text:
            return "".join(map(chr, tokens or ()))
        if text is None:
            raise TurnsUnknown("the renderer does not return the text of the prompt")
        return text

    def word(self, word: str) -> str:
        """A word that the template writes as the content of a message."""
        if self.is_text:
            return word
        return self.string(None, self.tokenizer.encode(word, add_special_tokens=False))

    def names(self) -> list[str]:
        """Special and other added tokens."""
        if self.is_text:
            return list(self.tokenizer.get_added_vocab())
        return [chr(token) for token in self.tokenizer.all_special_ids]

    def plain(self, piece: str) -> str:
        """Text of a part of a rendering."""
        if self.is_text:
            return piece
        text: str = self.tokenizer.decode([ord(token) for token in piece])
        # SentencePiece writes bytes and spaces of a part of a prompt in its own way.
        text = _BYTES.sub(lambda found: _text_of_bytes(found[0]), text)
        return text.replace(_SENTENCEPIECE_SPACE, " ")


def _text_of_bytes(names: str) -> str:
    hexadecimal = names.replace("<0x", "").replace(">", "")
    return bytes.fromhex(hexadecimal).decode("utf-8", "replace")
