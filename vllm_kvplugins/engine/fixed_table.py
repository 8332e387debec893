"""Page lists at addresses that stay, for CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FlatTable:
    """Page table of one step.

    Attributes:
        pages: int32 [scopes, rows * kv_heads, most_pages]. One scope: the ids
            are relative to any layer's own pages and hold for all layers.
            Else one scope per layer, ids count pages of the whole heap.
        lengths: int32 [scopes, rows * kv_heads], tokens to attend to.
        seats: per row.
        known_lens: per row, logical tokens; None = not known on the host.
    """

    pages: torch.Tensor
    lengths: torch.Tensor
    slot_indices: Sequence[int]
    known_lens: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TableShape:
    """Of a table that holds any decoding step.

    Attributes:
        scopes: as in :class:`FlatTable`.
        rows: most requests of a step.
        heads: KV heads per layer.
        pages: most pages of any KV head of a request.
    """

    scopes: int
    rows: int
    heads: int
    pages: int

    @property
    def num_bytes(self) -> int:
        """Of pages and lengths."""
        return 4 * self.scopes * self.rows * self.heads * (self.pages + 1)


class FixedTable:
    """A page table that steps are written into, one after the other.

    A graph that was captured with so many rows reads them at the same place whenever
    it is replayed. What a step does not use keeps what an earlier one wrote there:
    nobody reads a list beyond its length, and rows without a request have length 0.
    """

    def __init__(self, shape: TableShape, device: torch.device) -> None:
        self.shape = shape
        sequences = shape.scopes, shape.rows * shape.heads
        self._pages = torch.zeros(
            *sequences, shape.pages, dtype=torch.int32, device=device
        )
        self._lengths = torch.zeros(*sequences, dtype=torch.int32, device=device)

    def room(
        self,
        rows: int,
        most: int,
        slot_indices: Sequence[int],
        known_lens: Sequence[int] | None,
    ) -> FlatTable:
        """Where a step is written.

        Args:
            rows: requests of the step, padding included.
            most: pages of its longest row; what lies behind stays as it is.
            seats, known_lens: as in :class:`FlatTable`.

        Returns:
            Views of this table, with room for its most pages.

        Cost: none; nothing is written.
        """
        shape = self.shape
        assert rows <= shape.rows, f"{rows} rows, room for {shape.rows}"
        assert most <= shape.pages, f"{most} pages, room for {shape.pages}"
        used = rows * shape.heads
        return FlatTable(
            self._pages[:, :used], self._lengths[:, :used], slot_indices, known_lens
        )
