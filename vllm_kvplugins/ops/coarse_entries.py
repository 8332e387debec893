"""Attention entries that each stand for a span of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class CoarseEntries:
    """Entries that sequences attend to in addition to their pages.

    Each entry stands for a span of tokens.

    Args:
        keys, values: float32 or bfloat16 [entries, head_dim]; a span's means.
        bias: float32 [entries], added to the scaled score: log of the span's length
            in tokens, -inf for an entry that is off, which is then not read.
        starts, counts: int64 [sequences]; sequence s has ``counts[s]`` entries from
            ``starts[s]`` on. Runs may lie in any order, with unused entries between
            them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys, values, bias, starts and counts."""
        return self.keys, self.values, self.bias, self.starts, self.counts

    @classmethod
    def none(cls, sequences: int, like: torch.Tensor) -> CoarseEntries:
        """No entries; head_dim, dtype and device are those of ``like``."""
        rows = like.new_empty(0, like.shape[-1])
        bias = torch.empty(0, device=like.device)
        zeros = torch.zeros(sequences, dtype=torch.int64, device=like.device)
        return cls(rows, rows, bias, zeros, zeros)
