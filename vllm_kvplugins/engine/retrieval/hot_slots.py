"""Who has which hot slots: one layer, all requests that retrieve.

Kept in tensors over all requests, so that a step serves them in one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class HotSlots:
    """Hot slots and host pages of one layer, a row (seat) per request.

    Attributes:
        table: int64 [seats, num_kv_heads, host pages], pages of the host tier; 0
            behind a request's last.
        page, slot: int64 [seats, num_kv_heads, width], where hot slots are in the
            heap.
        token: int64 [seats, num_kv_heads, width], number of the host token there.
        place: int64 [seats, num_kv_heads, width], their place in the retained region's
            rows of positions.
        counts: int64 [seats], how many of ``width`` there are.
    """

    table: torch.Tensor
    page: torch.Tensor
    slot: torch.Tensor
    token: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    # the last answer of tables_of, while it holds
    _tables: tuple[tuple[int, ...], torch.Tensor] | None = None

    @staticmethod
    def empty(num_kv_heads: int) -> HotSlots:
        def nothing() -> torch.Tensor:
            return torch.zeros(0, num_kv_heads, 0, dtype=torch.int64)

        return HotSlots(
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            nothing(),
            torch.zeros(0, dtype=torch.int64),
        )

    def tables_of(self, slot_indices: tuple[int, ...]) -> torch.Tensor:
        """int64 [len(seats), num_kv_heads, host pages]; the same tensor again while
        neither seats nor pages change, which is for most steps."""
        if self._tables is None or self._tables[0] != slot_indices:
            self._tables = slot_indices, self.table[list(slot_indices)]
        return self._tables[1]

    def add_pages(self, slot_index: int, pages: torch.Tensor) -> None:
        """A request has so many host pages now, int64 [num_kv_heads, pages]."""
        self.make_room(slot_index + 1, pages=pages.shape[1])
        self.table[slot_index, :, : pages.shape[1]] = pages
        self._tables = None

    def make_room(self, slot_indices: int, pages: int = 0, width: int = 0) -> None:
        """Grow to at least so many seats, host pages and hot slots."""
        if slot_indices > len(self.counts):
            grown = self.counts.new_zeros(max(slot_indices, 2 * len(self.counts)))
            grown[: len(self.counts)] = self.counts
            self.counts = grown
        self.table = _grown(self.table, len(self.counts), pages)
        for name in ("page", "slot", "token", "place"):
            setattr(self, name, _grown(getattr(self, name), len(self.counts), width))

    def leave(self, slot_index: int) -> None:
        """The request of this seat has gone."""
        if slot_index < len(self.counts):
            self.counts[slot_index] = 0
            self.table[slot_index] = 0
            self._tables = None

    def settle(
        self,
        slot_index: int,
        page: torch.Tensor,
        slot: torch.Tensor,
        place: torch.Tensor,
        token: torch.Tensor,
    ) -> None:
        """A compaction has laid out a request's hot slots anew.

        Args:
            page, slot, place, token: int64 [num_kv_heads, n], as the attributes.
        """
        count = page.shape[1]
        self.make_room(slot_index + 1, width=count)
        self.counts[slot_index] = count
        self.page[slot_index, :, :count] = page
        self.slot[slot_index, :, :count] = slot
        self.place[slot_index, :, :count] = place
        self.token[slot_index, :, :count] = token

    def hot_tokens(self, slot_index: int) -> torch.Tensor:
        """int64 [num_kv_heads, count], a view."""
        return self.token[slot_index, :, : int(self.counts[slot_index])]


def _grown(tensor: torch.Tensor, slot_indices: int, width: int) -> torch.Tensor:
    """With room for so many; a quarter more than asked for, for the next time."""
    have, heads, wide = tensor.shape
    if slot_indices <= have and width <= wide:
        return tensor
    wider = wide if width <= wide else width + width // 4
    grown = tensor.new_zeros(max(slot_indices, have), heads, wider)
    grown[:have, :, :wide] = tensor
    return grown
