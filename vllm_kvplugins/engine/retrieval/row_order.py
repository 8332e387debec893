"""Host tokens in the order of an index, whose pages are fetched as a whole.

Without it, row r of a KV head in host memory holds token r. An index of pages
(:class:`~vllm_kvplugins.index.base.PageIndex`) gives similar tokens neighboring rows,
one segment after the other::

    rows    [ segment 0: pages | segment 1: pages | tokens that have no page yet ]
                 tokens 9, 4, ..   tokens 530, ..     in the order of arrival

A token moves once, when its segment is complete, from its row of arrival to another row
of the same segment. So a segment holds the same tokens before and after.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class RowOrder:
    """Where the tokens of one layer of a request are.

    Rows behind those that it knows hold the token of the same number.

    Attributes:
        tokens: int32 [num_kv_heads, n], the tokens of the first n rows; a permutation
            of the first n tokens.
        rows: int32 [num_kv_heads, n], the rows of the first n tokens.
    """

    tokens: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of_arrival(cls, num_kv_heads: int) -> RowOrder:
        """All tokens in the order of arrival."""
        nothing = torch.empty(num_kv_heads, 0, dtype=torch.int32)
        return cls(nothing, nothing)

    def __len__(self) -> int:
        """Rows that are in the order of pages."""
        return int(self.tokens.shape[1])

    def tokens_at(self, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of some rows, int64 [num_kv_heads, n] like ``rows``."""
        return self._mapped(self.tokens, rows)

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of some tokens: int64 [num_kv_heads, n] of [n], or of the same
        shape."""
        return self._mapped(self.rows, tokens.expand(len(self.rows), -1))

    def _mapped(self, order: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        if not len(self):
            return given
        here = order.gather(1, given.clamp(max=len(self) - 1)).long()
        return here.where(given < len(self), given)

    def head(self, head: int) -> RowOrder:
        """That of one KV head."""
        own = slice(head, head + 1)
        return RowOrder(self.tokens[own], self.rows[own])

    def first(self, rows: int) -> RowOrder:
        """The order if only this many rows are in the order of pages: whole segments,
        or all of them."""
        if rows >= len(self):
            return self
        return RowOrder(self.tokens[:, :rows], self.rows[:, :rows])

    def extended(self, tokens: torch.Tensor) -> RowOrder:
        """The order with the tokens of the next rows.

        Args:
            tokens: int64 [num_kv_heads, n], a permutation of the next n tokens.
        """
        first, count = len(self), tokens.shape[1]
        added = torch.arange(first, first + count, dtype=torch.int32)
        rows = torch.empty(tokens.shape, dtype=torch.int32)
        rows.scatter_(1, tokens - first, added.expand_as(rows))
        return RowOrder(
            torch.cat([self.tokens, tokens.int()], 1), torch.cat([self.rows, rows], 1)
        )
