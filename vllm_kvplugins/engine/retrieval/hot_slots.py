"""The hot slots of one layer and the tokens in them, for all requests that retrieve.

The tensors cover all requests, so that one call serves a whole step. Whoever selects
knows which tokens are in hot slots, and where: the host, or the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvplugins.ops.device import moved

_HOST = torch.device("cpu")


@dataclass(slots=True)
class HotSlots:
    """Hot slots and host pages of one layer, one row (slot index) per request.

    Attributes:
        table: int64 [slot indices, num_kv_heads, host pages], pages of the host
            tier; 0 after a request's last page.
        page, slot: int64 [slot indices, num_kv_heads, width], where the hot slots are
            in the heap; like ``token`` on the device that selects.
        token: int64 [slot indices, num_kv_heads, width], index of the host token in
            the slot.
        place: int64 [slot indices, num_kv_heads, width], their column in the
            retained region's positions.
        counts: int64 [slot indices], how many of ``width`` are in use.
    """

    table: torch.Tensor
    page: torch.Tensor
    slot: torch.Tensor
    token: torch.Tensor
    place: torch.Tensor
    counts: torch.Tensor
    # the last result of tables_of, while it is valid
    _tables: tuple[tuple[int, ...], torch.Tensor] | None = None

    @staticmethod
    def empty(num_kv_heads: int, device: torch.device = _HOST) -> HotSlots:
        """No hot slots.

        Args:
            device: where tokens are selected.
        """

        def nothing(device: torch.device) -> torch.Tensor:
            return torch.zeros(0, num_kv_heads, 0, dtype=torch.int64, device=device)

        return HotSlots(
            nothing(_HOST),
            nothing(device),
            nothing(device),
            nothing(device),
            nothing(_HOST),
            torch.zeros(0, dtype=torch.int64),
        )

    def tables_of(self, slot_indices: tuple[int, ...]) -> torch.Tensor:
        """int64 [len(slot_indices), num_kv_heads, host pages]. Returns the same tensor
        while neither the slot indices nor the pages change, which is most steps."""
        if self._tables is None or self._tables[0] != slot_indices:
            self._tables = slot_indices, self.table[list(slot_indices)]
        return self._tables[1]

    def set_pages(self, slot_index: int, pages: torch.Tensor) -> None:
        """Set a request's host pages, int64 [num_kv_heads, pages]."""
        self.make_room(slot_index + 1, pages=pages.shape[1])
        self.table[slot_index, :, : pages.shape[1]] = pages
        self._tables = None

    def make_room(self, slot_indices: int, pages: int = 0, width: int = 0) -> None:
        """Grow to at least this many slot indices, host pages and hot slots."""
        if slot_indices > len(self.counts):
            grown = self.counts.new_zeros(max(slot_indices, 2 * len(self.counts)))
            grown[: len(self.counts)] = self.counts
            self.counts = grown
        self.table = _grown(self.table, len(self.counts), pages)
        for name in ("page", "slot", "token", "place"):
            setattr(self, name, _grown(getattr(self, name), len(self.counts), width))

    def clear(self, slot_index: int) -> None:
        """Remove the request with this slot index."""
        if slot_index < len(self.counts):
            self.counts[slot_index] = 0
            self.table[slot_index] = 0
            self._tables = None

    def replace(
        self,
        slot_index: int,
        page: torch.Tensor,
        slot: torch.Tensor,
        place: torch.Tensor,
        token: torch.Tensor,
    ) -> None:
        """Replace a request's hot slots, after a compaction.

        Args:
            page, slot, place, token: int64 [num_kv_heads, n], on the host; see the
                attributes.
        """
        count = page.shape[1]
        self.make_room(slot_index + 1, width=count)
        self.counts[slot_index] = count
        self.place[slot_index, :, :count] = place
        rows = moved(torch.stack([page, slot, token]), self.token.device)
        for name, row in zip(("page", "slot", "token"), rows, strict=True):
            getattr(self, name)[slot_index, :, :count] = row

    def hot_tokens(self, slot_index: int) -> torch.Tensor:
        """int64 [num_kv_heads, count], a view, on the device that selects."""
        return self.token[slot_index, :, : int(self.counts[slot_index])]


def _grown(tensor: torch.Tensor, slot_indices: int, width: int) -> torch.Tensor:
    """A copy that is large enough, with a quarter more width for the next time."""
    have, heads, wide = tensor.shape
    if slot_indices <= have and width <= wide:
        return tensor
    wider = wide if width <= wide else width + width // 4
    grown = tensor.new_zeros(max(slot_indices, have), heads, wider)
    grown[:have, :, :wide] = tensor
    return grown
