"""State of single requests on a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.windows import StepQueries, Window
from vllm_kvplugins.plan.geometry import Geometry, ToolLoop
from vllm_kvplugins.plan.residency_plan import Compaction
from vllm_kvplugins.policies.base import KVCachePolicy


@dataclass(slots=True)
class Row:
    """One request in one step.

    Attributes:
        prompt_tokens: length of its prompt.
        computed_tokens: tokens computed before the step.
        new_tokens: tokens computed by the step.
        first_query: index of its first token among the step's tokens.
        draft_tokens: how many of the newest tokens are drafts of speculative decoding,
            which the model may reject.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    new_tokens: int
    first_query: int
    draft_tokens: int = 0

    @property
    def after_tokens(self) -> int:
        """Tokens computed after the step, drafts included."""
        return self.computed_tokens + self.new_tokens

    @property
    def accepted_tokens(self) -> int:
        """Tokens computed after the step if the model rejects all drafts."""
        return self.after_tokens - self.draft_tokens

    def since(self, tokens: int) -> Row:
        """The row without the step's tokens before position ``tokens``."""
        skipped = tokens - self.computed_tokens
        if skipped <= 0:
            return self
        return replace(
            self,
            computed_tokens=self.computed_tokens + skipped,
            new_tokens=self.new_tokens - skipped,
            first_query=self.first_query + skipped,
        )


class RequestPrompts:
    """Prompts of live requests, as far as the policy needs them.

    Attributes:
        tokens: per request, token ids of the prompt and of the patched prompt; only
            for policies that read them.
    """

    def __init__(self, policy: KVCachePolicy) -> None:
        self._policy = policy
        self.tokens: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        self._turn_ends: dict[str, tuple[int, ...]] = {}
        self._loops: dict[str, tuple[ToolLoop, ...]] = {}
        self._shared_blocks: dict[str, int] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        turn_ends: Sequence[int] | None,
        patched_prompt: Sequence[int],
        shared_blocks: int = 0,
        loop_ends: Sequence[int] | None = None,
    ) -> None:
        """Add a new request.

        Args:
            turn_ends: token counts at which turns end, if the request sent them.
            shared_blocks: blocks of its shared prefix.
            loop_ends: token counts at which parts of its tool loops end, if the request
                sent them.
        """
        policy = self._policy
        if policy.probing is not None or policy.spans is not None:
            self.tokens[request_id] = prompt, patched_prompt
        if policy.turns is not None:
            ends = policy.turns.turn_ends(prompt, turn_ends)
            self._turn_ends[request_id] = ends
            loops = policy.turns.tool_loops(prompt, ends, loop_ends)
            if loops:
                self._loops[request_id] = loops
        if shared_blocks:
            self._shared_blocks[request_id] = shared_blocks

    def turn_ends(self, request_id: str) -> tuple[int, ...]:
        """Token counts at which turns of the prompt end; empty without turns."""
        return self._turn_ends.get(request_id, ())

    def loops(self, request_id: str) -> tuple[ToolLoop, ...]:
        """Tool loops of the prompt; empty without turns."""
        return self._loops.get(request_id, ())

    def shared_blocks(self, request_id: str) -> int:
        """Blocks of the shared prefix; 0 without one."""
        return self._shared_blocks.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self.tokens.pop(request_id, None)
        self._turn_ends.pop(request_id, None)
        self._loops.pop(request_id, None)
        self._shared_blocks.pop(request_id, None)

    @property
    def request_ids(self) -> set[str]:
        """Requests that have an entry."""
        return {*self.tokens, *self._turn_ends, *self._loops, *self._shared_blocks}


@dataclass(slots=True)
class Resident:
    """The shared prefix and the retained region of a request that has been compacted.

    Attributes:
        slot_index: row of the request in the page tables.
        compacted_at: token count at its last compaction.
        tail_block: first logical block behind the retained region.
        positions: int32 [rows, slots], RoPE position per slot of the prefix and then of
            the retained region, -1 in unused slots.
    """

    slot_index: int
    compacted_at: int
    tail_block: int
    positions: torch.Tensor


