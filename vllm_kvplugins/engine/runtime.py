"""The policy runtime of one worker: follows requests through steps and compacts them.

This module does not import vLLM. The adapter tells it which rows a step has, hands it
the queries of each layer, and calls it when the forward pass has ended.

A request's life::

    begin_step ── which rows reach a compaction? which does the policy observe?
    before_layer, after_layer (once per layer) ── keep queries, let the policy observe
    end_step ──> policy scores -> allocator -> token moves -> slot index
    begin_step ... page tables now come from the slot index
    forget (finished, aborted, preempted) ──> slot index returned
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_kvplugins.engine.compactor import Compactor, Views
from vllm_kvplugins.engine.device_memory import bytes_of_requests
from vllm_kvplugins.engine.draft_layers import DraftLayers
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import FixedTable, FlatTable, PageTables
from vllm_kvplugins.engine.probing import ProbeModel, Prober, ProbeRequest
from vllm_kvplugins.engine.requests import (
    DueCompaction,
    PageList,
    Record,
    RequestPrompts,
    RequestState,
    Resident,
    Row,
    UnobservedStep,
)
from vllm_kvplugins.engine.retained_regions import RetainedRegions
from vllm_kvplugins.engine.retrieval.controller import RetrievalController
from vllm_kvplugins.engine.spans.controller import SpanController
from vllm_kvplugins.engine.spans.surprisal import SurprisalModel
from vllm_kvplugins.engine.step_extension import Step, StepExtension, Traffic
from vllm_kvplugins.engine.step_requirements import (
    NO_REQUIREMENTS,
    StepObserver,
    StepRequirements,
)
from vllm_kvplugins.engine.windows import StepQueries
from vllm_kvplugins.plan.geometry import Geometry, Lengths, ToolLoop
from vllm_kvplugins.plan.plan_cache import PlanCache
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.scoring.logits import LogitRules
from vllm_kvplugins.scoring.rotary import Rotary


class PolicyRuntime:
    """Residency of all requests on one worker.

    Args:
        policy: the policy, already validated.
        geometry: of this worker's cache.
        sessions: later requests may continue a request, see :class:`StepObserver`.

    Attributes:
        heap: the KV cache; None until the adapter binds it.
        tables: page tables of compacted requests; None like ``heap``.
        prober: runs the policy's probes; None if it has none.
        extensions: what the policy does around layers, empty for most policies.
        draft_layers: layers of a drafter with a KV cache; None without one.
        attending: the extension that computes the attention of rows of this step;
            None = no row needs it.
        records: compactions since recording started; None = recording is off.
        graph_table_bytes: device memory of the page table that CUDA graphs read.
    """

    def __init__(
        self, policy: KVCachePolicy, geometry: Geometry, sessions: bool = False
    ) -> None:
        self.policy, self.geometry = policy, geometry
        self.heap: Heap | None = None
        self.tables: PageTables | None = None
        self.prober: Prober | None = None
        self.extensions: list[StepExtension] = []
        self.draft_layers: DraftLayers | None = None
        self.attending: StepExtension | None = None
        self.records: list[Record] | None = None
        self.graph_table_bytes = 0
        self.observer = StepObserver(policy, sessions)
        self._compactor: Compactor | None = None
        self._compression_seconds: list[float] = []
        self._requests: dict[str, RequestState] = {}
        self._prompts = RequestPrompts(policy)
        self._plans = PlanCache(policy.plan_request, geometry)
        # The current step: compactions due after it, queries to keep, rows that the
        # policy observes with their pages, and layers that have yet to report.
        self._due: list[DueCompaction] = []
        self._queries = StepQueries(geometry.num_layers)
        self._observed_rows: list[tuple[Row, PageList]] = []
        self._missing_layers = 0

    # -- start-up ---------------------------------------------------------

    def bind_heap(
        self,
        heap: Heap,
        scales: Sequence[float],
        rotary: Rotary | None,
        model: ProbeModel | None = None,
        surprisal: SurprisalModel | None = None,
        rules: Sequence[LogitRules] = (),
        draft_heap: Heap | None = None,
        output_weights: Sequence[Callable[[], torch.Tensor]] = (),
    ) -> None:
        """Use this KV cache from now on.

        Args:
            scales: softmax scale per layer.
            rotary: the model's RoPE; None if policies cannot undo it.
            model: runs probes; only policies that probe need it.
            surprisal: computes surprisal; only span policies need it.
            rules: what a layer does to logits besides scaling, per layer; empty:
                nothing.
            draft_heap: the cache of the drafter's layers, if it has any.
            output_weights: reads the output projection, per layer; only policies with
                ``needs_output_weights`` need them.
        """
        policy = self.policy
        views = Views(heap, list(scales), rotary, list(rules), list(output_weights))
        self.heap = heap
        if policy.probing is not None:
            assert model is not None, f"{policy.name} needs a model to probe"
            self.prober = Prober(policy.probing, views, model)
        self.extensions = []
        if policy.retrieval is not None:
            share = heap.bytes_per_token / self.geometry.kv_bytes_per_token
            self.extensions.append(
                RetrievalController(policy.retrieval, heap, scales, share, rules)
            )
        if policy.spans is not None:
            assert surprisal is not None, f"{policy.name} needs surprisal"
            self.extensions.append(
                SpanController(
                    policy.spans, heap, self.geometry, scales, surprisal, rules
                )
            )
        self.tables = PageTables(
            heap.num_layers,
            heap.num_kv_heads,
            heap.num_blocks,
            heap.layout.block_size,
            policy.page_allocator().uniform,
            heap.pages.device,
        )
        if draft_heap is not None:
            self.draft_layers = DraftLayers(draft_heap, heap)
        self._compactor = Compactor(
            policy,
            RetainedRegions(heap, self.tables),
            views,
            self.extensions,
            self.draft_layers,
        )

    def unbind_heap(self) -> None:
        """Drop a KV cache that vLLM has freed; it makes one to measure CUDA graphs."""
        assert not self._requests, "requests have tokens in the cache"
        for extension in self.extensions:
            extension.close()
        self.heap = self.tables = self._compactor = None
        self.prober = self.attending = self.draft_layers = None
        self.extensions = []

    def plan(
        self,
        prompt_tokens: int,
        turn_ends: tuple[int, ...] = (),
        restored: Compaction | None = None,
        shared_blocks: int = 0,
        loops: tuple[ToolLoop, ...] = (),
    ) -> ResidencyPlan:
        """The plan of a request with this prompt."""
        lengths = Lengths(prompt_tokens, turn_ends, restored, shared_blocks, loops)
        return self._plans.get(lengths)

    def _plan_of(self, request_id: str, prompt_tokens: int) -> ResidencyPlan:
        return self.plan(
            prompt_tokens,
            self._prompts.turn_ends(request_id),
            self.request_state(request_id).restored,
            self._prompts.shared_blocks(request_id),
            self._prompts.loops(request_id),
        )

    def add_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        turn_ends: Sequence[int] | None = None,
        patched_prompt: Sequence[int] = (),
        shared_blocks: int = 0,
        loop_ends: Sequence[int] | None = None,
    ) -> None:
        """Store a new request's prompt, turns and prefix, if the policy needs them.

        Args:
            turn_ends: token counts at which turns end, if the request sent them.
            patched_prompt: token ids that probes use instead of the prompt's end.
            shared_blocks: blocks of its shared prefix.
            loop_ends: token counts at which parts of its tool loops end, if the request
                sent them.
        """
        prompts = self._prompts
        prompts.add(
            request_id, prompt, turn_ends, patched_prompt, shared_blocks, loop_ends
        )

    # -- one step -----------------------------------------------------------

    def requires_layers(self, rows: Sequence[Row]) -> bool:
        """Whether layers must hand over queries in a step of these rows."""
        return any(self._requirements(row).of_layers for row in rows)

    def _requirements(self, row: Row) -> StepRequirements:
        self._resident(row)  # forgets a row that is being recomputed
        if self.request_state(row.request_id).lost:
            return NO_REQUIREMENTS
        return self.observer.of(row, self._plan_of(row.request_id, row.prompt_tokens))

    def begin_step(
        self,
        rows: Sequence[Row],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        into: FixedTable | None = None,
    ) -> FlatTable:
        """Build the page tables of a step and work out what the policy requires.

        Args:
            rows: the step's requests, in batch order; empty for a dummy batch, which
                reads plain blocks.
            seq_lens: [rows], logical tokens including the step's; 0 for padding behind
                the requests.
            block_table: int32 [rows, blocks], vLLM's.
            into: tensors to write the page tables to, see :class:`PageTables`.
        """
        assert self.tables is not None, "the heap is not bound"
        self._observed_rows = []
        if rows:  # a dummy batch must not drop compactions that wait for the next step
            self._due = []
        self._queries = StepQueries(self.geometry.num_layers)
        slot_indices = [0] * seq_lens.numel()
        followed = []
        for index, row in enumerate(rows):
            resident = self._resident(row)
            self.observe_accepted(row.request_id, row.computed_tokens)
            if resident is not None:
                slot_indices[index] = resident.slot_index
            requirements = self._requirements(row)
            if requirements is not NO_REQUIREMENTS:
                followed.append(row)
                self._follow(row, requirements, block_table[index])
        self._begin_extensions(rows, followed)
        collects = self._queries or self._observed_rows
        self._missing_layers = self.geometry.num_layers if collects else 0
        known_lens = [row.after_tokens for row in rows]
        known_lens += [0] * (len(slot_indices) - len(rows))
        return self.tables.build(
            slot_indices, seq_lens, block_table, known_lens if rows else None, into
        )

    def _begin_extensions(self, rows: Sequence[Row], followed: Sequence[Row]) -> None:
        if not self.extensions:
            return
        step = Step(rows, followed, self._due, lambda d: self._owned(d.row, d.blocks))
        self.attending = None
        for extension in self.extensions:
            extension.begin_step(step)
            if extension.attends_any:
                self.attending = extension

    def _resident(self, row: Row) -> Resident | None:
        """The row's retained region. Forgets a request that is being recomputed."""
        resident = self.request_state(row.request_id).resident
        if resident is not None and row.computed_tokens < resident.compacted_at:
            self.forget([row.request_id])
            return None
        return resident

    def _follow(
        self, row: Row, requirements: StepRequirements, blocks: torch.Tensor
    ) -> None:
        """Note which queries to keep, what to observe and which compaction to run."""
        if requirements.since is not None:
            state = self._requests.setdefault(row.request_id, RequestState())
            state.keep_queries(row, requirements.since, self._queries)
        if requirements.due is not None:
            block_ids = blocks.long().clone()
            self._due.append(
                DueCompaction(
                    row, requirements.due, requirements.first_query, block_ids
                )
            )
        if not requirements.observes:
            return
        row = row.since(requirements.observed_from)
        if row.draft_tokens:
            first = self._queries.keep(row.first_query, row.new_tokens)
            state = self._requests.setdefault(row.request_id, RequestState())
            state.unobserved = UnobservedStep(
                row, self._queries, first, blocks.long().clone()
            )
        else:
            self._observed_rows.append((row, self._owned(row, blocks.long())))

    @torch.inference_mode()
    def observe_accepted(self, request_id: str, computed_tokens: int) -> None:
        """Let the policy observe a step with drafts, without those that were rejected.

        Args:
            computed_tokens: of the request, rejected drafts not counted.
        """
        state = self._requests.get(request_id)
        if state is None or state.unobserved is None:
            return
        step, state.unobserved = state.unobserved, None
        assert step.queries.queries is not None, "the step has not run"
        num_accepted = computed_tokens - step.row.computed_tokens
        row = replace(step.row, new_tokens=num_accepted, draft_tokens=0)
        owned = self._owned(row, step.blocks)
        accepted = step.queries.queries[:, step.first : step.first + num_accepted]
        for layer, queries in enumerate(accepted):
            self._observe(layer, row, owned, queries)

    def before_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Called when a layer is about to attend, after its cache was written.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """
        for extension in self.extensions:
            extension.before_layer(layer, queries)

    def after_layer(self, layer: int, queries: torch.Tensor) -> None:
        """Called when a layer has attended, with the step's queries.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """
        for extension in self.extensions:
            extension.after_layer(layer, queries)
        self._missing_layers -= self._missing_layers > 0
        if len(self._queries):
            self._queries.put(layer, queries)
        for row, owned in self._observed_rows:
            part = queries[row.first_query : row.first_query + row.new_tokens]
            self._observe(layer, row, owned, part)

    def _observe(
        self, layer: int, row: Row, owned: PageList, queries: torch.Tensor
    ) -> None:
        """Let the policy observe the new tokens of a row.

        Args:
            queries: [new tokens, num_q_heads, head_dim], of the row.
        """
        observation, compactor = self.policy.observation, self._compactor
        assert observation is not None
        assert compactor is not None
        state = self._requests.setdefault(row.request_id, RequestState())
        view = compactor.views.view(
            layer,
            owned,
            row.after_tokens,
            queries.transpose(0, 1),
            state.observed.get(layer),
        )
        state.observed[layer] = observation.observe(view)

    def end_step(self) -> None:
        """Run the compactions that this step completed.

        Call it when all layers have attended. For policies with ``spans``, whose
        compactions take long, call it as the next step begins: the step's tokens then
        leave the engine first.
        """
        assert not self._missing_layers, "layers did not report their queries"
        due_now, self._due = self._due, []
        for extension in self.extensions:
            extension.end_step(self._prompts.tokens)
        if due_now:
            self._compact(due_now)

    def _compact(self, due_now: Sequence[DueCompaction]) -> None:
        """Probe all requests together, then compact each."""
        assert self._compactor is not None
        start = time.perf_counter()
        states = [
            self._requests.setdefault(due.row.request_id, RequestState())
            for due in due_now
        ]
        if self.prober is not None:
            self._probe(self.prober, due_now, states)
        probing = (time.perf_counter() - start) / len(due_now)
        for due, state in zip(due_now, states, strict=True):
            start = time.perf_counter()
            positions = self._compactor.run(due, state)
            if self.records is not None:
                self.records.append(Record.of(due, positions, self.geometry))
            self._compression_seconds.append(probing + time.perf_counter() - start)

    def _probe(
        self,
        prober: Prober,
        due_now: Sequence[DueCompaction],
        states: Sequence[RequestState],
    ) -> None:
        """Run the probes of all requests together and store what they observed."""
        requests = []
        for due, state in zip(due_now, states, strict=True):
            row = due.row
            prompt, patched = self._prompts.tokens.get(row.request_id, ((), ()))
            owned = self._owned(row, due.blocks)
            requests.append(
                ProbeRequest(
                    prompt,
                    owned,
                    row.first_query,
                    state.compacted_at,
                    row.after_tokens,
                    patched,
                    due.compaction.shared_blocks * self.geometry.block_size,
                )
            )
        prober.run(requests)
        for request, state in zip(requests, states, strict=True):
            state.observed = request.observed

    def _owned(self, row: Row, blocks: torch.Tensor) -> PageList:
        """The pages of a request after this step."""
        assert self._compactor is not None
        resident = self.request_state(row.request_id).resident
        return self._compactor.regions.owned(row, blocks, resident)

    # -- sessions: called between steps, whose tensors they change ---------------

    @property
    def regions(self) -> tuple[RetainedRegions, ...]:
        """Retained regions in each heap: the model's layers, then the drafter's."""
        assert self._compactor is not None, "the heap is not bound"
        drafts = () if self.draft_layers is None else (self.draft_layers.regions,)
        return (self._compactor.regions, *drafts)

    def residents(self, request_id: str) -> tuple[Resident | None, ...]:
        """A request's retained region in each of ``regions``; None: not compacted."""
        drafts = self.draft_layers
        resident = self.request_state(request_id).resident
        if drafts is None:
            return (resident,)
        return resident, drafts.resident(request_id)

    def request_state(self, request_id: str) -> RequestState:
        """State of a request; a new one if the runtime has none."""
        return self._requests.get(request_id, RequestState())

    def resume(
        self,
        request_id: str,
        prompt_tokens: int,
        state: RequestState,
        residents: Sequence[Resident | None],
        tokens: int,
        blocks: torch.Tensor,
        prefix: torch.Tensor,
    ) -> None:
        """Let a request continue from a cache that was restored into its blocks.

        Call it before the request's first step and after ``add_request``. Compacts the
        request if a compaction is due at this token count.

        Args:
            state: of the request, without its retained region.
            residents: its retained region in each of ``regions``.
            tokens: number of restored tokens.
            blocks: int64, physical ids, from its first restored block on.
            prefix: int64, physical ids of first blocks that hold their tokens already.
        """
        state.resident, *drafts = residents
        if state != RequestState():
            self._requests[request_id] = state
        if self.draft_layers is not None:
            self.draft_layers.resume(request_id, *drafts)
        plan = self._plan_of(request_id, prompt_tokens)
        due = plan.due(state.compacted_at, tokens)
        if due is not None:
            freed = state.restored.dropped_blocks if state.restored else 0
            row = Row(request_id, prompt_tokens, tokens - 1, 1, 0)
            first = plan.window_start(tokens, self.policy.queries_needed)
            table = torch.cat([prefix, blocks.new_zeros(freed), blocks])
            self._compact([DueCompaction(row, due, first, table)])

    def mark_lost(self, request_id: str) -> None:
        """Note that a request's session failed to load; see :class:`RequestState`."""
        self.forget([request_id])
        self._requests[request_id] = RequestState(lost=True)

    def refresh_positions(self, request_id: str) -> None:
        """Bring the positions of a request's retained region up to date."""
        resident = self.request_state(request_id).resident
        if resident is not None:
            for extension in self.extensions:
                extension.refresh_positions(request_id, resident.positions)

    def detach_extensions(self, request_id: str) -> tuple[Any, ...]:
        """Remove a request's state from all extensions, for a session.

        Returns:
            The state per extension; empty if no extension has any.
        """
        states = tuple(each.detach(request_id) for each in self.extensions)
        return states if any(state is not None for state in states) else ()

    def attach_extensions(self, request_id: str, states: Sequence[Any]) -> None:
        """Give detached state to the request that continues a session.

        ``place_extensions`` comes next.
        """
        for extension, state in zip(self.extensions, states, strict=True):
            if state is not None:
                extension.attach(request_id, state)

    def continue_extensions(
        self, states: Sequence[Any], compaction: Compaction, moves: bool
    ) -> tuple[Any, ...]:
        """Detached state for a request that continues a session.

        Args: see ``StepExtension.continued``.
        """
        return tuple(
            None if state is None else extension.continued(state, compaction, moves)
            for extension, state in zip(self.extensions, states, strict=True)
        )

    def place_extensions(self, request_id: str, resident: Resident) -> None:
        """Tell all extensions where the retained region of a restored request is."""
        assert self.tables is not None, "the heap is not bound"
        pages, _ = self.tables.retained(resident.slot_index)
        for extension in self.extensions:
            extension.after_compaction(request_id, pages, resident.positions)

    def discard_extensions(self, states: Sequence[Any]) -> None:
        """Free detached state that no request will attach."""
        if states:
            for extension, state in zip(self.extensions, states, strict=True):
                if state is not None:
                    extension.discard(state)

    def clear_blocks(self, blocks: torch.Tensor) -> None:
        """Zero all keys and values of these blocks, if the heap is bound.

        Args:
            blocks: int64, physical ids.
        """
        if self.heap is not None:
            self.heap.clear(blocks.to(self.heap.pages.device))
        if self.draft_layers is not None:
            heap = self.draft_layers.heap
            heap.clear(blocks.to(heap.pages.device))

    # -- requests that end -----------------------------------------------------

    def finish(self, request_ids: Iterable[str]) -> None:
        """Drop everything about finished or aborted requests."""
        for request_id in request_ids:
            self.forget([request_id])
            self._prompts.forget(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of requests that may be recomputed later."""
        for request_id in request_ids:
            state = self._requests.pop(request_id, None)
            self._due = [due for due in self._due if due.row.request_id != request_id]
            for extension in self.extensions:
                extension.forget([request_id])
            if self.draft_layers is not None:
                self.draft_layers.forget(request_id)
            if state is not None and state.resident is not None:
                assert self.tables is not None
                self.tables.release(state.resident.slot_index)

    @property
    def num_requests(self) -> int:
        """Requests for which this worker holds state."""
        return len({*self._requests} | self._prompts.request_ids)

    def device_bytes(self, request_id: str) -> int:
        """Device memory of a request outside vLLM's pool of blocks, in bytes.

        Counts page lists, positions and what extensions hold. Kept queries and
        observations do not count: they are temporary.
        """
        num_bytes = sum(each.device_bytes(request_id) for each in self.extensions)
        if self.draft_layers is not None:
            num_bytes += self.draft_layers.device_bytes(request_id)
        resident = self.request_state(request_id).resident
        if resident is None or self.tables is None:
            return num_bytes
        num_bytes += self.tables.request_bytes
        return num_bytes + int(resident.positions.nbytes)

    @property
    def device_table_bytes(self) -> int:
        """Device memory that is allocated outside vLLM's pool of blocks, in bytes.

        Counts page lists (with their spare room), positions, the table of CUDA
        graphs, kept queries, observations, and what extensions hold. Temporary tensors
        of a step do not count.

        Cost: O(requests); O(requests * layers) for policies that observe.
        """
        if self.tables is None:
            return 0
        num_bytes = self.tables.num_bytes + self.graph_table_bytes
        num_bytes += sum(each.allocated_device_bytes for each in self.extensions)
        if self.draft_layers is not None:
            num_bytes += self.draft_layers.allocated_device_bytes
        states = self._requests.values()
        return num_bytes + bytes_of_requests(states, self.tables.device)

    def check_integrity(self) -> None:
        """Every compacted request has its own slot index, and none is lost."""
        if self.tables is None:  # no step has run yet
            assert not self._requests, "request state without a heap"
            return
        residents = {
            name: state.resident
            for name, state in self._requests.items()
            if state.resident
        }
        slot_indices = [each.slot_index for each in residents.values()]
        assert len(set(slot_indices)) == len(slot_indices), (
            f"slot indices shared: {sorted(slot_indices)}"
        )
        assert self.tables.num_slot_indices == len(slot_indices), "slot indices leaked"
        if self.draft_layers is not None:
            self.draft_layers.check_integrity(set(residents))
        for extension in self.extensions:
            extension.check_integrity()
            assert extension.num_requests <= len(slot_indices), (
                "an extension holds state of a request without a retained region"
            )

    # -- observability ---------------------------------------------------------

    @property
    def unscored_compactions(self) -> int:
        """Compactions with invalid scores, see ``InvalidScores``."""
        return self._compactor.invalid_scores.compactions if self._compactor else 0

    def take_compression_seconds(self) -> list[float]:
        """Durations of compactions since the last call."""
        taken, self._compression_seconds = self._compression_seconds, []
        return taken

    def take_traffic(self) -> Traffic | None:
        """Traffic of the extensions since the last call; None without extensions."""
        if not self.extensions:
            return None
        total = Traffic()
        for extension in self.extensions:
            traffic = extension.take_traffic()
            total.selected += traffic.selected
            total.fetched += traffic.fetched
            total.failed += traffic.failed
        return total
