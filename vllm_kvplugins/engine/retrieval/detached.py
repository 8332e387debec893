"""Host tokens of ended requests, for the requests that continue their sessions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.retrieval.device_selector import DeviceSelector
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.indexing import Indexer
from vllm_kvplugins.engine.retrieval.offloaded import Offloaded
from vllm_kvplugins.engine.retrieval.unselected import UnselectedMeans
from vllm_kvplugins.index import PageSelection
from vllm_kvplugins.index.device_codes import FIT_KEYS


class DetachedStates:
    """States without a request. Each is attached to a request or discarded.

    Args:
        device: set if the device selects.
        pages: set if whole pages are fetched.
        means: set if means stand for tokens that are not selected.
    """

    def __init__(
        self,
        heap: Heap,
        tier: HostTier,
        indexer: Indexer,
        device: DeviceSelector | None,
        pages: PageSelection | None,
        means: UnselectedMeans | None = None,
    ) -> None:
        self._shape_of_keys = heap.num_kv_heads, heap.layout.head_dim
        self._tier, self._indexer, self._device = tier, indexer, device
        self._pages, self._means = pages, means
        self._states: list[Offloaded] = []

    def __iter__(self) -> Iterator[Offloaded]:
        return iter(self._states)

    def add(self, state: Offloaded) -> None:
        """The request of a state has ended."""
        self._states.append(state)

    def remove(self, state: Offloaded) -> None:
        """A request takes over a state."""
        self._states.remove(state)

    def discard(self, state: Offloaded) -> None:
        """Free the host pages of a state that no request will take over."""
        self._states.remove(state)
        self._tier.release(state.pages.flatten())

    def continued(self, state: Offloaded, tokens: int, moves: bool) -> Offloaded:
        """The state of a request that continues a session.

        Host pages are shared. Without a move, the last page is copied, because the
        request writes to it. The request takes the indices of the session if it goes on
        with half of its tokens or more; the other side builds new ones when it needs
        them.

        Args:
            state: of the session; freed if it moves.
            tokens: that the request has on the host; at most those of the session.

        Raises:
            RuntimeError: the host tier has no room for copies; nothing has changed.
        """
        if moves and tokens == state.tokens:
            return state
        pages = self._continued_pages(state, tokens, moves)
        new = Offloaded(-1, state.first_layer, pages, tokens)
        shared = self._first_own(state, tokens, moves)
        new.orders = {
            layer: order.first(shared) for layer, order in state.orders.items()
        }
        takes = moves or 2 * tokens >= state.tokens
        for layer, own in state.layers.items():
            fresh = self._indexer.new_layer(*self._shape_of_keys)
            if takes and self._indexer.keep_first(own, tokens):
                new.layers[layer], state.layers[layer] = own, fresh
            else:
                new.layers[layer] = fresh
        if self._device is not None:
            self._device.continue_from(state, new, shared)
        if self._means is not None:
            self._means.continue_from(state, new)
        self.add(new)
        if moves:
            self.discard(state)
        return new

    def _first_own(self, state: Offloaded, tokens: int, moves: bool) -> int:
        """First token of a continued session in pages that the session does not use.

        Args:
            tokens: on the host, of the request.
        """
        if self._device is not None and tokens < FIT_KEYS:
            return 0  # the request measures its own space of codes
        if self._pages is not None:
            # Later tokens are yet to be put in the order of pages, or it is not theirs.
            layers = state.layers
            ordered = min(len(state.orders.get(layer, ())) for layer in layers)
            stop = min(ordered, tokens)
            return stop - stop % self._pages.segment_tokens
        return tokens if moves else tokens - tokens % self._tier.page_tokens

    def _continued_pages(
        self, state: Offloaded, tokens: int, moves: bool
    ) -> torch.Tensor:
        """The pages of a request that continues a session: see ``Offloaded.pages``.

        Raises:
            RuntimeError: the host tier has too few free pages; none was allocated.
        """
        size = self._tier.page_tokens
        num_pages = -(-tokens // size)
        first_own = self._first_own(state, tokens, moves)
        num_shared = -(-first_own // size)
        missing = num_pages - num_shared
        layers, heads = state.pages.shape[:2]
        fresh = self._tier.take(missing * heads * layers).view(layers, heads, missing)
        shared = state.pages[:, :, :num_shared]
        self._tier.share(shared.flatten())
        for layer, new in enumerate(fresh, state.first_layer):
            order = state.orders.get(layer)
            if order is None:
                source = state.table(layer)[:, num_shared:num_pages]
                self._tier.copy_pages(source.flatten(), new.flatten())
            else:
                own = range(first_own, tokens)
                self._tier.copy_tokens(state.table(layer), order, own, new)
        return torch.cat([shared, fresh], 2)