@dataclass(slots=True, eq=False)
class UnobservedStep:
    """A step with drafts of one request, as the policy observes it in the next step.

    Attributes:
        queries: of the step.
        first: index of the row's first query among those that ``queries`` keeps.
        blocks: int64, physical ids of the request's blocks.
    """

    row: Row
    queries: StepQueries
    first: int
    blocks: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of its blocks' ids and of its own part of the step's queries."""
        kept = self.queries.queries
        per_token = 0 if kept is None else int(kept[:, :1].nbytes)
        return self.row.new_tokens * per_token + int(self.blocks.nbytes)


@dataclass(slots=True)
class RequestState:
    """The runtime's state of one request; dropped when the request is forgotten.

    Attributes:
        resident: its retained region; None before the first compaction.
        window: its newest queries, if they are kept.
        observed: per layer, what the policy's ``observe`` returned last.
        restored: the compaction of the session that it continues.
        lost: its session failed to load, so its KV is invalid. Discard its outputs
            until the scheduler preempts it and recomputes it.
        unobserved: a step with drafts that the policy observes once it is known which
            of them the model accepted.
        lineage: what its session wants to know when the request ends; the engine does
            not read it.
    """

    resident: Resident | None = None
    window: Window | None = None
    observed: dict[int, Any] = field(default_factory=dict)
    restored: Compaction | None = None
    lost: bool = False
    unobserved: UnobservedStep | None = None
    lineage: Any = None

    def keep_queries(self, row: Row, since: int, step: StepQueries) -> None:
        """Keep a step's queries from the token at position ``since`` on."""
        start = max(row.computed_tokens, since)
        if start >= row.after_tokens:
            return
        if self.window is not None:
            self.window.drop_rejected(start)
        if self.window is None or self.window.stop != start:
            self.window = Window(start, start)
        first = row.first_query + start - row.computed_tokens
        self.window.add(step, first, row.after_tokens - start, row.draft_tokens)
        self.window.drop_before(since)

    @property
    def compacted_at(self) -> int:
        """Token count at its last compaction; 0 if there was none."""
        return self.resident.compacted_at if self.resident else 0


@dataclass(frozen=True, slots=True)
class PageList:
    """The pages that a request owns at some token count, all layers and heads.

    Attributes:
        pages: int64 [rows, max pages], shared prefix and retained region first, then
            plain blocks in order; row r uses the first ``owned[r]``.
        owned: int64 [rows].
        positions: int32 [rows, max pages * block_size]; -1 in unused slots.
    """

    pages: torch.Tensor
    owned: torch.Tensor
    positions: torch.Tensor

    @staticmethod
    def of_blocks(heap: Heap, blocks: torch.Tensor, first_block: int) -> PageList:
        """Plain blocks, whose logical indices start at ``first_block``."""
        size = heap.layout.block_size
        pages = heap.page_ids(blocks)
        start = first_block * size
        positions = torch.arange(
            start, start + blocks.numel() * size, dtype=torch.int32, device=pages.device
        )
        owned = torch.full(
            (heap.rows,), blocks.numel(), dtype=torch.int64, device=pages.device
        )
        return PageList(pages, owned, positions.expand(heap.rows, -1))

    def after(
        self, pages: torch.Tensor, counts: torch.Tensor, positions: torch.Tensor
    ) -> PageList:
        """These pages behind a retained region of ``counts`` pages per row."""
        size = self.positions.shape[1] // self.pages.shape[1]
        return PageList(
            _append_rows(pages, counts, self.pages),
            counts + self.owned,
            _append_rows(positions, counts * size, self.positions, unused=-1),
        )


def _append_rows(
    first: torch.Tensor, counts: torch.Tensor, second: torch.Tensor, unused: int = 0
) -> torch.Tensor:
    """Rows of ``second`` directly behind the ``counts`` used entries of ``first``."""
    longest = int(counts.max())
    place = torch.arange(longest + second.shape[1], device=first.device)
    offset = place - counts[:, None]
    out = second.gather(1, offset.clamp(0, second.shape[1] - 1))
    out.masked_fill_(offset >= second.shape[1], unused)
    out[:, :longest] = torch.where(
        offset[:, :longest] < 0, first[:, :longest], out[:, :longest]
    )
    return out


@dataclass(slots=True)
class DueCompaction:
    """A compaction that runs when the current step has ended.

    Attributes:
        first_query: position of the first query that scores it; the step's last query
            is the last.
        blocks: int64, physical ids of the request's blocks; entries in front of its
            tail are stale.
    """

    row: Row
    compaction: Compaction
    first_query: int
    blocks: torch.Tensor


@dataclass(slots=True)
class Record:
    """A compaction as ``explain`` shows it.

    Attributes:
        kept_positions: per layer, per KV head: positions kept, ascending.
        computed_tokens: number of tokens computed by then; later ones are all kept.
    """

    request_id: str
    prompt_tokens: int
    kept_positions: list[list[list[int]]]
    computed_tokens: int

    @staticmethod
    def of(due: DueCompaction, positions: torch.Tensor, geometry: Geometry) -> Record:
        """The record of a compaction: the positions of retained region and tail."""
        tail_start = due.compaction.retained.stop * geometry.block_size
        tail = list(range(tail_start, due.row.after_tokens))
        shape = (geometry.num_layers, geometry.num_kv_heads, -1)
        kept = [
            [sorted(p for p in head if p >= 0) + tail for head in layer]
            for layer in positions.view(shape).tolist()
        ]
        row = due.row
        return Record(row.request_id, row.prompt_tokens, kept, row.after_tokens)
