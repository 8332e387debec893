"""The n-th new token of each row of a step, which attends by itself.

A row has several new tokens when it verifies drafts, and when it is recomputed after a
preemption. What each of them attends to may depend on its own query, so an extension
lets them attend one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.ops.device import on_device


@dataclass(slots=True, eq=False)
class NthTokens:
    """One new token of some rows; the same in all layers of a step.

    Attributes:
        num_kv_heads: of a layer.
        queries: int64 [rows], indices of the step's queries.
        rows: int64 [rows], indices of the step's rows.
        newer: int32 [rows], number of the row's tokens after this one.
        has_newer: whether one of these numbers is not zero.
    """

    num_kv_heads: int
    queries: torch.Tensor
    rows: torch.Tensor
    newer: torch.Tensor
    has_newer: bool = True
    _cached_for: torch.Tensor | None = None
    _cached: tuple[torch.Tensor, torch.Tensor] | None = None

    def tables(
        self, pages: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Page lists and lengths of these tokens; selected once if layers share them.

        Args:
            pages: int32 [step rows * num_kv_heads, max pages].
            lengths: int32 [step rows * num_kv_heads], after the step.

        Returns:
            int32 [rows * num_kv_heads, max pages] and [rows * num_kv_heads]. The
            lengths exclude newer tokens of the step.
        """
        if not self.has_newer and len(pages) == len(self.rows) * self.num_kv_heads:
            return pages, lengths  # all rows of the step, which are in order
        if self._cached is None or self._cached_for is not pages:
            own = pages.unflatten(0, (-1, self.num_kv_heads))[self.rows].flatten(0, 1)
            after = lengths.view(-1, self.num_kv_heads)[self.rows]
            seen = (after - self.newer[:, None]).flatten().int()
            self._cached_for, self._cached = pages, (own, seen)
        return self._cached


def rounds_of(
    rows: Sequence[tuple[int, Row]], num_kv_heads: int, device: torch.device
) -> list[tuple[NthTokens, list[Row]]]:
    """List the first new token of all rows, then the second of those that have one,
    and so on.

    Args:
        rows: indices among the step's rows, and the rows.

    Returns:
        The tokens of each round, and their rows.
    """
    rounds = []
    for number in range(max((row.new_tokens for _, row in rows), default=0)):
        active = [(i, row) for i, row in rows if row.new_tokens > number]
        newer = [row.new_tokens - 1 - number for _, row in active]
        tokens = NthTokens(
            num_kv_heads,
            on_device([row.first_query + number for _, row in active], device),
            on_device([index for index, _ in active], device),
            on_device(newer, device).int(),
            any(newer),
        )
        rounds.append((tokens, [row for _, row in active]))
    return rounds
