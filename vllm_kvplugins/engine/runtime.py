"""The worker's side: follows requests through steps and compacts them.

No vLLM here: the adapter tells it which rows a step has, hands it each layer's
queries, and calls it when the step's forward pass is over.

A request's life::

    begin_step ── which rows near a compaction? which does the policy observe?
    after_attention (once per layer) ── keep their queries, let the policy observe
    end_step ──> keys from pages -> policy scores -> allocator -> moves -> seat
    begin_step ... page tables now come from the seat
    forget (finished, aborted, preempted) ──> seat returned
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.engine.compactor import Compactor
from vllm_kvplugins.engine.fixed_table import FixedTable, FlatTable
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.engine.probing import ProbeModel, Prober
from vllm_kvplugins.engine.prompts import Prompts
from vllm_kvplugins.engine.requests import (
    DueCompaction,
    PageList,
    Record,
    RequestState,
    Resident,
    Row,
)
from vllm_kvplugins.engine.retrieval.controller import RetrievalController
from vllm_kvplugins.engine.spans.controller import SpanController
from vllm_kvplugins.engine.spans.surprisal import SurprisalModel
from vllm_kvplugins.engine.step_requirements import (
    NO_REQUIREMENTS,
    StepObserver,
    StepRequirements,
)
from vllm_kvplugins.engine.views import Views
from vllm_kvplugins.engine.windows import StepQueries
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.plan_cache import PlanCache
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.scoring.rotary import Rotary

if TYPE_CHECKING:
    pass


class PolicyRuntime:
    """Residency of all requests on one worker.

    Args:
        policy: the policy, already validated.
        geometry: of this worker's cache.
        sessions: requests may be continued, see :class:`Watch`.
    """

    def __init__(
        self, policy: KVCachePolicy, geometry: Geometry, sessions: bool = False
    ) -> None:
        self.policy, self.geometry = policy, geometry
        self.heap: Heap | None = None
        self.records: list[Record] | None = None
        self.prober: Prober | None = None
        self.retrieval: RetrievalController | None = None
        self.zooming: SpanController | None = None
        self._compactor: Compactor | None = None
        self._seconds: list[float] = []
        self.tables: PageTables | None = None
        self._requests: dict[str, RequestState] = {}
        self._prompts = Prompts(policy)
        self._due: list[DueCompaction] = []
        self._kept = StepQueries(geometry.num_layers)  # this step's
        self._unheard = 0  # layers of which this step wants something yet
        # this step's rows that the policy observes, with what they own
        self._seen: list[tuple[Row, PageList]] = []
        # what requests due own before a compaction that sends tokens to the host tier
        self._leaving: list[tuple[DueCompaction, PageList]] = []
        self._plans = PlanCache(policy.plan, geometry)
        self.watch = StepObserver(policy, sessions)

    # -- start-up ---------------------------------------------------------

    def attach(
        self,
        heap: Heap,
        scales: Sequence[float],
        rotary: Rotary | None,
        model: ProbeModel | None = None,
        losses: SurprisalModel | None = None,
    ) -> None:
        """Learn where the cache lies.

        Args:
            scales: softmax scale per layer.
            model: needed by policies that probe.
            losses: needed by policies that need surprisal.
        """
        self.heap, views = heap, Views(heap, list(scales), rotary)
        policy = self.policy
        if policy.probing is not None:
            assert model is not None, f"{policy.name} needs a model to probe"
            self.prober = Prober(policy.probing, views, model)
        if policy.retrieval is not None:
            share = heap.bytes_per_token / self.geometry.kv_bytes_per_token
            self.retrieval = RetrievalController(policy.retrieval, heap, scales, share)
        if policy.spans is not None:
            assert losses is not None, f"{policy.name} needs surprisal"
            self.zooming = SpanController(
                policy.spans, heap, self.geometry, scales, losses
            )
        self.tables = PageTables(
            heap.num_layers,
            heap.num_kv_heads,
            heap.num_blocks,
            heap.layout.block_size,
            self.policy.page_allocator().uniform,
            heap.pages.device,
        )
        self._compactor = Compactor(
            self.policy, heap, views, self.tables, self.retrieval
        )

    def detach(self) -> None:
        """Let go of a cache that is gone: vLLM makes one to measure graphs with."""
        assert not self._requests, "requests have tokens there"
        if self.retrieval is not None:
            self.retrieval.close()
        self.heap = self.tables = self._compactor = None
        self.prober = self.retrieval = self.zooming = None

    def plan(
        self,
        prompt_tokens: int,
        turn_ends: tuple[int, ...] = (),
        restored: Compaction | None = None,
    ) -> ResidencyPlan:
        """The plan of a request with this prompt."""
        return self._plans.get(Lengths(prompt_tokens, turn_ends, restored))

    def _plan_of(self, request_id: str, prompt_tokens: int) -> ResidencyPlan:
        turn_ends = self._prompts.turn_ends(request_id)
        return self.plan(prompt_tokens, turn_ends, self.tracked(request_id).restored)

    def _wants(self, row: Row) -> StepRequirements:
        self._resident(row)  # a row that begins anew is forgotten
        if self.tracked(row.request_id).lost:
            return NO_REQUIREMENTS
        return self.watch.of(row, self._plan_of(row.request_id, row.prompt_tokens))

    def learn(
        self,
        request_id: str,
        prompt: Sequence[int],
        turn_ends: Sequence[int] | None = None,
        patched_prompt: Sequence[int] = (),
    ) -> None:
        """Remember a new request's prompt and its turns, if the policy needs them.

        Args:
            turn_ends: what the request says about them.
            patched_prompt: token ids that it wants to be asked.
        """
        self._prompts.learn(request_id, prompt, turn_ends, patched_prompt)

    # -- one step -----------------------------------------------------------

    def wants_of_layers(self, rows: Sequence[Row]) -> bool:
        """Whether layers must hand something over in a step of these rows."""
        return any(self._wants(row).of_layers for row in rows)

    def begin_step(
        self,
        rows: Sequence[Row],
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        into: FixedTable | None = None,
    ) -> FlatTable:
        """Page tables for a step, and note what it means for the policy.

        Args:
            rows: the step's requests, in batch order; empty for a dummy batch,
                which then reads plain blocks.
            seq_lens: [rows], logical tokens including the step's; 0 for padding behind
                the requests.
            block_table: int32 [rows, blocks], vLLM's.
            into: where the page tables are written, see :class:`PageTables`.
        """
        assert self.tables is not None, "not attached"
        self._seen, self._leaving = [], []
        if rows:  # else what waits for the next step goes on waiting
            self._due = []
        self._kept = StepQueries(self.geometry.num_layers)
        if self.zooming is not None:
            self.zooming.begin_step(rows)
        slot_indices = [0] * seq_lens.numel()
        for index, row in enumerate(rows):
            resident = self._resident(row)
            if resident is not None:
                slot_indices[index] = resident.slot_index
            wants = self._wants(row)
            if wants is not NO_REQUIREMENTS:
                self._note(row, wants, block_table[index])
        if self.retrieval is not None:
            self.retrieval.begin_step(rows)
            self._leaving = [(d, self._owned(d.row, d.blocks)) for d in self._due]
        self._unheard = self.geometry.num_layers if self._kept or self._seen else 0
        known = [row.after_tokens for row in rows] + [0] * (
            len(slot_indices) - len(rows)
        )
        return self.tables.build(
            slot_indices, seq_lens, block_table, known if rows else None, into
        )

    def _resident(self, row: Row) -> Resident | None:
        """The row's retained region; forgotten if it is being computed anew."""
        resident = self.tracked(row.request_id).resident
        if resident is not None and row.computed_tokens < resident.compacted_at:
            self.forget([row.request_id])
            return None
        return resident

    def _note(self, row: Row, wants: StepRequirements, blocks: torch.Tensor) -> None:
        """Queries to keep, observations to make, a compaction to run."""
        if self.zooming is not None:
            self.zooming.watch(row)
        if wants.since is not None:
            tracked = self._requests.setdefault(row.request_id, RequestState())
            tracked.keep_queries(row, wants.since, self._kept)
        if wants.due is not None:
            blocks_now = blocks.long().clone()
            self._due.append(
                DueCompaction(row, wants.due, wants.first_query, blocks_now)
            )
        if wants.observes:
            self._seen.append((row, self._owned(row, blocks.long())))

    def before_attention(self, layer: int, queries: torch.Tensor) -> None:
        """Called when a layer is about to attend, its cache written.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """
        if self.retrieval is not None:
            self.retrieval.fetch(layer, queries)

    def after_attention(self, layer: int, queries: torch.Tensor) -> None:
        """Called when a layer has attended, with the step's queries.

        Args:
            queries: [step tokens, num_q_heads, head_dim], after RoPE.
        """
        for due, owned in self._leaving:
            assert self.retrieval is not None
            row = due.row
            before_tail = due.compaction.retained.stop * self.geometry.block_size
            self.retrieval.offload(
                row.request_id, layer, owned, row.after_tokens, before_tail
            )
        if self.retrieval is not None and not self._leaving:
            self.retrieval.fetch_for_next_step(layer, queries)
        self._unheard -= self._unheard > 0
        if len(self._kept):
            self._kept.put(layer, queries)
        observation = self.policy.observation if self._seen else None
        for row, owned in self._seen:
            assert observation is not None
            tracked = self._requests.setdefault(row.request_id, RequestState())
            part = queries[row.first_query : row.first_query + row.new_tokens]
            observed = tracked.observed.get(layer)
            assert self._compactor is not None
            view = self._compactor.views.view(
                layer, owned, row.after_tokens, part.transpose(0, 1), observed
            )
            tracked.observed[layer] = observation.observe(view)

    def end_step(self) -> None:
        """Run the compactions that this step completed. Call it when all layers have
        attended, or as the next step begins (policies with ``spans``)."""
        assert not self._unheard, "a step went by that layers had to tell of"
        due_now, self._due, self._leaving = self._due, [], []
        if self.zooming is not None:
            self.zooming.end_step(self._prompts.tokens)
        if due_now:
            self._compact(due_now)

    def _owned(self, row: Row, blocks: torch.Tensor) -> PageList:
        assert self._compactor is not None
        return self._compactor.owned(row, blocks, self.tracked(row.request_id).resident)

    def _compact(self, due_now: Sequence[DueCompaction]) -> None:
        """Probe for all requests that are due, together, then compact each."""
        assert self._compactor is not None
        began = time.perf_counter()
        for due in due_now:
            self._requests.setdefault(due.row.request_id, RequestState())
        if self.prober is not None:
            prompts = self._prompts.tokens
            self._compactor.probe(self.prober, due_now, self._requests, prompts)
        probing = (time.perf_counter() - began) / len(due_now)
        for due in due_now:
            began = time.perf_counter()
            tracked = self._requests[due.row.request_id]
            if self.zooming is not None:
                here = self._owned(due.row, due.blocks)
                tracked.observed = self.zooming.divide(due, here)
            positions = self._compactor.run(due, tracked)
            if self.records is not None:
                self.records.append(Record.of(due, positions, self.geometry))
            self._seconds.append(probing + time.perf_counter() - began)

    # -- sessions: called outside of steps, whose tensors they touch -------------

    def tracked(self, request_id: str) -> RequestState:
        """What is known of a request."""
        return self._requests.get(request_id, RequestState())

    def adopt(
        self,
        request_id: str,
        prompt_tokens: int,
        tracked: RequestState,
        tokens: int,
        blocks: torch.Tensor,
    ) -> None:
        """Let a request go on from a cache that lies in its blocks; call before its
        first step and after ``learn``. Compacts it if that is due by now.

        Args:
            tokens: how many there are.
            blocks: int64, physical ids, from its first resident block on.
        """
        if tracked != RequestState():
            self._requests[request_id] = tracked
        plan = self._plan_of(request_id, prompt_tokens)
        due = plan.due(tracked.compacted_at, tokens)
        if due is not None:
            holes = tracked.restored.retained.start if tracked.restored else 0
            row = Row(request_id, prompt_tokens, tokens - 1, 1, 0)
            first = plan.window_start(tokens, self.policy.queries_needed)
            table = torch.cat([blocks.new_zeros(holes), blocks])
            self._compact([DueCompaction(row, due, first, table)])

    def lose(self, request_id: str) -> None:
        """A request's cache could not be loaded; see :class:`Tracked`."""
        self.forget([request_id])
        self._requests[request_id] = RequestState(lost=True)

    # -- requests that go ----------------------------------------------------

    def finish(self, request_ids: Iterable[str]) -> None:
        """Drop everything about finished or aborted requests."""
        for request_id in request_ids:
            self.forget([request_id])
            self._prompts.forget(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the state of requests that will be computed anew, if ever."""
        for request_id in request_ids:
            tracked = self._requests.pop(request_id, None)
            self._due = [due for due in self._due if due.row.request_id != request_id]
            for holder in (self.retrieval, self.zooming):
                if holder is not None:
                    holder.forget([request_id])
            if tracked is not None and tracked.resident is not None:
                assert self.tables is not None
                self.tables.leave(tracked.resident.slot_index)

    @property
    def num_tracked(self) -> int:
        """Requests that this worker holds any state of."""
        return len({*self._requests} | self._prompts.request_ids)

    def check_integrity(self) -> None:
        """Every compacted request has exactly one seat, and no seat is lost."""
        if self.tables is None:  # no step has run yet
            assert not self._requests, "state without a heap"
            return
        slot_indices = [
            t.resident.slot_index for t in self._requests.values() if t.resident
        ]
        assert len(set(slot_indices)) == len(slot_indices), (
            f"seats shared: {sorted(slot_indices)}"
        )
        assert self.tables.num_slot_indices == len(slot_indices), "seats leaked"
        for holder in (self.retrieval, self.zooming):
            if holder:
                holder.check_integrity()
                assert holder.num_requests <= len(slot_indices), (
                    "state of somebody unseated"
                )

    # -- observability ---------------------------------------------------------

    @property
    def unscored_compactions(self) -> int:
        """Compactions with scores that told nothing, see ``UnscoredTokens``."""
        return self._compactor.unscored.compactions if self._compactor else 0

    def take_compression_seconds(self) -> list[float]:
        """Durations of compactions since the last call."""
        taken, self._seconds = self._seconds, []
        return taken
