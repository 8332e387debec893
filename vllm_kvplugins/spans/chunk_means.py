"""Means of chunks: what queries attend to of the tokens that they do not select.

A retriever attends to the tokens with the most attention; without means, all other
tokens get none. Here each chunk of consecutive tokens has an entry, the mean of its
keys and values. The logarithm of how many of its tokens are not selected is added to
its score, so that it weighs as much as these tokens would if they were all equal to the
mean::

    tokens   a b c d | e f g h | i j k         selected: b, e, f, g, h
    entries  log 3   |   off   | none yet      chunks of 4

The mean keeps the tokens that are selected, so it is computed once. RetroInfer
(arXiv:2505.02922) estimates the attention to clusters that are not fetched in a similar
way. See docs/research/retrieval.md for what it brings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BIAS_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class ChunkMeans:
    """How chunks of a request's host tokens become entries.

    Args:
        chunk_tokens: tokens of a chunk. Those behind the last full one have no entry.
    """

    chunk_tokens: int

    def num_chunks(self, tokens: int) -> int:
        """Chunks of this many tokens."""
        return tokens // self.chunk_tokens

    def entry_bytes(self, row_bytes: float) -> float:
        """Bytes of an entry, from those of a key and a value."""
        return row_bytes + _BIAS_BYTES

    def means(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean of the keys or values of each chunk.

        Args:
            rows: [rows, n, head_dim] from the first token of a chunk on, on any device.

        Returns:
            float32 [rows, full chunks, head_dim].
        """
        full = self.num_chunks(rows.shape[1])
        stop = full * self.chunk_tokens
        chunks = rows[:, :stop].unflatten(1, (full, self.chunk_tokens))
        return chunks.float().mean(2)
