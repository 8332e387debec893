"""Fetches: select host tokens with a layer's queries, and copy them into hot slots.

::

    retrieve        before the layer attends
    fetch_next      while this layer computes, for the next one   (prefetch: layer)
    fetch_ahead     while the model computes, for the next step   (prefetch: step)

The last two run on another thread. Each fetch of a batch counts once, also if it was
made ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.retrieval.device_selector import DeviceSelector
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.indexing import Indexer
from vllm_kvplugins.engine.retrieval.log import RetrievalLog
from vllm_kvplugins.engine.retrieval.offloaded import Batch, Fetched, Offloaded
from vllm_kvplugins.engine.retrieval.stored_pages import StoredPages
from vllm_kvplugins.engine.step_extension import Traffic
from vllm_kvplugins.ops.device import AsyncHostCopy, SideStream
from vllm_kvplugins.ops.hot_set import fill_hot
from vllm_kvplugins.ops.threads import Helper
from vllm_kvplugins.policies.retrieval import Retriever


class FetchCounts:
    """Tokens that were selected and copied, and indices that failed."""

    def __init__(self) -> None:
        self._traffic = Traffic()
        # Not yet in the traffic. One sum per read is cheaper than one per layer.
        self._copied: list[torch.Tensor] = []
        # Sums on their way to the host.
        self._sums: deque[AsyncHostCopy] = deque()

    def add_selected(self, tokens: int) -> None:
        self._traffic.selected += tokens

    def add_copied(self, tokens: torch.Tensor) -> None:
        """Count copied tokens, int64 of any shape, on any device."""
        self._copied.append(tokens.flatten())

    def add_failure(self) -> None:
        self._traffic.failed += 1

    @property
    def traffic(self) -> Traffic:
        """Counts since the last ``take``.

        Where a GPU selects, tokens count as fetched when their number has arrived.
        """
        copied, self._copied = self._copied, []
        if copied:
            self._sums.append(AsyncHostCopy(torch.cat(copied).sum()))
        while self._sums and (arrived := self._sums[0].poll()) is not None:
            self._traffic.fetched += int(arrived)
            self._sums.popleft()
        return self._traffic

    def take(self) -> Traffic:
        """Return the counts and start again at zero."""
        taken, self._traffic = self.traffic, Traffic()
        return taken


class Fetcher:
    """Fills the hot slots of batches.

    Args:
        scales: softmax scale per layer.
        device: selects instead of the host; None: the host selects.
        stored_pages: set if whole pages are fetched instead of tokens.

    Attributes:
        log: collects every fetch; None: they are not logged.
    """

    def __init__(
        self,
        policy: Retriever,
        heap: Heap,
        scales: Sequence[float],
        tier: HostTier,
        hot_slots: HotSlots,
        indexer: Indexer,
        counts: FetchCounts,
        device: DeviceSelector | None,
        stored_pages: StoredPages | None,
    ) -> None:
        self.log: RetrievalLog | None = None
        self._policy = policy
        self._heap = heap
        self._scales = scales
        self._tier = tier
        self._hot_slots = hot_slots
        self._indexer = indexer
        self._counts = counts
        self._device = device
        self._stored_pages = stored_pages
        self._helper = Helper("kvp-fetch")
        self._side_stream = SideStream(heap.pages.device)
        self._pending: list[tuple[Batch, int, Future[Fetched]]] = []

    # -- before a layer attends ---------------------------------------------------

    def retrieve(self, batch: Batch, layer: int, queries: torch.Tensor) -> None:
        """Make the tokens resident that the batch selects in a layer.

        Args:
            queries: [step tokens, num_q_heads, head_dim].
        """
        fetched = self._fetch(batch, layer, queries)
        hot = sum(state.hot[layer] for state in batch.states)
        self._counts.add_selected(self._heap.num_kv_heads * hot)
        if fetched is not None:
            self._counts.add_copied(fetched)
        if self.log is not None:
            self._log_fetches(self.log, batch, layer, queries, fetched)

    def _fetch(
        self, batch: Batch, layer: int, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """int64 [requests, ...]: tokens that had to be copied; None: counted before."""
        if self._device is not None:
            scale = self.scale_of_stored_keys(layer)
            return self._device.retrieve(batch, layer, queries, scale)
        if batch.prefetched:
            return None  # counted when the previous step fetched them
        started, batch.next_layer = batch.next_layer, None
        if started is not None:
            return started.result().join()
        if self._policy.selects(layer):
            on_host = batch.copy_queries(queries, self._heap.num_kv_heads)
            self._select(batch, layer, on_host.wait())
        return self._fill_hot_slots(batch, layer)

    def _select(self, batch: Batch, layer: int, queries: torch.Tensor) -> None:
        for state in batch.states:
            self._complete_index(state, layer)
            if self._stored_pages is not None:
                self._stored_pages.arrange(state, layer)
        slots = max(state.hot[layer] for state in batch.states)
        count = slots // self._hot_slots.unit_tokens
        keys = self._tier.keys(self._hot_slots.tables_of(layer, batch.slot_numbers))
        layers = [state.layers[layer] for state in batch.states]
        scale = self.scale_of_stored_keys(layer)
        batch.selected = self._indexer.select(layers, queries, keys, scale, count)

    def _complete_index(self, state: Offloaded, layer: int) -> None:
        """Append host tokens that an index lacks since its session was continued."""
        indexed = state.layers[layer]
        if indexed.tokens < state.tokens:
            missing = range(indexed.tokens, state.tokens)
            order = state.orders.get(layer)
            read = partial(self._tier.read_keys, state.table(layer), missing, order)
            self._indexer.insert(indexed, missing, read)

    def _fill_hot_slots(self, batch: Batch, layer: int) -> torch.Tensor:
        """Returns int64 [requests]: tokens that had to be copied."""
        assert batch.selected is not None, "the first layer that retrieves selects"
        tables = self._hot_slots.tables_of(layer, batch.slot_numbers)
        copied = fill_hot(
            self._heap.kv,
            self._tier.host_pages(tables),
            batch.selected,
            batch.slot_indices,
            self._hot_slots.hot_set(layer),
            whole_pages=self._stored_pages is not None,
        )
        unit = self._hot_slots.unit_tokens
        return copied if unit == 1 else copied * unit

    def scale_of_stored_keys(self, layer: int) -> float:
        """The softmax scale for keys of the host tier, which have no scale of fp8."""
        return self._scales[layer] * self._heap.read_scales(layer)[0]

    # -- ahead, on another thread -------------------------------------------------

    def fetch_next(self, batch: Batch, layer: int, queries: torch.Tensor) -> None:
        """Start to fetch for a layer with the queries of the one before it."""
        batch.next_layer = self._submit(batch, layer, queries)

    def fetch_ahead(self, batch: Batch, layer: int, queries: torch.Tensor) -> None:
        """Start to fetch for a layer of the next step with the queries of this one."""
        next_batch = batch.for_next_step()
        fetch = self._submit(next_batch, layer, queries)
        self._pending.append((next_batch, layer, fetch))
        for state in batch.states:
            state.prefetched = True

    def wait(self) -> None:
        """Wait for all fetches for a later step; they change hot slots."""
        pending, self._pending = self._pending, []
        for batch, layer, future in pending:
            fetched = future.result().join()
            self._counts.add_copied(fetched)
            if self.log is not None:
                for row, name in enumerate(batch.request_ids):
                    self.log.add_ahead(name, layer, int(fetched[row]))

    def _submit(
        self, batch: Batch, layer: int, queries: torch.Tensor
    ) -> Future[Fetched]:
        # a copy of the queries: the model may overwrite its own
        on_host = batch.copy_queries(queries, self._heap.num_kv_heads)
        return self._helper.submit(self._fetched, batch, layer, on_host)

    @torch.inference_mode()
    def _fetched(self, batch: Batch, layer: int, on_host: AsyncHostCopy) -> Fetched:
        """Select and fetch on the helper thread, while the model computes."""
        queries = on_host.wait()
        with self._side_stream.after(on_host.event):
            if self._policy.selects(layer):
                self._select(batch, layer, queries)
            copied = self._fill_hot_slots(batch, layer)
            return Fetched(copied, self._side_stream.event())

    # -- log ----------------------------------------------------------------------

    def start_log(self) -> None:
        """Log every fetch from now on."""
        dim, dtype = self._heap.layout.head_dim, self._heap.pages.dtype
        self.log = RetrievalLog(2 * dim * dtype.itemsize)

    def _log_fetches(
        self,
        log: RetrievalLog,
        batch: Batch,
        layer: int,
        queries: torch.Tensor,
        fetched: torch.Tensor | None,
    ) -> None:
        """Log what this layer fetched. Scans all offloaded keys."""
        heads = self._heap.num_kv_heads
        on_host = batch.copy_queries(queries, heads).wait()
        group = queries.shape[1] // heads
        scale = self.scale_of_stored_keys(layer)
        for row, name in enumerate(batch.request_ids):
            state = batch.states[row]
            order = state.orders.get(layer)
            keys = self._tier.read_keys(state.table(layer), range(state.tokens), order)
            hot, copied = self.held_tokens(state, layer), None
            if fetched is not None:
                copied = int(fetched[row].sum())
            log.add(name, layer, on_host[row], group, keys, hot, scale, copied)

    def held_tokens(self, state: Offloaded, layer: int) -> torch.Tensor:
        """int64 [num_kv_heads, count], on the host: indices of the host tokens in hot
        slots. With whole pages, only after a step has selected since the last
        compaction."""
        hot = self._hot_slots.hot_units(layer, state.slot_index)
        if self._stored_pages is None:
            return hot.cpu()
        return self._stored_pages.tokens_in(state, layer, hot)
