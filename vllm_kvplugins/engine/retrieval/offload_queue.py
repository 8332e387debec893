"""Queue of tokens that are being copied from the cache into the host tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.device import AsyncHostCopy


@dataclass(slots=True, eq=False)
class PendingOffload:
    """Tokens of one layer of a request.

    Attributes:
        first: index of the first one among the request's host tokens.
        keys, values: [num_kv_heads, n, head_dim].
        device_keys: the keys on their device, if it selects.
    """

    state: Offloaded
    layer: int
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
        hot_slots: Mapping[int, HotSlots],
        indexer: Indexer,
        device: DeviceSelector | None = None,
    ) -> None:
        self._heap, self._tier = heap, tier
        self._hot_slots, self._indexer = hot_slots, indexer
        self._device = device
        self._pending: list[PendingOffload] = []

    def send(
        self, state: Offloaded, layer: int, owned: PageList, start: int, stop: int
    ) -> None:
        """Start to copy a layer's tokens, after those that the request has on the host.

        Args:
            owned: the request's pages.
            start, stop: positions; the cache must hold all of them.
        """
        self.drain(except_layer=layer)
        keys, values = read_tokens(self._heap, layer, owned, start, stop)
        self._pending.append(
            PendingOffload(
                state,
                layer,
                state.tokens,
                AsyncHostCopy(keys),
                AsyncHostCopy(values),
                keys if self._device is not None else None,
            )
        )
        if not keys.is_cuda:
            self.drain()

    def drain(self, except_layer: int | None = None) -> None:
        """Store the tokens whose copies are pending, and start to index them.

        Args:
            except_layer: leave the copies of this layer pending.
        """
        for each in self._pending:
            if each.layer == except_layer:
                continue
            keys, values = each.keys.wait(), each.values.wait()
            self._make_room(each.state, each.layer, each.first + keys.shape[1])
            pages = each.state.pages[each.layer]
            self._tier.write(pages, each.first, keys, values)
            if self._device is not None and each.device_keys is not None:
                self._device.append(
                    each.state, each.layer, each.first, each.device_keys
                )
            layer = each.state.layers.get(each.layer)
            if layer is None:
                continue
            tokens = range(layer.tokens, each.first + keys.shape[1])
            read: Callable[[], torch.Tensor] = partial(_same, keys)
            on_host = self._tier.converts or each.keys.event is not None
            if on_host or layer.tokens < each.first:
                # The index has the keys of the host tier, also if they are quantized.
                # They are read later, to free pinned memory. An index without earlier
                # tokens gets them all at once, as if nobody had taken it back.
                read = partial(self._tier.read_keys, pages, tokens)
            self._indexer.insert(layer, tokens, read)
        self._pending = [each for each in self._pending if each.layer == except_layer]

    def _make_room(self, state: Offloaded, layer: int, tokens: int) -> None:
        """Allocate host pages until the layer's pages hold this many tokens."""
        have, size = state.pages[layer], self._tier.page_tokens
        more = -(-tokens // size) - have.shape[1]
        if more <= 0:
            return
        fresh = self._tier.take(more * len(have)).view(len(have), more)
        pages = state.pages[layer] = torch.cat([have, fresh], 1)
        self._hot_slots[layer].set_pages(state.slot_index, pages)


def _same(keys: torch.Tensor) -> torch.Tensor:
    return keys


def read_tokens(
    heap: Heap, layer: int, owned: PageList, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer of a request, in order of position.

    Args:
        owned: the request's pages.
        start, stop: positions; the cache must hold all of them.

    Returns:
        Two [num_kv_heads, stop - start, head_dim].
    """
    heads, size = heap.num_kv_heads, heap.layout.block_size
    rows = slice(layer * heads, (layer + 1) * heads)
    positions = owned.positions[rows]
    place = torch.arange(positions.shape[1], device=positions.device)
    used = place < owned.owned[rows, None] * size
    row, place = ((positions >= start) & (positions < stop) & used).nonzero(
        as_tuple=True
    )
    assert row.numel() == heads * (stop - start), "tokens to offload are missing"
    place = place.view(heads, -1)
    place = place.gather(1, positions.gather(1, place).argsort(1))
    page = owned.pages[rows].gather(1, place // size)
    keys, values = ops.gather_tokens(heap.kv, page.flatten(), (place % size).flatten())
    return keys.view(heads, stop - start, -1), values.view(heads, stop - start, -1)
