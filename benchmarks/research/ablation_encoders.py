"""Writes sentence encoders that know less than the default one.

EpiCache, figure A1 d: does the encoder matter? Three encoders for the setting
``encoder``:

- ``random-minilm``: the default encoder's architecture with random weights.
- ``hashed-words``: a random vector for each word piece of the default encoder, averaged
  over a text. Texts with the same words are similar; meaning plays no part.
- ``embedding-layer``: the embedding layer of a language model, averaged over a text.

    python benchmarks/research/ablation_encoders.py MODEL FOLDER
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from safetensors import safe_open
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import (
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoTokenizer

from vllm_kvplugins.episodes.encoder import missing, weights_folder
from vllm_kvplugins.episodes.settings import DEFAULT_ENCODER

SEED = 0
MAX_TOKENS = 256  # of a text, as the default encoder reads it


def default_folder() -> Path:
    problem = missing(DEFAULT_ENCODER)
    if problem is not None:
        raise typer.BadParameter(problem)
    folder = weights_folder(DEFAULT_ENCODER)
    assert folder is not None
    return folder


def random_minilm() -> SentenceTransformer:
    torch.manual_seed(SEED)
    source = default_folder()
    with TemporaryDirectory() as folder:
        AutoModel.from_config(AutoConfig.from_pretrained(source)).save_pretrained(
            folder
        )
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        body = Transformer(folder, max_seq_length=MAX_TOKENS)
        pooling = Pooling(body.get_word_embedding_dimension(), "mean")
        return SentenceTransformer(modules=[body, pooling, Normalize()], device="cpu")


def hashed_words() -> SentenceTransformer:
    torch.manual_seed(SEED)
    source = default_folder()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    size = AutoConfig.from_pretrained(source).hidden_size
    vectors = torch.randn(tokenizer.get_vocab_size(), size)
    return averaged(tokenizer, vectors)


def embedding_layer(model: Path) -> SentenceTransformer:
    with safe_open(model / "model.safetensors", "pt") as weights:
        vectors = weights.get_tensor("model.embed_tokens.weight").float()
    return averaged(Tokenizer.from_file(str(model / "tokenizer.json")), vectors)


def averaged(tokenizer: Tokenizer, vectors: torch.Tensor) -> SentenceTransformer:
    words = StaticEmbedding(tokenizer, embedding_weights=vectors.numpy())
    return SentenceTransformer(modules=[words, Normalize()], device="cpu")


def main(
    model: Annotated[
        Path, typer.Argument(help="folder of a model with one file of weights")
    ],
    folder: Annotated[Path, typer.Argument(help="gets a folder for each encoder")],
) -> None:
    """Write the three encoders."""
    encoders = {
        "random-minilm": random_minilm(),
        "hashed-words": hashed_words(),
        "embedding-layer": embedding_layer(model),
    }
    for name, encoder in encoders.items():
        encoder.save(str(folder / name))
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    typer.run(main)
