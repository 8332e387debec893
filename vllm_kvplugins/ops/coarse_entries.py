"""Entries that stand for many tokens, beside pages that hold each of theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class CoarseEntries:
    """What sequences attend to beside their pages: an entry stands for a span.

    Args:
        keys, values: float32 or bfloat16 [entries, head_dim]; a span's means.
        bias: float32 [entries], added to the scaled score: log of the span's length
            in tokens, -inf for an entry that is off, which is then not read.
        starts, counts: int64 [sequences]; sequence s has the ``counts[s]`` entries from
            ``starts[s]`` on. Runs may be in any order, with entries between them that
            nobody has.
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
        """No entry for any of ``sequences``; dims, dtype and device of ``like``."""
        rows = like.new_empty(0, like.shape[-1])
        bias = torch.empty(0, device=like.device)
        zeros = torch.zeros(sequences, dtype=torch.int64, device=like.device)
        return cls(rows, rows, bias, zeros, zeros)
