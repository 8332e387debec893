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
from typing import TYPE_CHECKING, cast

import torch

from vllm_kvplugins.policies.base import (
    Geometry,
    KVCachePolicy,
    Lengths,
    Retention,
    Trigger,
)
from vllm_kvplugins.residency.compactor import Compactor
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.page_table import FlatTable, PageTables
from vllm_kvplugins.residency.plan import Compaction, ResidencyPlan
from vllm_kvplugins.residency.plans import Plans
from vllm_kvplugins.residency.probing import ProbeModel, Prober
from vllm_kvplugins.residency.requests import (
    Due,
    PageList,
    Record,
    Resident,
    Row,
    Tracked,
)
from vllm_kvplugins.residency.retrieval import Retrieval
from vllm_kvplugins.residency.surprisal import TokenLosses
from vllm_kvplugins.residency.views import Views
from vllm_kvplugins.residency.windows import StepQueries, first_kept
from vllm_kvplugins.residency.zooming import Zooming
from vllm_kvplugins.rotary import Rotary

if TYPE_CHECKING:
    from vllm_kvplugins.policies.resolution import Resolver
    from vllm_kvplugins.policies.retrieval import Retriever


class PolicyRuntime:
    """Residency of all requests on one worker.

    Args:
        policy: the policy, already validated.
        geometry: of this worker's cache.
        sessions: requests may be continued: who observes a prompt observes the
            answer too, and the newest queries are kept, since the next request will
            not compute these tokens again.
    """

    def __init__(
        self, policy: KVCachePolicy, geometry: Geometry, sessions: bool = False
    ) -> None:
        self.policy, self.geometry = policy, geometry
        self.heap: Heap | None = None
        self.records: list[Record] | None = None
        self.prober: Prober | None = None
        self.retrieval: Retrieval | None = None
        self.zooming: Zooming | None = None
        self._compactor: Compactor | None = None
        self._seconds: list[float] = []
        self.tables: PageTables | None = None
        self._requests: dict[str, Tracked] = {}
        # of live requests, with what they want to be asked, if the policy needs them
        self._prompts: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        self._due: list[Due] = []
        self._kept = StepQueries(geometry.num_layers)  # this step's
        # this step's rows that the policy observes, with what they own
        self._seen: list[tuple[Row, PageList]] = []
        # what requests due own before a compaction that sends tokens to the host tier
        self._leaving: list[tuple[Due, PageList]] = []
        # of live requests whose prompts have turns
        self._turn_ends: dict[str, tuple[int, ...]] = {}
        self._plans = Plans(policy, geometry)
        self._observes = policy.observes
        # also requests that are never compacted: one that goes on may be
        observes_all = sessions and policy.observes_steps
        if observes_all:
            self._observes |= Trigger.DECODE_STEP
        self._keeps_newest = sessions and policy.queries_needed > 0
        self._notes_all = observes_all or self._keeps_newest

    # -- start-up ---------------------------------------------------------

    def attach(
        self,
        heap: Heap,
        scales: Sequence[float],
        rotary: Rotary | None,
        model: ProbeModel | None = None,
        losses: TokenLosses | None = None,
    ) -> None:
        """Learn where the cache lies.

        Args:
            scales: softmax scale per layer.
            model: needed by policies that probe.
            losses: needed by policies that need surprisal.
        """
        self.heap = heap
        views = Views(heap, list(scales), rotary)
        if Trigger.PROBE in self.policy.observes:
            assert model is not None, f"{self.policy.name} needs a model to probe"
            self.prober = Prober(self.policy, views, model)
        if self.policy.retention is Retention.OFFLOAD:
            share = heap.bytes_per_token / self.geometry.kv_bytes_per_token
            policy = cast("Retriever", self.policy)
            self.retrieval = Retrieval(policy, heap, scales, share)
        if self.policy.retention is Retention.RECONSTRUCT:
            assert losses is not None, f"{self.policy.name} needs surprisal"
            resolver = cast("Resolver", self.policy)
            self.zooming = Zooming(resolver, heap, self.geometry, scales, losses)
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

    def plan(
        self,
        prompt_tokens: int,
        turn_ends: tuple[int, ...] = (),
        restored: Compaction | None = None,
    ) -> ResidencyPlan:
        """The plan of a request with this prompt."""
        return self._plans.get(Lengths(prompt_tokens, turn_ends, restored))

    def _plan_of(self, request_id: str, prompt_tokens: int) -> ResidencyPlan:
        turn_ends = self._turn_ends.get(request_id, ())
        return self.plan(prompt_tokens, turn_ends, self.tracked(request_id).restored)

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
        if Trigger.PROBE in self.policy.observes or self.policy.needs_surprisal:
            self._prompts[request_id] = prompt, patched_prompt
        if self.policy.needs_turns:
            self._turn_ends[request_id] = self.policy.turn_ends(prompt, turn_ends)

    # -- one step -----------------------------------------------------------

    def begin_step(
        self, rows: Sequence[Row], seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> FlatTable:
        """Page tables for a step, and note what it means for the policy.

        Args:
            rows: the step's requests, in batch order; empty for a dummy batch,
                which then reads plain blocks.
            seq_lens: [rows], logical tokens including the step's; 0 for padding behind
                the requests.
            block_table: int32 [rows, blocks], vLLM's.
        """
        assert self.tables is not None, "not attached"
        self._due, self._seen, self._leaving = [], [], []
        self._kept = StepQueries(self.geometry.num_layers)
        if self.zooming is not None:
            self.zooming.begin_step(rows)
        seats = [0] * seq_lens.numel()
        for index, row in enumerate(rows):
            resident = self._resident(row)
            if resident is not None:
                seats[index] = resident.seat
            plan = self._plan_of(row.request_id, row.prompt_tokens)
            if not plan.is_static or self._notes_all:
                self._note(row, plan, block_table[index])
        if self.retrieval is not None:
            self.retrieval.begin_step(rows)
            self._leaving = [
                (due, self._owned(due.row, due.blocks)) for due in self._due
            ]
        known = [row.after_tokens for row in rows] + [0] * (len(seats) - len(rows))
        return self.tables.build(seats, seq_lens, block_table, known if rows else None)

    def _resident(self, row: Row) -> Resident | None:
        """The row's landing zone; forgotten if it is being computed anew."""
        tracked = self._requests.get(row.request_id)
        if tracked is None or tracked.resident is None:
            return None
        if row.computed_tokens < tracked.resident.compacted_at:
            self.forget([row.request_id])
            return None
        return tracked.resident

    def _note(self, row: Row, plan: ResidencyPlan, blocks: torch.Tensor) -> None:
        """Queries to keep, observations to make, a compaction to run."""
        if self.zooming is not None:
            self.zooming.watch(row)
        cut = plan.next_cut(row.computed_tokens)
        assert cut is None or row.after_tokens <= cut, "a step ran past a compaction"
        wanted = self.policy.queries_needed
        first = plan.window_start(cut, wanted) if cut is not None else None
        since = first_kept(row.after_tokens, wanted) if self._keeps_newest else first
        if since is not None and since < row.after_tokens:
            tracked = self._requests.setdefault(row.request_id, Tracked())
            tracked.keep_queries(row, since, self._kept)
        if row.after_tokens == cut:
            compaction = plan.due(row.computed_tokens, row.after_tokens)
            assert compaction is not None
            assert first is not None
            due = Due(row, compaction, first, blocks.long().clone())
            self._due.append(due)
        decoding = row.computed_tokens >= row.prompt_tokens
        phase = Trigger.DECODE_STEP if decoding else Trigger.PREFILL_CHUNK
        if phase in self._observes:
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
            before_tail = due.compaction.zone.stop * self.geometry.block_size
            self.retrieval.offload(
                row.request_id, layer, owned, row.after_tokens, before_tail
            )
        if self.retrieval is not None and not self._leaving:
            self.retrieval.fetch_for_next_step(layer, queries)
        if len(self._kept):
            self._kept.put(layer, queries)
        for row, owned in self._seen:
            tracked = self._requests.setdefault(row.request_id, Tracked())
            part = queries[row.first_query : row.first_query + row.new_tokens]
            observed = tracked.observed.get(layer)
            assert self._compactor is not None
            view = self._compactor.views.view(
                layer, owned, row.after_tokens, part.transpose(0, 1), observed
            )
            tracked.observed[layer] = self.policy.observe(view)

    def end_step(self) -> None:
        """Run the compactions that this step completed. Call it when all layers have
        attended, or as the next step begins (``compacts_late``)."""
        due_now, self._due, self._leaving = self._due, [], []
        if self.zooming is not None:
            self.zooming.end_step(self._prompts)
        if due_now:
            self._compact(due_now)

    def _owned(self, row: Row, blocks: torch.Tensor) -> PageList:
        assert self._compactor is not None
        tracked = self._requests.get(row.request_id)
        return self._compactor.owned(row, blocks, tracked.resident if tracked else None)

    def _compact(self, due_now: Sequence[Due]) -> None:
        """Probe for all requests that are due, together, then compact each."""
        assert self._compactor is not None
        began = time.perf_counter()
        for due in due_now:
            self._requests.setdefault(due.row.request_id, Tracked())
        self._probe(due_now)
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

    def _probe(self, due_now: Sequence[Due]) -> None:
        if self.prober is None:
            return
        assert self._compactor is not None
        asks = []
        for due in due_now:
            name = due.row.request_id
            prompt, patched = self._prompts.get(name, ((), ()))
            tracked = self._requests[name]
            asks.append(self._compactor.asked(due, tracked, prompt, patched))
        self.prober.run(asks)
        for due, asked in zip(due_now, asks, strict=True):
            self._requests[due.row.request_id].observed = asked.observed

    # -- sessions: called outside of steps, whose tensors they touch -------------

    def tracked(self, request_id: str) -> Tracked:
        """What is known of a request."""
        return self._requests.get(request_id, Tracked())

    def adopt(
        self,
        request_id: str,
        prompt_tokens: int,
        tracked: Tracked,
        tokens: int,
        blocks: torch.Tensor,
    ) -> None:
        """Let a request go on from a cache that lies in its blocks; call before its
        first step and after ``learn``. Compacts it if that is due by now.

        Args:
            tokens: how many there are.
            blocks: int64, physical ids, from its first resident block on.
        """
        if tracked != Tracked():
            self._requests[request_id] = tracked
        plan = self._plan_of(request_id, prompt_tokens)
        due = plan.due(tracked.compacted_at, tokens)
        if due is not None:
            holes = tracked.restored.zone.start if tracked.restored else 0
            row = Row(request_id, prompt_tokens, tokens - 1, 1, 0)
            first = plan.window_start(tokens, self.policy.queries_needed)
            table = torch.cat([blocks.new_zeros(holes), blocks])
            self._compact([Due(row, due, first, table)])

    # -- requests that go ----------------------------------------------------

    def finish(self, request_ids: Iterable[str]) -> None:
        """Drop everything about finished or aborted requests."""
        for request_id in request_ids:
            self.forget([request_id])
            self._prompts.pop(request_id, None)
            self._turn_ends.pop(request_id, None)

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
                self.tables.leave(tracked.resident.seat)

    @property
    def num_tracked(self) -> int:
        """Requests that this worker holds any state of."""
        return len({*self._requests, *self._prompts, *self._turn_ends})

    def check_integrity(self) -> None:
        """Every compacted request has exactly one seat, and no seat is lost."""
        if self.tables is None:  # no step has run yet
            assert not self._requests, "state without a heap"
            return
        seats = [t.resident.seat for t in self._requests.values() if t.resident]
        assert len(set(seats)) == len(seats), f"seats shared: {sorted(seats)}"
        assert self.tables.seats_taken == len(seats), "seats leaked"
        for holder in (self.retrieval, self.zooming):
            if holder:
                holder.check_integrity()
                assert holder.num_requests <= len(seats), "state of somebody unseated"

    # -- observability ---------------------------------------------------------

    def take_compression_seconds(self) -> list[float]:
        """Durations of compactions since the last call."""
        taken, self._seconds = self._seconds, []
        return taken
