"""Pass-key prompts: a number in a long text, and a question about it at the end."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from _documents import read_documents

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. "
    "Here we go. There and back again. "
)
FILLER_TOKENS = 25
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it "
    "and memorize it. I will quiz you about the important information there.\n\n"
)
QUESTION = "\n\nWhat is the pass key? Answer with the 5-digit number only."
# start of the answer, for questions that come before the text
ANSWER = "\n\nThe pass key is"
NEEDLE = "The pass key is {key}. Remember it. {key} is the key. "


def filler(tokens: int) -> list[str]:
    """The same filler sentences, repeated."""
    return [FILLER] * (tokens // FILLER_TOKENS)


def sentences(
    path: Path, tokens: int, first_tokens: Callable[[str, int], str]
) -> list[str]:
    """Sentences of the texts under ``path``, in order of file names.

    Args:
        path: a file or folder of texts.
        tokens: number of tokens to read.
        first_tokens: function that cuts a text to its first tokens.

    Raises:
        ValueError: the texts are too short.
    """
    text = "\n\n".join(document.text for document in read_documents(path))
    start = text[: 12 * tokens]  # upper bound of characters per token
    cut = first_tokens(start, tokens)
    if len(cut) >= len(text):
        raise ValueError(f"{path} has fewer than {tokens} tokens of text")
    return [part for part in re.split(r"(?<=[.!?])(?=\s)", cut) if part]


def plant(
    haystack: list[str], depth: int, depths: int, seed: int = 0
) -> tuple[str, str]:
    """The prompt with a key in the middle of the ``depth``-th of ``depths`` parts.

    Returns:
        Prompt and key. The key depends on the depth and the seed only.
    """
    key = str(random.Random(depth + 1_000_000 * seed).randrange(10_000, 100_000))
    target_chars = (2 * depth + 1) / (2 * depths) * sum(map(len, haystack))
    place = before = 0
    while before + len(haystack[place]) <= target_chars:
        before += len(haystack[place])
        place += 1
    after = haystack[place:]
    lead = "" if haystack[place - 1].endswith(" ") or not place else " "
    planted = "".join([*haystack[:place], lead, NEEDLE.format(key=key), *after])
    return TASK + planted + QUESTION, key
