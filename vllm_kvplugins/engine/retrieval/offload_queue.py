"""Queue of tokens that are being copied from the cache into the host tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import PageList
from vllm_kvplugins.engine.retrieval.device_selector import DeviceSelector
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.indexing import Indexer
from vllm_kvplugins.engine.retrieval.offloaded import Offloaded
from vllm_kvplugins.engine.retrieval.unselected import UnselectedMeans
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.device import AsyncHostCopy


@dataclass(frozen=True, slots=True, eq=False)
class LeavingTokens:
    """Tokens that a compaction at the end of the step moves to the host.

    Attributes:
        owned: the request's pages before the compaction.
        positions: those of the tokens; the cache holds all of them.
        at_once: whether they leave all layers at once, at the end of the step. That is
            cheaper for the few tokens of a block that was generated. Those of a prompt
            leave a layer when it has attended, while later layers compute.
    """

    request_id: str
    owned: PageList
    positions: range
    at_once: bool


@dataclass(slots=True, eq=False)
class PendingOffload:
    """Tokens of some layers of a request.

    Attributes:
        first: index of the first one among the request's host tokens.
        keys, values: [layers * num_kv_heads, n, head_dim].
        device_keys: the keys on their device, if it selects.
    """

    state: Offloaded
    layers: range
    first: int
    keys: AsyncHostCopy
    values: AsyncHostCopy
    device_keys: torch.Tensor | None


class OffloadQueue:
    """Copies tokens to the host tier and starts to index them, or stores their codes.

    On a GPU, a layer's tokens are stored one layer later, while the GPU computes that
    layer (IceCache, figure 5b).
    """

    def __init__(
        self,
        heap: Heap,
        tier: HostTier,
        hot_slots: HotSlots,
        indexer: Indexer,
        device: DeviceSelector | None = None,
        means: UnselectedMeans | None = None,
    ) -> None:
        self._heap, self._tier = heap, tier
        self._hot_slots, self._indexer = hot_slots, indexer
        self._device, self._means = device, means
        self._pending: list[PendingOffload] = []

    def send(
        self, state: Offloaded, layers: range, owned: PageList, positions: range
    ) -> None:
        """Start to copy tokens, after those that the request has on the host.

        Args:
            owned: the request's pages.
            positions: of the tokens; the cache must hold all of them.
        """
        self.drain(except_layers=layers)
        keys, values = read_tokens(self._heap, layers, owned, positions)
        if self._means is not None:
            self._means.append(state, layers, state.tokens, keys, values)
        self._pending.append(
            PendingOffload(
                state,
                layers,
                state.tokens,
                AsyncHostCopy(keys),
                AsyncHostCopy(values),
                keys if self._device is not None else None,
            )
        )
        if not keys.is_cuda:
            self.drain()

    def drain(self, except_layers: range | None = None) -> None:
        """Store the tokens whose copies are pending, and start to index them.

        Args:
            except_layers: leave the copies of these layers pending.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            if each.layers == except_layers:
                self._pending.append(each)
            else:
                self._store(each)

    def _store(self, each: PendingOffload) -> None:
        state, keys = each.state, each.keys.wait()
        stop = each.first + keys.shape[1]
        self._make_room(state, stop)
        self._tier.write(
            state.tables(each.layers), each.first, keys, each.values.wait()
        )
        by_layer = keys.unflatten(0, (len(each.layers), -1))
        for layer, own in zip(each.layers, by_layer, strict=True):
            if layer in state.layers:
                self._index(each, layer, own)
        if self._device is not None and each.device_keys is not None:
            by_layer = each.device_keys.unflatten(0, (len(each.layers), -1))
            for layer, own in zip(each.layers, by_layer, strict=True):
                self._device.append(state, layer, each.first, own)

    def _index(self, each: PendingOffload, layer: int, keys: torch.Tensor) -> None:
        """Start to index the stored tokens of one layer.

        Args:
            keys: [num_kv_heads, n, head_dim].
        """
        indexed = each.state.layers[layer]
        tokens = range(indexed.tokens, each.first + keys.shape[1])
        read: Callable[[], torch.Tensor] = partial(_same, keys)
        on_host = self._tier.converts or each.keys.event is not None
        if on_host or indexed.tokens < each.first:
            # The index has the keys of the host tier, also if they are quantized.
            # They are read later, to free pinned memory. An index without earlier
            # tokens gets them all at once, as if nobody had taken it back.
            state = each.state
            order = state.orders.get(layer)
            read = partial(self._tier.read_keys, state.table(layer), tokens, order)
        self._indexer.insert(indexed, tokens, read)

    def _make_room(self, state: Offloaded, tokens: int) -> None:
        """Allocate host pages until those of all layers hold this many tokens."""
        layers, heads, have = state.pages.shape
        more = -(-tokens // self._tier.page_tokens) - have
        if more <= 0:
            return
        fresh = self._tier.take(layers * heads * more).view(layers, heads, more)
        state.pages = torch.cat([state.pages, fresh], 2)
        self._hot_slots.set_pages(state.slot_index, state.pages)


def _same(keys: torch.Tensor) -> torch.Tensor:
    return keys


def read_tokens(
    heap: Heap, layers: range, owned: PageList, positions: range
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some layers of a request, in order of position.

    Args:
        owned: the request's pages.
        positions: of the tokens; the cache must hold all of them.

    Returns:
        Two [layers * num_kv_heads, tokens, head_dim].
    """
    heads, size = heap.num_kv_heads, heap.layout.block_size
    rows = slice(layers.start * heads, layers.stop * heads)
    # Other layers may keep all of a long context, and have longer rows.
    width = int(owned.owned[rows].max()) * size
    held = owned.positions[rows, :width]
    place = torch.arange(held.shape[1], device=held.device)
    used = place < owned.owned[rows, None] * size
    row, place = ((held >= positions.start) & (held < positions.stop) & used).nonzero(
        as_tuple=True
    )
    shape = len(held), len(positions)
    assert row.numel() == len(held) * len(positions), "tokens to offload are missing"
    place = place.view(shape)
    place = place.gather(1, held.gather(1, place).argsort(1))
    page = owned.pages[rows].gather(1, place // size)
    keys, values = ops.gather_tokens(heap.kv, page.flatten(), (place % size).flatten())
    return keys.view(*shape, -1), values.view(*shape, -1)
