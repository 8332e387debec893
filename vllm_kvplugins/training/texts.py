"""Texts to train on, and the parts of them that become examples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvplugins.errors import KVPolicyError, refuse

KINDS = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Text:
    """A text's tokens and what tells it from others."""

    name: str
    tokens: Sequence[int]
    sha256: str


@dataclass(frozen=True, slots=True)
class Texts:
    """What is learned from, and what is not.

    Attributes:
        training, held_out: no text is in both.
    """

    training: Sequence[Text]
    held_out: Sequence[Text]

    @property
    def digests(self) -> dict[str, str]:
        return {text.name: text.sha256 for text in (*self.training, *self.held_out)}


def read_texts(
    folder: Path, tokenizer: Any, least_tokens: int, held_out: int, seed: int
) -> Texts:
    """All texts of a folder that are long enough, the held-out ones drawn by ``seed``.

    Raises:
        KVPolicyError: too few of them.
    """
    if not folder.is_dir():
        raise KVPolicyError(
            f"{folder} is no folder; put texts into one ({', '.join(KINDS)}) and give "
            "it with --data"
        )
    files = sorted(path for path in folder.rglob("*") if path.suffix in KINDS)
    read = [_read(path, folder, tokenizer) for path in files]
    long = [text for text in read if len(text.tokens) >= least_tokens]
    refuse(
        f"cannot train on {folder}",
        [
            f"{len(long)} of {len(read)} texts have {least_tokens} tokens; there must "
            f"be more than the {held_out} that are held out: add longer ones, or give "
            "smaller --lengths"
        ]
        if len(long) <= held_out
        else [],
    )
    random.Random(seed).shuffle(long)
    return Texts(long[held_out:], long[:held_out])


def _read(path: Path, folder: Path, tokenizer: Any) -> Text:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KVPolicyError(f"cannot read {path}: {error}") from error
    digest = hashlib.sha256(text.encode()).hexdigest()
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return Text(str(path.relative_to(folder)), tokens, digest)


def parts(
    texts: Sequence[Text],
    length: int,
    count: int,
    seed: str,
    first_text: int,
    ends: bool,
) -> list[tuple[str, list[int]]]:
    """``count`` runs of ``length`` tokens, from one text after the other, from number
    ``first_text`` on and round; drawn, or the ``ends`` of the texts.

    Returns:
        Names and tokens; the same for the same arguments.
    """
    draw = random.Random(f"{seed} {length}")
    found = []
    for number in range(count):
        text = texts[(first_text + number) % len(texts)]
        last = len(text.tokens) - length
        first = last if ends else draw.randrange(last + 1)
        found.append((text.name, list(text.tokens[first : first + length])))
    return found
