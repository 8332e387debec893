"""Retrieval: fills the hot zone with the tokens that a query asks for.

One request, one layer::

    compaction ── tokens older than the window ──> host tier, index
    every step ── query ──> index.select ──> which of them are not resident?
                             copy those over the hot slots of tokens not asked for

Only contents change: page tables and lengths stay as the compaction left them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.policies.retrieval import ExactScan, Retriever, TokenIndex
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.host_tier import HostLayer
from vllm_kvplugins.residency.requests import PageList

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")


@dataclass(slots=True)
class HotZone:
    """Slots of one request and layer that hold fetched tokens.

    Attributes:
        page, slot: int64 [num_kv_heads, count], where in the heap.
        place: int64 [num_kv_heads, count], index into the rows' positions.
        token: int64 [num_kv_heads, count], number of the token that is there.
    """

    page: torch.Tensor
    slot: torch.Tensor
    place: torch.Tensor
    token: torch.Tensor


@dataclass(slots=True)
class OffloadedLayer:
    """One layer of a request: what is on the host and what of it is hot."""

    host: HostLayer
    index: TokenIndex
    hot: HotZone | None = None


@dataclass(slots=True)
class Offloaded:
    """A request that has tokens in the host tier."""

    layers: dict[int, OffloadedLayer] = field(default_factory=dict)
    # per anchor layer, what it selected in this step
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Traffic:
    """Counts since the start, over all layers and KV heads.

    Attributes:
        selected: tokens that queries asked for.
        fetched: of these, copied from the host because they were not resident.
        failed: indices that raised; their layers are scanned from then on.
    """

    selected: int = 0
    fetched: int = 0
    failed: int = 0


class Retrieval:
    """Host tier and hot zones of all requests on one worker.

    Args:
        scales: softmax scale per layer.
    """

    def __init__(self, policy: Retriever, heap: Heap, scales: list[float]) -> None:
        self.traffic = Traffic()
        self._policy = policy
        self._heap = heap
        self._scales = scales
        self._requests: dict[str, Offloaded] = {}
        self._layers = range(policy.skip_layers, heap.num_layers)

    # -- compactions --------------------------------------------------------------

    def offload(
        self, request_id: str, owned: PageList, tokens: int, before_tail: int
    ) -> None:
        """Copy to the host what leaves the window with this compaction.

        Args:
            owned: the request's pages before the compaction.
            tokens: in the cache.
            before_tail: of these, in front of the tail.
        """
        state = self._requests.setdefault(request_id, Offloaded())
        wanted = self._policy.offloaded(tokens, before_tail)
        heads, dim = self._heap.num_kv_heads, self._heap.layout.head_dim
        for layer in self._layers:
            here = state.layers.get(layer)
            if here is None:
                host = HostLayer.empty(heads, dim, self._heap.pages)
                here = OffloadedLayer(host, self._policy.new_index(heads, dim))
                state.layers[layer] = here
            first = here.host.tokens
            start = wanted.start + first
            if start < wanted.stop:
                here.host.append(*self._read(layer, owned, start, wanted.stop))
                self._insert(here, first)

    def _read(
        self, layer: int, owned: PageList, start: int, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_kv_heads, stop - start, head_dim] by position."""
        heads, size = self._heap.num_kv_heads, self._heap.layout.block_size
        rows = slice(layer * heads, (layer + 1) * heads)
        positions = owned.positions[rows]
        used = torch.arange(positions.shape[1]) < owned.owned[rows, None] * size
        row, place = ((positions >= start) & (positions < stop) & used).nonzero(
            as_tuple=True
        )
        assert row.numel() == heads * (stop - start), "tokens to offload are not there"
        place = place.view(heads, -1)
        place = place.gather(1, positions.gather(1, place).argsort(1))
        page = owned.pages[rows].gather(1, place // size)
        keys, values = ops.gather_tokens(
            self._heap.pages,
            page.flatten(),
            (place % size).flatten(),
            self._heap.layout,
        )
        return keys.view(heads, stop - start, -1), values.view(heads, stop - start, -1)

    def settle(
        self, request_id: str, pages: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Find the hot slots after a compaction.

        Args:
            pages: int64 [rows, most], landing zone.
            positions: int32 [rows, most * block_size], -1 where unused.
        """
        state = self._requests[request_id]
        heads, size = self._heap.num_kv_heads, self._heap.layout.block_size
        sinks = self._policy.sinks
        for layer, here in state.layers.items():
            rows = slice(layer * heads, (layer + 1) * heads)
            token = positions[rows].long() - sinks
            hot = (token >= 0) & (token < here.host.tokens)
            place = hot.nonzero(as_tuple=True)[1].view(heads, -1)
            here.hot = HotZone(
                pages[rows].gather(1, place // size),
                place % size,
                place,
                token.gather(1, place),
            )

    def refresh_positions(self, request_id: str, positions: torch.Tensor) -> None:
        """Write which tokens are hot now into a landing zone's positions."""
        state = self._requests.get(request_id)
        if state is None:
            return
        heads = self._heap.num_kv_heads
        for layer, here in state.layers.items():
            if here.hot is not None:
                rows = positions[layer * heads : (layer + 1) * heads]
                token = (here.hot.token + self._policy.sinks).to(positions.dtype)
                rows.scatter_(1, here.hot.place, token)

    # -- steps --------------------------------------------------------------------

    def retrieves(self, request_id: str) -> bool:
        """Whether a request has tokens to fetch."""
        return request_id in self._requests

    def fetch(self, request_id: str, layer: int, queries: torch.Tensor) -> None:
        """Make resident what these queries ask for, before they attend.

        Args:
            queries: [num_q_heads, num_queries, head_dim] of one request.
        """
        state = self._requests[request_id]
        here = state.layers.get(layer)
        if here is None or here.hot is None or not here.hot.token.shape[1]:
            return
        count = here.hot.token.shape[1]
        if self._policy.selects(layer):
            wanted = self._select(here, queries, self._scales[layer], count)
            state.chosen = {layer: wanted}
        else:
            (wanted,) = state.chosen.values()
            wanted = wanted[:, :count]
        self._swap(here.host, here.hot, wanted)

    # -- indices, which may fail ----------------------------------------------------

    def _insert(self, here: OffloadedLayer, first: int) -> None:
        try:
            here.index.insert(here.host.present_keys, first)
        except (RuntimeError, ValueError) as error:
            self._scan_instead(here, error)

    def _select(
        self, here: OffloadedLayer, queries: torch.Tensor, scale: float, count: int
    ) -> torch.Tensor:
        keys = here.host.present_keys
        try:
            return here.index.select(queries, keys, scale, count)
        except (RuntimeError, ValueError) as error:
            self._scan_instead(here, error)
            return here.index.select(queries, keys, scale, count)

    def _scan_instead(self, here: OffloadedLayer, error: Exception) -> None:
        """One request's index must not end the server: scan its keys instead."""
        self.traffic.failed += 1
        logger.warning("an index failed, its keys are scanned instead: %s", error)
        here.index = ExactScan()

    def _swap(self, host: HostLayer, hot: HotZone, wanted: torch.Tensor) -> None:
        """Put wanted tokens in the place of hot ones that nobody wants now."""
        heads = wanted.shape[0]
        there = torch.zeros(heads, host.tokens, dtype=torch.bool)
        asked = there.clone()
        there.scatter_(1, hot.token, True)
        asked.scatter_(1, wanted, True)
        missing = ~there.gather(1, wanted)
        leaves = ~asked.gather(1, hot.token)
        self.traffic.selected += wanted.numel()
        row, rank = missing.nonzero(as_tuple=True)
        out_row, out = leaves.nonzero(as_tuple=True)
        if not row.numel():
            return
        # fewer may be wanted than there are slots: some that leave then stay
        if row.numel() != out_row.numel():
            leaves &= leaves.cumsum(1) <= missing.sum(1, keepdim=True)
            out_row, out = leaves.nonzero(as_tuple=True)
        self.traffic.fetched += row.numel()
        token = wanted[row, rank]
        ops.scatter_tokens(
            self._heap.pages,
            hot.page[out_row, out],
            hot.slot[out_row, out],
            host.keys[row, token],
            host.values[row, token],
            self._heap.layout,
        )
        hot.token[out_row, out] = token

    # -- requests that go ---------------------------------------------------------

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the host memory of requests."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def host_bytes(self) -> int:
        """Host memory that requests hold, without their indices."""
        return sum(
            layer.host.num_bytes
            for state in self._requests.values()
            for layer in state.layers.values()
        )
