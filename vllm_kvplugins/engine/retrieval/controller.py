"""Retrieval: fills the hot zone with the tokens that a query asks for.

One request, one layer::

    compaction ── tokens older than the window ──> host tier, index
    every step ── query ──> index.select ──> which of them are not resident?
                             copy those over the hot slots of tokens not asked for

Only contents change: page tables and lengths stay as the compaction left them. All
requests of a step are served in one call per layer.

Choosing is the host's work, whatever the cache's device: queries of a GPU come to the
host, and what they ask for goes back in one copy, or the GPU takes it from there
(``host_fetch``). Tables of who has which hot slot are on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.recorded_run import Fetch
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.engine.retrieval.host_tier import tier_for
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.indexing import Indexer
from vllm_kvplugins.engine.retrieval.log import RetrievalLog
from vllm_kvplugins.engine.retrieval.offload_queue import OffloadQueue
from vllm_kvplugins.engine.retrieval.offloaded import Batch, Fetched, Offloaded
from vllm_kvplugins.engine.step_extension import Step, StepExtension, Traffic
from vllm_kvplugins.index import Keys
from vllm_kvplugins.ops.device import AsyncHostCopy, SideStream, moved
from vllm_kvplugins.ops.hot_set import HotSet, fill_hot
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.threads import helper
from vllm_kvplugins.policies.retrieval import Retriever

# Queries of a step that select, at most, per query head.
_MOST_ASKING = 32


class RetrievalController(StepExtension):
    """Host tier and hot slots of all requests on one worker.

    Args:
        scales: softmax scale per layer.
        share: this worker's part of the policy's host memory; the rest is other
            ranks'.
    """

    def __init__(
        self,
        policy: Retriever,
        heap: Heap,
        scales: Sequence[float],
        share: float = 1.0,
    ) -> None:
        self._traffic = Traffic()
        self.log: RetrievalLog | None = None
        self._policy = policy
        self._heap = heap
        self._scales = scales
        self.tier = tier_for(policy, heap, share)
        self._zones = {
            layer: HotSlots.empty(heap.num_kv_heads)
            for layer in range(policy.skip_layers, heap.num_layers)
        }
        self._indexer = Indexer(policy, self._failed)
        self._departures = OffloadQueue(heap, self.tier, self._zones, self._indexer)
        self._requests: dict[str, Offloaded] = {}
        # of requests that have ended, for those that go on from them
        self._detached: list[Offloaded] = []
        self._free_slot_indices: list[int] = []
        self._batches: list[Batch] = []
        # fetches on another thread: for the next layer, or for the next step
        self._helper = helper("kvp-fetch")
        self._side = SideStream(heap.pages.device)
        self._under_way: list[tuple[Batch, int, Future[Fetched]]] = []
        # not yet in the traffic: a sum per layer would cost more than it tells
        self._copied: list[torch.Tensor] = []
        # requests that a compaction after this step sends tokens to the host for
        self._offloading: list[tuple[DueCompaction, PageList]] = []

    @property
    def traffic(self) -> Traffic:
        """What has been counted since it was last taken."""
        copied, self._copied = self._copied, []
        if copied:
            self._traffic.fetched += int(torch.cat(copied).sum())
        return self._traffic

    def take_traffic(self) -> Traffic:
        """The same, and count anew."""
        taken, self._traffic = self.traffic, Traffic()
        return taken

    def _failed(self) -> None:
        self._traffic.failed += 1

    # -- compactions --------------------------------------------------------------

    def offload(
        self,
        request_id: str,
        layer: int,
        owned: PageList,
        tokens: int,
        before_tail: int,
    ) -> None:
        """Copy one layer's tokens to the host that leave the window with the
        compaction at the end of this step, and start to index them.

        Args:
            owned: the request's pages before the compaction.
            tokens: in the cache.
            before_tail: of these, in front of the tail.
        """
        if layer not in self._zones:
            return
        state = self._requests.get(request_id)
        if state is None:
            state = self._requests[request_id] = Offloaded(self._take_slot_index())
        wanted = self._policy.offloaded(tokens, before_tail)
        first = state.tokens
        heads, dim = self._heap.num_kv_heads, self._heap.layout.head_dim
        if layer not in state.layers:
            state.pages[layer] = torch.empty(heads, 0, dtype=torch.int64)
            state.layers[layer] = self._indexer.new_layer(heads, dim)
        if wanted.start + first < wanted.stop:
            start = wanted.start + first
            self._departures.send(state, layer, owned, start, wanted.stop)
        if layer == max(self._zones):
            state.tokens = max(len(wanted), first)

    def after_compaction(
        self, request_id: str, pages: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Find the hot slots after a compaction; wait for indices that must be there.

        Args:
            pages: int64 [rows, most], retained region.
            positions: int32 [rows, most * block_size], -1 where unused.
        """
        self._departures.take_in()
        pages, positions = pages.cpu(), positions.cpu()
        state = self._requests[request_id]
        state.served = False
        heads, size = self._heap.num_kv_heads, self._heap.layout.block_size
        for layer, here in state.layers.items():
            rows = slice(layer * heads, (layer + 1) * heads)
            token = positions[rows].long() - self._policy.sinks
            hot = (token >= 0) & (token < state.tokens)
            place = hot.nonzero(as_tuple=True)[1].view(heads, -1)
            self._zones[layer].settle(
                state.slot_index,
                page=pages[rows].gather(1, place // size),
                slot=place % size,
                place=place,
                token=token.gather(1, place),
            )
            state.hot[layer] = place.shape[1]
            self._indexer.settle(here)

    def refresh_positions(self, request_id: str, positions: torch.Tensor) -> None:
        """Write which tokens are hot into a retained region's positions."""
        self._join()  # whoever reads the zone next must find these tokens in it
        state = self._requests.get(request_id)
        if state is None:
            return
        heads, here = self._heap.num_kv_heads, positions.cpu()
        for layer, count in state.hot.items():
            zones = self._zones[layer]
            rows = here[layer * heads : (layer + 1) * heads]
            token = zones.hot_tokens(state.slot_index) + self._policy.sinks
            place = zones.place[state.slot_index, :, :count]
            rows.scatter_(1, place, token.to(positions.dtype))
        if here is not positions:
            positions.copy_(moved(here, positions.device))

    # -- steps --------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Note which rows fetch tokens, and which requests offload some."""
        self._begin_fetches(step.rows)
        self._offloading = [(due, step.pages_of(due)) for due in step.due]

    def _begin_fetches(self, rows: Sequence[Row]) -> None:
        self._join()
        alike: dict[tuple[int, bool], list[Row]] = {}
        for row in rows:
            state = self._requests.get(row.request_id)
            if state is not None and any(state.hot.values()):
                alike.setdefault((row.new_tokens, state.served), []).append(row)
        self._batches = []
        for (length, served), batch in alike.items():
            states = [self._requests[row.request_id] for row in batch]
            slot_indices = tuple(state.slot_index for state in states)
            first = torch.tensor([row.first_query for row in batch])
            # of a long chunk not all ask: so many searches cost more than they save
            ask = torch.linspace(0, length - 1, min(length, _MOST_ASKING)).long()
            query = moved((first[:, None] + ask).flatten(), self._heap.pages.device)
            self._batches.append(
                Batch(states, torch.tensor(slot_indices), slot_indices, query, served)
            )
        for state in self._requests.values():
            state.served = False

    def before_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Make the tokens resident that this step's queries select."""
        for batch in self._batches:
            if layer in self._zones:
                fetched = self._fetched(batch, layer, queries)
                self._count(batch, layer, fetched)
                if self.log is not None:
                    self._note(self.log, batch, layer, queries, fetched)
            if self._policy.prefetch == "layer" and layer + 1 in self._zones:
                batch.ahead = self._submit(batch, layer + 1, queries)

    def _fetched(
        self, batch: Batch, layer: int, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """How many tokens had to be copied, per request."""
        if batch.served:
            return None  # counted when they were fetched
        ahead, batch.ahead = batch.ahead, None
        if ahead is not None:
            return ahead.result().join()
        if self._policy.selects(layer):
            asked = batch.asked(queries, self._heap.num_kv_heads)
            self._choose(batch, layer, asked.wait())
        return self._fill(batch, layer)

    def _count(self, batch: Batch, layer: int, fetched: torch.Tensor | None) -> None:
        hot = sum(state.hot[layer] for state in batch.states)
        self._traffic.selected += self._heap.num_kv_heads * hot
        if fetched is not None:
            self._copied.append(fetched)

    def after_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Offload this layer's tokens before a compaction; without one, start to
        fetch for the next step."""
        for due, owned in self._offloading:
            row = due.row
            before_tail = due.compaction.retained.stop * self._heap.layout.block_size
            self.offload(row.request_id, layer, owned, row.after_tokens, before_tail)
        if not self._offloading:
            self._fetch_for_next_step(layer, queries)

    def end_step(
        self, prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        """The step has offloaded all layers."""
        self._offloading = []

    def _fetch_for_next_step(self, layer: int, queries: torch.Tensor) -> None:
        """Start to fetch with this step's queries, if the policy prefetches."""
        if self._policy.prefetch != "step" or layer not in self._zones:
            return
        for batch in self._batches:
            later = batch.for_next_step()
            self._under_way.append((later, layer, self._submit(later, layer, queries)))
            for state in batch.states:
                state.served = True

    def _submit(
        self, batch: Batch, layer: int, queries: torch.Tensor
    ) -> Future[Fetched]:
        # a copy of the queries: the model may write over its own
        asked = batch.asked(queries, self._heap.num_kv_heads)
        return self._helper.submit(self._fetch_ahead, batch, layer, asked)

    def _join(self) -> None:
        """Wait until nothing is being fetched for a later step, or sent away."""
        self._departures.take_in()
        under_way, self._under_way = self._under_way, []
        for batch, layer, future in under_way:
            fetched = future.result().join()
            self._copied.append(fetched)
            if self.log is not None:
                for row, name in enumerate(self._names(batch)):
                    self.log.add_ahead(name, layer, int(fetched[row]))

    @torch.inference_mode()
    def _fetch_ahead(self, batch: Batch, layer: int, asked: AsyncHostCopy) -> Fetched:
        """On another thread, while the model computes."""
        queries = asked.wait()
        with self._side.after(asked.event):
            if self._policy.selects(layer):
                self._choose(batch, layer, queries)
            return Fetched(self._fill(batch, layer), self._side.event())

    def _choose(self, batch: Batch, layer: int, queries: torch.Tensor) -> None:
        count = max(state.hot[layer] for state in batch.states)
        table = self._zones[layer].tables_of(batch.slot_numbers)
        keys = Keys.paged(self.tier.keys, table)
        layers = [state.layers[layer] for state in batch.states]
        scale = self._scales[layer]
        batch.chosen = self._indexer.select(layers, queries, keys, scale, count)

    def _fill(self, batch: Batch, layer: int) -> torch.Tensor:
        """Returns int64 [requests]: tokens that had to be copied."""
        zones = self._zones[layer]
        assert batch.chosen is not None, "the first layer that retrieves selects"
        return fill_hot(
            PagedKV(self._heap.pages, self._heap.layout),
            self.tier.pages,
            zones.tables_of(batch.slot_numbers),
            batch.chosen,
            batch.slot_indices,
            HotSet(zones.token, zones.page, zones.slot, zones.counts),
            self.tier.reads,
        )

    def _note(
        self,
        log: RetrievalLog,
        batch: Batch,
        layer: int,
        queries: torch.Tensor,
        fetched: torch.Tensor | None,
    ) -> None:
        """Log what this layer fetched; scans all offloaded keys."""
        heads = self._heap.num_kv_heads
        asked, group = batch.asked(queries, heads).wait(), queries.shape[1] // heads
        scale, zones = self._scales[layer], self._zones[layer]
        for row, name in enumerate(self._names(batch)):
            state = batch.states[row]
            keys = self.tier.keys[state.pages[layer]].flatten(1, 2)[:, : state.tokens]
            hot, copied = zones.hot_tokens(state.slot_index), None
            if fetched is not None:
                copied = int(fetched[row])
            log.add(name, layer, asked[row], group, keys, hot, scale, copied)

    def _names(self, batch: Batch) -> list[str]:
        """Ids of a batch's requests."""
        names = {state.slot_index: name for name, state in self._requests.items()}
        return [names[slot_index] for slot_index in batch.slot_numbers]

    # -- requests that go ---------------------------------------------------------

    def _take_slot_index(self) -> int:
        if self._free_slot_indices:
            return self._free_slot_indices.pop()
        return len(self._requests)

    # The engine calls these outside its steps, whose tensors they write.
    @torch.inference_mode()
    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the host memory of requests; waits for fetches that are under way."""
        for request_id in request_ids:
            state = self.detach(request_id)
            if state is not None:
                self.discard(state)

    @torch.inference_mode()
    def detach(self, request_id: str) -> Offloaded | None:
        """Take out what a request has on the host, for another to attach."""
        self._join()
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        for zones in self._zones.values():
            zones.leave(state.slot_index)
        self._free_slot_indices.append(state.slot_index)
        self._batches = []
        self._detached.append(state)
        return state

    def attach(self, request_id: str, state: Offloaded) -> None:
        """Give the host tokens of a session to the request that continues it."""
        state.slot_index, state.served = self._take_slot_index(), False
        self._detached.remove(state)
        self._requests[request_id] = state
        for layer, pages in state.pages.items():
            self._zones[layer].add_pages(state.slot_index, pages)

    def discard(self, state: Offloaded) -> None:
        """Free what nobody will attach."""
        self._detached.remove(state)
        for pages in state.pages.values():
            self.tier.give(pages.flatten())

    def close(self) -> None:
        """Let go of the host memory; nobody has any of it."""
        self._join()
        self.tier.close()

    def start_log(self) -> bool:
        """Log every fetch from now on."""
        self.log = RetrievalLog()
        return True

    def take_log(self) -> list[Fetch]:
        """Fetches since the last call; empty unless logging is on."""
        return self.log.take() if self.log is not None else []

    def hot_tokens(self, request_id: str, layer: int) -> torch.Tensor:
        """int64 [num_kv_heads, count]: numbers of the host tokens that are hot."""
        return self._zones[layer].hot_tokens(self._requests[request_id].slot_index)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def check_integrity(self) -> None:
        """Host pages and seats have one owner each."""
        held = [*self._requests.values(), *self._detached]
        self.tier.check_integrity(
            [pages.flatten() for state in held for pages in state.pages.values()]
        )
        slot_indices = [
            state.slot_index for state in self._requests.values()
        ] + self._free_slot_indices
        assert sorted(slot_indices) == list(range(len(slot_indices))), "a seat is lost"
