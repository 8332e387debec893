"""Carries out compactions: scores, choice, moves, and a new seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.engine.choice import choose_slots
from vllm_kvplugins.engine.compaction import CompactedPages, compact
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import PageTables
from vllm_kvplugins.engine.probing import Prober, ProbeRequest
from vllm_kvplugins.engine.requests import (
    DueCompaction,
    PageList,
    RequestState,
    Resident,
    Row,
)
from vllm_kvplugins.engine.retrieval.controller import RetrievalController
from vllm_kvplugins.engine.scores import UnscoredTokens, slot_scores
from vllm_kvplugins.engine.views import Views
from vllm_kvplugins.policies.base import KVCachePolicy


@dataclass(frozen=True, slots=True)
class Compactor:
    """Compacts requests of one worker, once its heap is known.

    Attributes:
        retrieval: for policies that offload.
    """

    policy: KVCachePolicy
    heap: Heap
    views: Views
    tables: PageTables
    retrieval: RetrievalController | None
    unscored: UnscoredTokens = field(default_factory=UnscoredTokens)

    def owned(
        self, row: Row, blocks: torch.Tensor, resident: Resident | None
    ) -> PageList:
        """All pages of a request after this step, its partial last one included.

        Args:
            blocks: int64, physical ids; those in front of the tail are stale.
        """
        first = resident.tail_block if resident else 0
        used = -(-row.after_tokens // self.heap.layout.block_size)
        plain = PageList.of_blocks(self.heap, blocks[first:used], first)
        if resident is None:
            return plain
        return plain.after(
            *self.tables.retained(resident.slot_index), resident.positions
        )

    def probe(
        self,
        prober: Prober,
        due_now: Sequence[DueCompaction],
        requests: Mapping[str, RequestState],
        prompts: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    ) -> None:
        """Run the probes of all requests that are due, together.

        Args:
            requests: what is known of them; get what the policy observed.
            prompts: per request the prompt and the patched prompt.
        """
        asks = []
        for due in due_now:
            name = due.row.request_id
            prompt, patched = prompts.get(name, ((), ()))
            asks.append(self.asked(due, requests[name], prompt, patched))
        prober.run(asks)
        for due, asked in zip(due_now, asks, strict=True):
            requests[due.row.request_id].observed = asked.observed

    def asked(
        self,
        due: DueCompaction,
        tracked: RequestState,
        prompt: Sequence[int],
        patched: Sequence[int],
    ) -> ProbeRequest:
        """What the prober needs to know about a request.

        Args:
            prompt: token ids.
            patched: the request's patched prompt; empty = none.
        """
        row = due.row
        owned = self.owned(row, due.blocks, tracked.resident)
        since = tracked.compacted_at
        return ProbeRequest(prompt, owned, since, row.after_tokens, patched)

    def run(self, due: DueCompaction, tracked: RequestState) -> torch.Tensor:
        """Compact a request.

        Args:
            tracked: what is known of it; gets its new retained region.

        Returns:
            int32 [rows, slots], RoPE positions in the retained region, -1 unused.
        """
        row, resident, compaction = due.row, tracked.resident, due.compaction
        size = self.heap.layout.block_size
        if self.retrieval is not None and resident is not None:
            # the retained region's positions say what was fetched last
            self.retrieval.refresh_positions(row.request_id, resident.positions)
        owned = self.owned(row, due.blocks, resident)
        # the partial last page is the tail; it does not compete
        competing = owned.owned - int(row.after_tokens % size > 0)
        fixed = torch.zeros_like(competing)
        if compaction.fixed_blocks:
            assert resident is not None, "nothing was kept before"
            fixed = self.tables.retained(resident.slot_index)[1]
        scores = slot_scores(
            self.policy, self.views, due, owned, fixed, competing, tracked
        )
        room = (len(compaction.retained) - compaction.fixed_blocks) * size
        scores = self.unscored.settle(self.policy.name, row.request_id, scores, room)
        keep, counts = choose_slots(
            self.policy.page_allocator(), compaction, scores, competing, fixed, size
        )
        most = int(competing.max())
        retained = due.blocks[compaction.retained.start : compaction.retained.stop]
        after = compact(
            keep,
            counts,
            owned.pages[:, :most],
            competing,
            owned.positions[:, : most * size],
            # the retained region's pages, whoever owns them now
            self.heap.page_ids(retained).reshape(-1),
        )
        self.heap.apply(after)
        self._settle(due, tracked, after)
        return after.positions

    def _settle(
        self, due: DueCompaction, tracked: RequestState, after: CompactedPages
    ) -> None:
        """Seat the request on its new pages; from now on it reads only these."""
        before, tail_block = tracked.resident, due.compaction.retained.stop
        tracked.resident = Resident(
            self.tables.assign(after.pages, after.counts, tail_block),
            due.compaction.at_tokens,
            tail_block,
            after.positions,
        )
        if before is not None:  # not earlier: a request whose seat is gone owns none
            self.tables.leave(before.slot_index)
        if self.retrieval is not None:
            self.retrieval.settle(due.row.request_id, after.pages, after.positions)
