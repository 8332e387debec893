"""The hot slots and the tokens in them, for all requests that retrieve.

The tensors cover all layers, so that a compaction writes them at once, and all
requests, so that one call serves a whole step in a layer. Whoever selects knows which
tokens are in hot slots, and where: the host, or the device.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.hot_set import HotSet

_HOST = torch.device("cpu")


class HotSlots:
    """Hot slots and host pages per layer, one row (slot index) per request.

    ``hot_set(layer)`` is a view of one layer, for ``fill_hot``.

    A policy that fetches whole pages has one ``token`` for ``unit_tokens`` hot slots:
    the page of host memory that they hold, or -1 if they hold other tokens.

    Args:
        layers: the layers that offload.
        device: where tokens are selected.
        unit_tokens: hot slots per ``token``.

    Attributes:
        table: int64 [layers, slot indices, num_kv_heads, host pages], pages of the host
            tier; 0 after a request's last page. On the host.
        page, slot: int64 [layers, slot indices, num_kv_heads, width * unit_tokens],
            where the hot slots are in the heap; on the device that selects.
        token: int64 [layers, slot indices, num_kv_heads, width], index of the host
            token, or page, in the slots; on the same device.
        place: the shape of ``page``, on the host: the column of each hot slot in the
            retained region's positions.
        counts: int64 [layers, slot indices], how many of ``width`` are in use. On the
            host.
    """

    def __init__(
        self,
        layers: range,
        num_kv_heads: int,
        device: torch.device = _HOST,
        unit_tokens: int = 1,
    ) -> None:
        self.layers, self.unit_tokens = layers, unit_tokens

        def nothing(device: torch.device) -> torch.Tensor:
            shape = len(layers), 0, num_kv_heads, 0
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.table, self.place = nothing(_HOST), nothing(_HOST)
        self.page, self.slot = nothing(device), nothing(device)
        self.token = nothing(device)
        self.counts = torch.zeros(len(layers), 0, dtype=torch.int64)
        self._sets: list[HotSet] = []
        # The last result of tables_of per layer, while it is valid.
        self._tables: tuple[tuple[int, ...], list[torch.Tensor]] | None = None

    def __contains__(self, layer: int) -> bool:
        return layer in self.layers

    def hot_set(self, layer: int) -> HotSet:
        """The hot slots of a layer; its tensors are views."""
        if not self._sets:
            self._sets = [
                HotSet(*tensors)
                for tensors in zip(
                    self.token, self.page, self.slot, self.counts, strict=True
                )
            ]
        return self._sets[layer - self.layers.start]

    def tables_of(self, layer: int, slot_indices: tuple[int, ...]) -> torch.Tensor:
        """int64 [len(slot_indices), num_kv_heads, host pages]. Returns the same tensor
        while neither the slot indices nor the pages change, which is most steps."""
        if self._tables is None or self._tables[0] != slot_indices:
            tables = self.table[:, list(slot_indices)]
            self._tables = slot_indices, list(tables)
        return self._tables[1][layer - self.layers.start]

    def set_pages(self, slot_index: int, pages: torch.Tensor) -> None:
        """Set a request's host pages, int64 [layers, num_kv_heads, pages]."""
        self.make_room(slot_index + 1, pages=pages.shape[2])
        self.table[:, slot_index, :, : pages.shape[2]] = pages
        self._tables = None

    def make_room(self, slot_indices: int, pages: int = 0, width: int = 0) -> None:
        """Grow to at least this many slot indices, host pages and hot slots."""
        have = self.counts.shape[1]
        if slot_indices > have:
            grown = self.counts.new_zeros(len(self.counts), max(slot_indices, 2 * have))
            grown[:, :have] = self.counts
            self.counts = grown
        slot_indices = self.counts.shape[1]
        self.table = _grown(self.table, slot_indices, pages)
        self.token = _grown(self.token, slot_indices, width)
        slots = self.token.shape[3] * self.unit_tokens
        for name in ("page", "slot", "place"):
            tensor = getattr(self, name)
            setattr(self, name, _grown(tensor, slot_indices, slots, spare=False))
        self._sets = []

    def clear(self, slot_index: int) -> None:
        """Remove the request with this slot index."""
        if slot_index < self.counts.shape[1]:
            self.counts[:, slot_index] = 0
            self.table[:, slot_index] = 0
            self._tables = None

    def replace(
        self,
        slot_index: int,
        counts: torch.Tensor,
        page: torch.Tensor,
        slot: torch.Tensor,
        place: torch.Tensor,
        token: torch.Tensor,
    ) -> None:
        """Replace a request's hot slots, after a compaction.

        Args:
            counts: int64 [layers].
            page, slot, place, token: int64 [layers, num_kv_heads, n], on the host; see
                the attributes. Anything after a layer's count.
        """
        width, slots = token.shape[2], page.shape[2]
        self.make_room(slot_index + 1, width=width)
        self.counts[:, slot_index] = counts
        self.place[:, slot_index, :, :slots] = place
        rows = moved(torch.cat([page, slot, token], 2), self.token.device)
        page, slot, token = rows.split([slots, slots, width], 2)
        self.page[:, slot_index, :, :slots] = page
        self.slot[:, slot_index, :, :slots] = slot
        self.token[:, slot_index, :, :width] = token

    def forget_pages(self, layer: int, slot_index: int, rows: range) -> None:
        """Note that the host pages with these rows have other tokens from now on."""
        pages = self.hot_units(layer, slot_index)
        first, stop = rows.start // self.unit_tokens, rows.stop // self.unit_tokens
        pages[(pages >= first) & (pages < stop)] = -1

    def hot_units(self, layer: int, slot_index: int) -> torch.Tensor:
        """int64 [num_kv_heads, count], tokens or pages, a view, on the device that
        selects."""
        at = layer - self.layers.start
        return self.token[at, slot_index, :, : int(self.counts[at, slot_index])]

    def hot_places(self, layer: int, slot_index: int) -> torch.Tensor:
        """int64 [num_kv_heads, hot slots], on the host; see ``place``."""
        at = layer - self.layers.start
        slots = int(self.counts[at, slot_index]) * self.unit_tokens
        return self.place[at, slot_index, :, :slots]

    def tokens_of(
        self, slot_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The hot slots of a request.

        Returns:
            Three int64 [hot slots * num_kv_heads]: rows, counted over layers and KV
            heads, places, both on the host, and tokens, on the device that selects. For
            whole pages one row and token each, and int64 [n, unit_tokens] places.
        """
        width = torch.arange(self.token.shape[3])
        used = width < self.counts[:, slot_index, None]
        layer, column = used.nonzero(as_tuple=True)
        heads, unit = self.place.shape[2], self.unit_tokens
        row = layer[:, None] * heads + torch.arange(heads)
        places = self.place[:, slot_index].unflatten(2, (-1, unit))
        place = places[layer, :, column]
        layer, column = moved(torch.stack([layer, column]), self.token.device)
        token = self.token[:, slot_index][layer, :, column]
        place = place.flatten() if unit == 1 else place.flatten(0, 1)
        return row.flatten(), place, token.flatten()


def _grown(
    tensor: torch.Tensor, slot_indices: int, width: int, spare: bool = True
) -> torch.Tensor:
    """A copy that is large enough, if spare with a quarter more width for later."""
    layers, have, heads, wide = tensor.shape
    if slot_indices <= have and width <= wide:
        return tensor
    wider = wide if width <= wide else width + width // 4 * spare
    grown = tensor.new_zeros(layers, max(slot_indices, have), heads, wider)
    grown[:, :have, :, :wide] = tensor
    return grown
