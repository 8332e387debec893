"""Extracts plain text from HTML, reStructuredText and Python files, to train routers.

    python benchmarks/research/router_texts.py FOLDER... --out TEXTS \\
        --least 12000 --most 40
    python benchmarks/research/router_texts.py FOLDER... --out TEXTS \\
        --asked 0.5 --model MODEL
    python benchmarks/research/router_texts.py FOLDER... --out TEXTS \\
        --least 75000 --reach 55000 --asked 0.5 --model MODEL  # 16,384 tokens

Each file that is long enough becomes a ``.txt``. ``--seed`` chooses the same number of
files from each folder. With ``--asked`` about that share of the texts contain facts and
end with questions about them (``_router_facts.py``), as turns of the model's chat
template or as plain lines. Train with ``--settings '{"ends": true}'`` in this case.
"""

from __future__ import annotations

import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import _path  # noqa: F401
import typer
from _router_facts import TALK, examined

KINDS = (".html", ".rst", ".rst.txt", ".py", ".txt")
SILENT = {"script", "style", "head", "nav"}
# Questions after a text: a window of 256 tokens holds little else.
QUESTIONS = 10


class _Text(HTMLParser):
    """Collects the visible text of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._silent += tag in SILENT
        if tag in {"p", "br", "h1", "h2", "h3", "li", "tr"}:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in SILENT

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.parts.append(data)


def plain(path: Path) -> str:
    """Text of ``path`` without markup, and without runs of blanks or empty lines."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix == ".html":
        parser = _Text()
        parser.feed(text)
        text = re.sub(r"[ \t]+", " ", "".join(parser.parts))
    return re.sub(r"\n\s*\n+", "\n\n", text).strip()


def stretch(text: str, length: int, draw: random.Random) -> str:
    """A random run of ``length`` characters."""
    first = draw.randrange(max(len(text) - length, 0) + 1)
    return text[first : first + length]


def chat_turn(model: str) -> str:
    """A later turn of this model's chat template, with ``{question}`` and
    ``{answer}``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    turn = [
        {"role": "user", "content": "{question}"},
        {"role": "assistant", "content": "{answer}"},
    ]
    once, twice = (
        tokenizer.apply_chat_template(turns, tokenize=False)
        for turns in (turn, turn + turn)
    )
    return str(twice).removeprefix(str(once))


def main(
    folders: list[Path],
    out: Annotated[Path, typer.Option(help="folder for the texts")],
    least: Annotated[int, typer.Option(help="minimum characters of a text")] = 12000,
    most: Annotated[int, typer.Option(help="texts per folder")] = 40,
    asked: Annotated[
        float, typer.Option(min=0, max=1, help="share of texts that end with questions")
    ] = 0,
    reach: Annotated[
        int,
        typer.Option(
            min=1,
            help="characters before the questions that hold the facts; "
            "by default 2048 tokens hold all of them",
        ),
    ] = 5500,
    model: Annotated[
        str, typer.Option(help="model whose chat template most questions use")
    ] = "",
    seed: int = 0,
) -> None:
    turns = [TALK]
    if model:
        turns += 2 * [chat_turn(model)]
    out.mkdir(parents=True, exist_ok=True)
    for number, folder in enumerate(folders):
        files = sorted(p for p in folder.rglob("*") if p.name.endswith(KINDS))
        random.Random(seed).shuffle(files)
        written = 0
        for path in files:
            if path.is_file() and len(text := plain(path)) >= least:
                draw = random.Random(f"{seed} {number} {path.name}")
                if asked:
                    text = stretch(text, least, draw)
                if draw.random() < asked:
                    turn = draw.choice(turns)
                    text = examined(text, draw, reach, QUESTIONS, turn)
                name = f"{number}-{written:03}-{path.name.partition('.')[0]}.txt"
                (out / name).write_text(text, encoding="utf-8")
                written += 1
            if written == most:
                break
        typer.echo(f"{folder}: {written} texts")


if __name__ == "__main__":
    typer.run(main)
