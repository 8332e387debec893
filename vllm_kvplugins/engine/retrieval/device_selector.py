"""Selection on the device: codes, votes and fetches without the host.

Where the host selects, a decode step stops in each layer: the queries are copied to the
host, the host waits for them, searches, and sends the tokens or their places back. Here
it only starts kernels::

    offload ── keys ──> codes, in pages numbered as the host pages
    every step ── query ──> votes ──> hot tokens to replace ──> rows of host memory
                  on the device, with shapes that the host knows before the step

The host still writes what it alone decides: page tables, lengths and hot slots, which
change in compactions only. One small copy per step and batch carries them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.offloaded import Batch, Offloaded, OnDevice
from vllm_kvplugins.index.device_codes import FIT_KEYS, CodeSpace, CodeStore
from vllm_kvplugins.ops.code_select import (
    HostRequests,
    HotTokens,
    code_votes,
    fetch_rows,
    swap_tokens,
)
from vllm_kvplugins.ops.device import moved


class DeviceSelector:
    """The codes of all requests on one worker, and what selects by them.

    Args:
        store: the codes of all host pages.
        hot_slots: with their tokens on the heap's device.
        selecting: the layers that select; the others reuse a selection.
    """

    def __init__(
        self,
        store: CodeStore,
        heap: Heap,
        tier: HostTier,
        hot_slots: HotSlots,
        selecting: Iterable[int],
    ) -> None:
        self._store, self._heap, self._tier = store, heap, tier
        self._hot_slots = hot_slots
        self._device = heap.pages.device
        shape = 0, heap.num_kv_heads, heap.layout.head_dim
        # Per layer, float32 [slot indices, num_kv_heads, head_dim].
        self._widths = {
            layer: torch.ones(shape, device=self._device) for layer in selecting
        }
        # Per layer: a page table on the host, and its copy on the device.
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Device memory of codes, scales and widths."""
        widths = sum(int(each.nbytes) for each in self._widths.values())
        return self._store.num_bytes + widths

    def bytes_of(self, state: Offloaded) -> int:
        """Device memory of the codes of a request."""
        pages = sum(state.table(layer).numel() for layer in state.spaces)
        return int(pages * self._store.page_bytes)

    def append(
        self, state: Offloaded, layer: int, first: int, keys: torch.Tensor
    ) -> None:
        """Store the codes of tokens that are in the host tier now.

        Args:
            first: number of the first one among the request's host tokens.
            keys: [num_kv_heads, n, head_dim], on the device.
        """
        if layer not in self._widths:
            return
        pages, space = state.table(layer), state.spaces.get(layer)
        if space is None or not space.is_fit:
            heads, count, dim = keys.shape
            if first + count >= FIT_KEYS:
                if first:
                    earlier = self._tier.read_keys(pages, range(first))
                    keys = torch.cat([moved(earlier, self._device), keys], 1)
                first, space = 0, CodeSpace.fit(keys[:, :FIT_KEYS])
            elif space is None:
                space = CodeSpace.plain(heads, dim, self._device)
            state.spaces[layer] = space
            self._set_width(layer, state.slot_index, space)
        self._store.put(moved(pages, self._device), first, keys, space)

    def continue_from(self, state: Offloaded, new: Offloaded, first_own: int) -> None:
        """Give codes to the request that continues a session.

        Args:
            state: of the session.
            new: of the request, without a slot index.
            first_own: its first token in pages that the session does not use.
        """
        for layer, space in state.spaces.items():
            pages = new.table(layer)
            if space.is_fit and new.tokens < FIT_KEYS:
                heads = self._heap.num_kv_heads, self._heap.layout.head_dim
                space = CodeSpace.plain(*heads, self._device)
            new.spaces[layer] = space
            if first_own < new.tokens:
                keys = self._tier.read_keys(pages, range(first_own, new.tokens))
                on_device = moved(keys, self._device), moved(pages, self._device)
                self._store.put(on_device[1], first_own, on_device[0], space)

    def attach(self, state: Offloaded) -> None:
        """A request with codes got its slot index."""
        for layer, space in state.spaces.items():
            self._set_width(layer, state.slot_index, space)

    def _set_width(self, layer: int, slot_index: int, space: CodeSpace) -> None:
        widths = self._widths[layer]
        if slot_index >= len(widths):
            grown = widths.new_ones(2 * slot_index + 1, *widths.shape[1:])
            grown[: len(widths)] = widths
            self._widths[layer] = widths = grown
        widths[slot_index] = space.width

    def begin(self, batch: Batch) -> None:
        """Send what the host knows of a batch to the device, in one copy."""
        states, layers = batch.states, range(self._heap.num_layers)
        lengths = [state.tokens for state in states]
        counts = [[state.hot.get(layer, 0) for state in states] for layer in layers]
        numbers = torch.tensor([batch.slot_numbers, lengths, *counts])
        numbers = moved(numbers, self._device)
        batch.on_device = OnDevice(
            slot_indices=numbers[0],
            lengths=numbers[1],
            counts=numbers[2:],
            num_tokens=max(lengths),
            widths=[max(each) for each in counts],
        )

    def retrieve(
        self, batch: Batch, layer: int, queries: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Select and fetch the tokens of a batch in one layer. The host does not wait.

        Args:
            queries: [step tokens, num_q_heads, head_dim].
            scale: softmax scale.

        Returns:
            int64 [requests, num_kv_heads] on the device, tokens that are fetched.
        """
        here, hot = batch.on_device, self._hot_slots.hot_set(layer)
        assert here is not None, "begin has not run"
        host = HostRequests(
            self._table(layer, batch.slot_numbers, here.num_tokens), here.lengths
        )
        if layer in self._widths:
            here.votes = code_votes(
                batch.selecting(queries, self._heap.num_kv_heads),
                self._widths[layer].index_select(0, here.slot_indices),
                self._store.keys,
                host,
                scale,
            )
        assert here.votes is not None, "the first layer that retrieves selects"
        width = here.widths[layer]
        rows, fetched = swap_tokens(
            here.votes,
            self._tier.page_tokens,
            host,
            HotTokens(hot.token, here.slot_indices, here.counts[layer], width),
        )
        fetch_rows(
            self._heap.kv,
            self._tier.pages,
            rows,
            hot.page[:, :, :width].index_select(0, here.slot_indices),
            hot.slot[:, :, :width].index_select(0, here.slot_indices),
        )
        if self._tier.reads is not None:
            self._tier.reads.note()
        return fetched

    def _table(
        self, layer: int, slot_numbers: Sequence[int], num_tokens: int
    ) -> torch.Tensor:
        """int64 [requests, num_kv_heads, pages] on the device: pages of the host tier.

        Copied only when requests come, go or get pages, which is rare.
        """
        listed = self._hot_slots.tables_of(layer, tuple(slot_numbers))
        known = self._tables.get(layer)
        pages = -(-num_tokens // self._tier.page_tokens)
        if known is None or known[0] is not listed or known[1].shape[2] != pages:
            own = listed[:, :, :pages].contiguous()
            known = self._tables[layer] = listed, moved(own, self._device)
        return known[1]
