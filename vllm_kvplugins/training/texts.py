"""Read training texts, and draw the parts that become examples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvplugins.errors import KVPolicyError, coded, refuse

KINDS = (".txt", ".md")


@dataclass(frozen=True, slots=True)
class Text:
    """The tokens of a text, with its name and digest."""

    name: str
    tokens: Sequence[int]
    sha256: str


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts for training and texts for the report; no text is in both."""

    training: Sequence[Text]
    held_out: Sequence[Text]

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each text, by name."""
        return {text.name: text.sha256 for text in (*self.training, *self.held_out)}


def read_texts(
    folder: Path, tokenizer: Any, min_tokens: int, held_out: int, seed: int
) -> Texts:
    """Read all texts of a folder that are long enough.

    Args:
        min_tokens: shorter texts are left out.
        held_out: number of texts that are drawn for the report.
        seed: of that draw.

    Raises:
        KVPolicyError: the folder is missing, a text cannot be read, or there are too
            few texts.
    """
    if not folder.is_dir():
        raise KVPolicyError(
            coded(
                "KVP601",
                f"{folder} is not a folder; pass a folder of texts "
                f"({', '.join(KINDS)}) with --data",
            )
        )
    files = sorted(path for path in folder.rglob("*") if path.suffix in KINDS)
    read = [_read(path, folder, tokenizer) for path in files]
    long = [text for text in read if len(text.tokens) >= min_tokens]
    refuse(
        f"cannot train on {folder}",
        [
            coded(
                "KVP642",
                f"{len(long)} of {len(read)} texts have {min_tokens} tokens, but "
                f"more than the {held_out} held-out ones are needed; add longer texts, "
                "or give smaller --lengths",
            )
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
        raise KVPolicyError(coded("KVP601", f"cannot read {path}: {error}")) from error
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
    """Take ``count`` runs of ``length`` tokens, one per text, cycling through texts.

    Args:
        first_text: index of the first text.
        ends: take the last tokens of each text instead of a random run.

    Returns:
        Names and tokens; equal arguments give equal results.
    """
    draw = random.Random(f"{seed} {length}")
    runs = []
    for number in range(count):
        text = texts[(first_text + number) % len(texts)]
        last = len(text.tokens) - length
        first = last if ends else draw.randrange(last + 1)
        runs.append((text.name, list(text.tokens[first : first + length])))
    return runs
