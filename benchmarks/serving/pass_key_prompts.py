"""Writes pass-key prompts as a custom dataset of ``vllm bench serve``, with answers.

Each prompt hides a number at another depth of a text and asks for it at the end, as in
``quality.py --tasks passkey``. ``benchmark_serving.py --dataset-name custom`` then
measures speed and right answers in the same run.

    python benchmarks/serving/pass_key_prompts.py MODEL prompts.jsonl --texts FOLDER
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import _path  # noqa: F401
import typer
from _pass_key import filler, plant, sentences


def prompts(
    tokenizer: Any, texts: Path | None, tokens: int, count: int, seed: int
) -> list[dict[str, str]]:
    """``count`` prompts of about ``tokens`` tokens of text, and their keys.

    Args:
        texts: a file or folder; None = filler sentences.

    Raises:
        ValueError: the texts are too short.
    """

    def first_tokens(text: str, number: int) -> str:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:number]
        return str(tokenizer.decode(ids))

    lines = sentences(texts, tokens, first_tokens) if texts else filler(tokens)
    pairs = [plant(lines, depth, count, seed) for depth in range(count)]
    return [{"prompt": prompt, "answer": key} for prompt, key in pairs]


def main(
    model: str,
    out: Path,
    texts: Annotated[
        Path | None, typer.Option(help="file or folder; default: filler sentences")
    ] = None,
    tokens: Annotated[int, typer.Option(help="of text in each prompt")] = 1000,
    count: Annotated[int, typer.Option(help="number of prompts")] = 40,
    seed: int = 0,
) -> None:
    """Write COUNT prompts to OUT, one JSON object per line."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    try:
        lines = prompts(tokenizer, texts, tokens, count, seed)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    typer.echo(f"{len(lines)} prompts in {out}")


if __name__ == "__main__":
    typer.run(main)
