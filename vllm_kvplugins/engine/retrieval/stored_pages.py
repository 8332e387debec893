"""Pages of similar tokens in host memory, each of which is copied as a whole.

The index of a layer gives tokens rows in the order of pages (``row_order``). Tokens are
moved there by the first selection after their segment is complete, since no other
thread reads or writes the host pages of the layer then.
"""

from __future__ import annotations

import torch

from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.indexing import Indexer
from vllm_kvplugins.engine.retrieval.offloaded import Offloaded
from vllm_kvplugins.engine.retrieval.row_order import RowOrder

# Behind all rows, for slots without a host token.
_NO_ROW = 1 << 62


class StoredPages:
    """Moves the tokens of all requests to the rows that their indices give them.

    Attributes:
        moved_tokens: how many tokens were moved, over all layers and KV heads.
    """

    def __init__(self, tier: HostTier, hot_slots: HotSlots, indexer: Indexer) -> None:
        self._tier, self._hot_slots, self._indexer = tier, hot_slots, indexer
        self.moved_tokens = 0

    def arrange(self, state: Offloaded, layer: int) -> None:
        """Move the tokens of a layer that have got a page since the last call.

        Waits for the index, unless it is lazy. A hot slot whose page changes holds no
        page from now on: the selection that follows replaces it.

        Cost: two copies of every moved token; a token is moved once.
        """
        heads = state.pages.shape[1]
        known = state.orders.get(layer, RowOrder.of_arrival(heads))
        added = self._indexer.order(state.layers[layer], len(known))
        if added is None or not added.shape[1]:
            return
        rows = range(len(known), len(known) + added.shape[1])
        self._tier.reorder(state.table(layer), rows, added)
        state.orders[layer] = known.extended(added)
        self._hot_slots.forget_pages(layer, state.slot_index, rows)
        self.moved_tokens += added.numel()

    def whole_pages(
        self,
        state: Offloaded,
        token: torch.Tensor,
        place: torch.Tensor,
        used: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The host pages in hot slots after a compaction.

        Args:
            token: int64 [rows, hot slots], host tokens, over all layers and KV heads.
            place, used: the same shape, where they are, and whether there is one.

        Returns:
            int64 [rows, pages], whole pages first, then -1 for slots with other tokens;
            and ``place`` in the order of pages, the other slots in their own order, in
            which they are mostly next to each other.
        """
        heads, unit = state.pages.shape[1], self._hot_slots.unit_tokens
        row = token.masked_fill(~used, 0)
        for layer, order in state.orders.items():
            first = (layer - self._hot_slots.layers.start) * heads
            here = slice(first, first + heads)
            row[here] = order.rows_of(row[here])
        row, by_row = row.masked_fill(~used, _NO_ROW).sort(1)
        page, inside = row // unit, torch.arange(row.shape[1])
        begins = (row % unit == 0) & (row + unit - 1 == row.roll(1 - unit, 1))
        begins &= inside + unit <= row.shape[1]
        # A slot is in a whole page if one begins at most unit - 1 slots before.
        start = torch.where(begins, inside, -unit).cummax(1).values
        whole = inside - start < unit
        place = place.gather(1, by_row)
        others = (row.shape[1] + place).masked_fill(row == _NO_ROW, _NO_ROW)
        first = torch.where(whole, inside, others).argsort(1)
        pages = page.gather(1, first).where(whole.gather(1, first), -1)
        return pages[:, ::unit], place.gather(1, first)

    def tokens_of(
        self,
        state: Offloaded,
        row: torch.Tensor,
        place: torch.Tensor,
        page: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens in hot slots that hold whole pages, and where these slots are.

        Args:
            row, page: int64 [n], see ``HotSlots.tokens_of``; -1: other tokens.
            place: int64 [n, unit_tokens].

        Returns:
            Three int64 [hot slots]: rows, places and tokens.
        """
        unit, heads = self._hot_slots.unit_tokens, state.pages.shape[1]
        row, place, page = (each[page >= 0] for each in (row, place, page))
        host_row = page[:, None] * unit + torch.arange(unit)
        token = host_row.clone()
        for layer, order in state.orders.items():
            for head in range(heads):
                here = row == (layer - self._hot_slots.layers.start) * heads + head
                own = order.head(head).tokens_at(host_row[here].view(1, -1))
                token[here] = own.view(-1, unit)
        return row.repeat_interleave(unit), place.flatten(), token.flatten()

    def tokens_in(
        self, state: Offloaded, layer: int, pages: torch.Tensor
    ) -> torch.Tensor:
        """The tokens of pages [num_kv_heads, n]: int64 [num_kv_heads, tokens]."""
        assert bool((pages >= 0).all()), "a selection replaces all pages"
        unit = self._hot_slots.unit_tokens
        rows = (pages[..., None] * unit + torch.arange(unit)).flatten(1)
        order = state.orders.get(layer)
        return rows if order is None else order.tokens_at(rows)
