"""Retrieval: fill the hot slots with the tokens that each query selects.

One request, one layer::

    compaction ── tokens older than the window ──> host tier, index
    every step ── query ──> index.select ──> which of them are not resident?
                             copy those into hot slots of tokens that are not selected

Only the contents of hot slots change: page tables and lengths stay as the compaction
wrote them. One call per layer serves all requests of a step.

The tokens of a row that verifies drafts share the row's hot slots, so they attend one
after the other (``attend``): each selects with its own query, as without speculation.
Tokens of a prompt attend to all earlier tokens (``prompt_rows``). If the policy has
``chunk_means``, all generated tokens attend so, to pages and means (``unselected``).

The host selects, on every device. On a GPU, queries are copied to the host, which waits
for them. The selected tokens are copied back in one transfer, or the GPU reads them
itself (``host_fetch``). The tables that map hot slots to tokens are on the host.

If the policy has a ``device_selection``, the device does all of this instead, and the
host does not wait (``device_selector``). If it has a ``page_selection``, whole pages of
similar tokens are selected and copied instead of tokens (``stored_pages``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.nth_tokens import rounds_of
from vllm_kvplugins.engine.recorded_run import Fetch
from vllm_kvplugins.engine.requests import DueCompaction, PageList, Row
from vllm_kvplugins.engine.retrieval.detached import DetachedStates
from vllm_kvplugins.engine.retrieval.device_selector import DeviceSelector
from vllm_kvplugins.engine.retrieval.fetching import FetchCounts, Fetcher
from vllm_kvplugins.engine.retrieval.host_tier import tier_for
from vllm_kvplugins.engine.retrieval.hot_slots import HotSlots
from vllm_kvplugins.engine.retrieval.indexing import Indexer
from vllm_kvplugins.engine.retrieval.offload_queue import (
    LeavingTokens,
    OffloadQueue,
)
from vllm_kvplugins.engine.retrieval.offloaded import Batch, Offloaded
from vllm_kvplugins.engine.retrieval.prompt_rows import (
    PromptRow,
    prompt_rows,
    resident_tokens,
)
from vllm_kvplugins.engine.retrieval.rounds import Round
from vllm_kvplugins.engine.retrieval.stored_pages import StoredPages
from vllm_kvplugins.engine.retrieval.unselected import UnselectedMeans
from vllm_kvplugins.engine.step_extension import Step, StepExtension, Traffic
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.policies.retrieval import Retriever
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

# Most queries per query head that select in one step.
_MAX_SELECTING_QUERIES = 32


class RetrievalController(StepExtension):
    """Host tier and hot slots of all requests on one worker.

    Args:
        scales: softmax scale per layer.
        share: this worker's part of the policy's host memory. Other ranks have the
            rest.
        rules: what else a layer does to logits, per layer; empty: nothing. Only sinks
            are possible.
    """

    def __init__(
        self,
        policy: Retriever,
        heap: Heap,
        scales: Sequence[float],
        share: float = 1.0,
        rules: Sequence[LogitRules] = (),
    ) -> None:
        self._policy = policy
        self._heap = heap
        self._rules = list(rules)
        self.tier = tier_for(policy, heap, share)
        on_device = policy.device_selection is not None
        selects_on = heap.pages.device if on_device else torch.device("cpu")
        layers = range(policy.skip_layers, heap.num_layers)
        pages = policy.page_selection
        unit_tokens = 1 if pages is None else pages.page_tokens
        # A slot that is in no page would keep a token that a page brings, too.
        assert heap.layout.block_size % unit_tokens == 0, "kernels need 16 or more"
        self._hot_slots = HotSlots(layers, heap.num_kv_heads, selects_on, unit_tokens)
        self._device = self._new_device_selector()
        self._counts = FetchCounts()
        self._indexer = Indexer(policy, self._counts.add_failure)
        self._stored_pages = (
            StoredPages(self.tier, self._hot_slots, self._indexer) if pages else None
        )
        means = policy.chunk_means
        self._means = (
            UnselectedMeans(means, heap, self.tier, self._hot_slots) if means else None
        )
        self.fetcher = Fetcher(
            policy,
            heap,
            scales,
            self.tier,
            self._hot_slots,
            self._indexer,
            self._counts,
            self._device,
            self._stored_pages,
        )
        self._offload_queue = OffloadQueue(
            heap, self.tier, self._hot_slots, self._indexer, self._device, self._means
        )
        self._requests: dict[str, Offloaded] = {}
        self._detached = DetachedStates(
            heap, self.tier, self._indexer, self._device, pages, self._means
        )
        self._free_slot_indices: list[int] = []
        self._batches: list[Batch] = []
        # Rows that attend here: their first tokens, their second tokens, and so on.
        self._rounds: list[Round] = []
        self._prompt_rows: list[PromptRow] = []
        self._attends_all_rows = False
        # Requests whose compaction at the end of this step offloads tokens.
        self._leaving: list[LeavingTokens] = []

    def _new_device_selector(self) -> DeviceSelector | None:
        policy, heap, tier = self._policy, self._heap, self.tier
        selection = policy.device_selection
        if selection is None:
            return None
        store = selection.new_store(
            len(tier.pages), heap.layout.head_dim, heap.pages.device
        )
        selecting = filter(policy.selects, self._hot_slots.layers)
        return DeviceSelector(store, heap, tier, self._hot_slots, selecting)

    @property
    def traffic(self) -> Traffic:
        """Counts since the last ``take_traffic``."""
        return self._counts.traffic

    def take_traffic(self) -> Traffic:
        """Return the counts and start again at zero."""
        return self._counts.take()

    # -- compactions --------------------------------------------------------------

    def _leaving_tokens(self, due: DueCompaction, owned: PageList) -> LeavingTokens:
        """What a compaction at the end of this step moves to the host.

        Args:
            owned: the request's pages before the compaction.
        """
        row = due.row
        state = self._requests.get(row.request_id)
        before_tail = due.compaction.retained.stop * self._heap.layout.block_size
        offloaded = self._policy.offloaded(row.after_tokens, before_tail)
        start = offloaded.start + (0 if state is None else state.tokens)
        positions = range(start, max(offloaded.stop, start))
        generates = row.computed_tokens >= row.prompt_tokens
        return LeavingTokens(row.request_id, owned, positions, at_once=generates)

    def _offload(self, leaving: LeavingTokens, layers: range) -> None:
        """Copy the tokens of some layers to the host, and start to index them."""
        state = self._requests.get(leaving.request_id)
        if state is None:
            state = self._requests[leaving.request_id] = self._new_state()
        if leaving.positions:
            self._offload_queue.send(state, layers, leaving.owned, leaving.positions)
        if layers.stop == self._hot_slots.layers.stop:
            state.tokens += len(leaving.positions)

    def _new_state(self) -> Offloaded:
        """State of a request without tokens on the host."""
        layers, heads = self._hot_slots.layers, self._heap.num_kv_heads
        head_dim = self._heap.layout.head_dim
        no_pages = torch.empty(len(layers), heads, 0, dtype=torch.int64)
        state = Offloaded(self._take_slot_index(), layers.start, no_pages)
        if self._device is None:
            for layer in filter(self._policy.selects, layers):
                state.layers[layer] = self._indexer.new_layer(heads, head_dim)
        return state

    def after_compaction(
        self, request_id: str, pages: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Record the hot slots of a compacted request.

        Its indices may still be under construction; the next selection waits for them.

        Args:
            pages: int64 [rows, max pages], the retained region's.
            positions: int32 [rows, max pages * block_size], -1 where unused.
        """
        self._offload_queue.drain()
        state = self._requests[request_id]
        state.prefetched = False
        layers, size = self._hot_slots.layers, self._heap.layout.block_size
        # Layers that keep all of a context have longer rows. Retained pages are full.
        own = positions[self._rows]
        used_pages = int((own[:, ::size] >= 0).sum(1).max())
        token = own[:, : used_pages * size].cpu().long() - self._policy.sinks
        hot = (token >= 0) & (token < state.tokens)
        counts = hot.sum(1)
        place = token.new_zeros(len(token), int(counts.max()))
        used = torch.arange(place.shape[1]) < counts[:, None]
        place[used] = hot.nonzero()[:, 1]

        def by_layer(rows: torch.Tensor) -> torch.Tensor:
            return rows.unflatten(0, (len(layers), -1))

        # The KV heads of a layer have equally many.
        counts = by_layer(counts)[:, 0]
        held = token.gather(1, place)
        if self._stored_pages is not None:
            held, place = self._stored_pages.whole_pages(state, held, place, used)
        self._hot_slots.replace(
            state.slot_index,
            counts // self._hot_slots.unit_tokens,
            page=by_layer(pages[self._rows].cpu().gather(1, place // size)),
            slot=by_layer(place % size),
            place=by_layer(place),
            token=by_layer(held),
        )
        state.hot = dict(zip(layers, counts.tolist(), strict=True))

    def refresh_positions(self, request_id: str, positions: torch.Tensor) -> None:
        """Write the positions of the hot tokens into those of a retained region."""
        self._wait_for_pending()  # pending fetches change the hot slots
        state = self._requests.get(request_id)
        if state is None:
            return
        here = positions if self._device is not None else positions.cpu()
        row, place, token = self._hot_slots.tokens_of(state.slot_index)
        if self._stored_pages is not None:
            row, place, token = self._stored_pages.tokens_of(state, row, place, token)
        rows = here[self._rows]
        rows[moved(row, here.device), moved(place, here.device)] = (
            token + self._policy.sinks
        ).to(rows.dtype)
        if here is not positions:
            positions.copy_(moved(here, positions.device))

    @property
    def _rows(self) -> slice:
        """Rows of the layers that offload, among all (layer, KV head) pairs."""
        layers, heads = self._hot_slots.layers, self._heap.num_kv_heads
        return slice(layers.start * heads, layers.stop * heads)

    # -- steps --------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        """Note which rows fetch tokens, and which requests offload some."""
        self._begin_fetches(step.rows)
        self._leaving = [
            self._leaving_tokens(due, step.pages_of(due)) for due in step.due
        ]

    def _begin_fetches(self, rows: Sequence[Row]) -> None:
        self._wait_for_pending()
        batches: dict[tuple[int, bool], list[Row]] = {}
        known = [self._requests.get(row.request_id) for row in rows]
        self._prompt_rows = prompt_rows(rows, known)
        reading = {each.index for each in self._prompt_rows}
        attending = []
        for index, (row, state) in enumerate(zip(rows, known, strict=True)):
            if index in reading or state is None or not any(state.hot.values()):
                continue
            if row.draft_tokens or self._means is not None:
                attending.append((index, row))
            else:
                batches.setdefault((row.new_tokens, state.prefetched), []).append(row)
        self._batches, self._rounds = [], self._list_rounds(attending)
        own = len(attending) + len(reading)
        self._attends_all_rows = own == len(rows) > 0
        for (length, prefetched), batch in batches.items():
            first = torch.tensor([row.first_query for row in batch])
            # In a long chunk only some queries select: more searches cost more than
            # they save.
            count = min(length, _MAX_SELECTING_QUERIES)
            selecting = torch.linspace(0, length - 1, count).long()
            query = (first[:, None] + selecting).flatten()
            query = moved(query, self._heap.pages.device)
            self._batches.append(self._new_batch(batch, query, prefetched))
        for state in self._requests.values():
            state.prefetched = False

    def _list_rounds(self, rows: Sequence[tuple[int, Row]]) -> list[Round]:
        rounds = []
        heads, device = self._heap.num_kv_heads, self._heap.pages.device
        for tokens, active in rounds_of(rows, heads, device):
            batch = self._new_batch(active, tokens.queries)
            entries = self._means.of(batch) if self._means is not None else None
            rounds.append(Round(tokens, batch, entries))
        return rounds

    def _new_batch(
        self, rows: Sequence[Row], query: torch.Tensor, prefetched: bool = False
    ) -> Batch:
        request_ids = tuple(row.request_id for row in rows)
        states = [self._requests[request_id] for request_id in request_ids]
        slots = tuple(state.slot_index for state in states)
        batch = Batch(
            request_ids, states, torch.tensor(slots), slots, query, prefetched
        )
        if self._device is not None:
            self._device.begin(batch)
        return batch

    @property
    def attends_any(self) -> bool:
        """Whether a row of this step has drafts, means, or tokens of a prompt."""
        return bool(self._rounds or self._prompt_rows)

    def attends_all(self, layer: int) -> bool:
        """Whether all rows attend here, and the layer fetches."""
        return self._attends_all_rows and layer in self._hot_slots

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        kv: PagedKV,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attention of the rows that have drafts or means, one token after the other,
        and of the rows with prompt tokens.

        Args:
            queries, kv, pages, lengths, output: see :class:`StepExtension`.
        """
        if layer not in self._hot_slots:
            return  # all tokens are resident
        flat = output.view(-1, *queries.shape[1:])
        rules = self._rules[layer] if self._rules else PLAIN
        assert not rules.softcap, "retrievers refuse models that cap logits"
        scale = self.fetcher.scale_of_stored_keys(layer)
        value_scale = self._heap.read_scales(layer)[1]
        for row in self._prompt_rows:
            own = row.queries
            resident = resident_tokens(
                self._heap,
                kv,
                pages.unflatten(0, (-1, self._heap.num_kv_heads))[row.index],
                int(lengths[row.index * self._heap.num_kv_heads]),
                self._hot_slots.hot_places(layer, row.state.slot_index),
            )
            flat[own] = row.attend(
                layer,
                queries[own],
                resident,
                self.tier,
                scale,
                rules.sinks,
            ).mul_(value_scale)
        for each in self._rounds:
            self.fetcher.retrieve(each.batch, layer, queries)
            attended = each.attend(
                layer, queries, self._heap, kv, (pages, lengths), scale, rules
            )
            flat[each.tokens.queries] = attended.mul_(value_scale).to(flat.dtype)

    def before_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Make the tokens resident that this step's queries select."""
        for batch in self._batches:
            if layer in self._hot_slots:
                self.fetcher.retrieve(batch, layer, queries)
            if self._policy.prefetch == "layer" and layer + 1 in self._hot_slots:
                self.fetcher.fetch_next(batch, layer + 1, queries)

    def after_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Offload this layer's tokens before a compaction; without one, start to
        fetch for the next step."""
        if not self._leaving:
            self._fetch_for_next_step(layer, queries)
        elif layer in self._hot_slots:
            for leaving in self._leaving:
                if not leaving.at_once:
                    self._offload(leaving, range(layer, layer + 1))

    def end_step(
        self, prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> None:
        """Offload the tokens that leave all layers at once."""
        for leaving in self._leaving:
            if leaving.at_once:
                self._offload(leaving, self._hot_slots.layers)
        self._leaving = []

    def _fetch_for_next_step(self, layer: int, queries: torch.Tensor) -> None:
        """Start to fetch with this step's queries, if the policy prefetches."""
        if self._policy.prefetch != "step" or layer not in self._hot_slots:
            return
        for batch in self._batches:
            self.fetcher.fetch_ahead(batch, layer, queries)

    def _wait_for_pending(self) -> None:
        """Wait for all offloads and for all fetches for a later step."""
        self._offload_queue.drain()
        self.fetcher.wait()

    # -- ended requests -----------------------------------------------------------

    def _take_slot_index(self) -> int:
        if self._free_slot_indices:
            return self._free_slot_indices.pop()
        return len(self._requests)

    # Called outside the engine's steps, but they write tensors of inference mode.
    @torch.inference_mode()
    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the host memory of requests; wait for pending fetches."""
        for request_id in request_ids:
            state = self._remove(request_id)
            if state is None:
                continue
            if self._means is not None:
                self._means.release(state)
            self.discard(state)

    @torch.inference_mode()
    def detach(self, request_id: str) -> Offloaded | None:
        """Remove a request; return its host tokens for ``attach`` or ``discard``."""
        state = self._remove(request_id)
        if state is not None and self._means is not None:
            self._means.to_host(state)
        return state

    def _remove(self, request_id: str) -> Offloaded | None:
        self._wait_for_pending()
        self._leaving = [
            each for each in self._leaving if each.request_id != request_id
        ]
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._hot_slots.clear(state.slot_index)
        self._free_slot_indices.append(state.slot_index)
        self._batches, self._rounds, self._prompt_rows = [], [], []
        self._attends_all_rows = False
        self._detached.add(state)
        return state

    def held_positions(self, state: Offloaded, layer: int) -> range:
        """Positions whose keys and values a state has on the host."""
        first = self._policy.sinks
        held = state.tokens if layer in self._hot_slots else 0
        return range(first, first + held)

    def read_held(
        self, state: Offloaded, layer: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`StepExtension`."""
        tokens = positions - self._policy.sinks
        order, dtype = state.orders.get(layer), self._heap.pages.dtype
        return self.tier.elements(state.table(layer), tokens, dtype, order)

    @torch.inference_mode()
    def continued(
        self, state: Offloaded, compaction: Compaction, moves: bool
    ) -> Offloaded:
        """The detached state of a request that continues a session.

        Args:
            state: of the session; freed if it moves.
            compaction: the last one of the request. If it is earlier than that of the
                session, the request has fewer tokens on the host.

        Raises:
            RuntimeError: the host tier has no room for copies; nothing has changed.
        """
        self._wait_for_pending()
        before_tail = compaction.retained.stop * self._heap.layout.block_size
        tokens = len(self._policy.offloaded(compaction.at_tokens, before_tail))
        return self._detached.continued(state, min(tokens, state.tokens), moves)

    def attach(self, request_id: str, state: Offloaded) -> None:
        """Give the host tokens of a session to the request that continues it."""
        state.slot_index, state.prefetched = self._take_slot_index(), False
        self._detached.remove(state)
        self._requests[request_id] = state
        self._hot_slots.set_pages(state.slot_index, state.pages)
        if self._device is not None:
            self._device.attach(state)
        if self._means is not None:
            self._means.attach(state)

    def discard(self, state: Offloaded) -> None:
        """Free detached host tokens that no request will attach."""
        self._detached.discard(state)

    def close(self) -> None:
        """Release the host memory. No request may own any of it."""
        self._wait_for_pending()
        self.tier.close()

    def device_bytes(self, request_id: str) -> int:
        """Device memory of the request's means, and of its codes if the device
        selects."""
        state, num_bytes = self._requests.get(request_id), 0
        if state is not None and self._device is not None:
            num_bytes += self._device.bytes_of(state)
        if state is not None and self._means is not None:
            num_bytes += self._means.bytes_of(state)
        return num_bytes

    @property
    def allocated_device_bytes(self) -> int:
        """Device memory of all means and codes, also of those that no request uses."""
        parts = self._device, self._means
        return sum(part.num_bytes for part in parts if part is not None)

    def start_log(self) -> bool:
        """Log every fetch from now on."""
        self.fetcher.start_log()
        return True

    def take_log(self) -> list[Fetch]:
        """Fetches since the last call; empty unless logging is on."""
        return self.fetcher.log.take() if self.fetcher.log is not None else []

    def hot_tokens(self, request_id: str, layer: int) -> torch.Tensor:
        """int64 [num_kv_heads, count]: indices of the host tokens in hot slots.

        With whole pages, only after a step has selected since the last compaction.
        """
        state = self._requests[request_id]
        if self._stored_pages is not None:
            return self.fetcher.held_tokens(state, layer)
        return self._hot_slots.hot_units(layer, state.slot_index)

    @property
    def moved_tokens(self) -> int:
        """Tokens that have moved to another row of host memory, over all layers and KV
        heads; 0 unless whole pages are fetched."""
        return 0 if self._stored_pages is None else self._stored_pages.moved_tokens

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def check_integrity(self) -> None:
        """Check that each host page and each slot index has one owner."""
        owners = [*self._requests.values(), *self._detached]
        self.tier.check_integrity([state.pages.flatten() for state in owners])
        indices = [state.slot_index for state in self._requests.values()]
        indices += self._free_slot_indices
        assert sorted(indices) == list(range(len(indices))), "a slot index is lost"
        if self._means is not None:
            self._means.check_integrity(self._requests.values(), [*self._detached])
