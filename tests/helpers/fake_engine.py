"""A stand-in for vLLM around ``PolicyRuntime``: scheduler, cache and attention.

A request's keys, values and queries are random numbers that depend only on its name and
the position, so that the same request can run among different others. All memory that
no live request owns is NaN at every moment. Requests with the same shared prefix have
the same tokens there, and hold the same blocks. Each step attends twice: over the pages
in the page table, and over a dense copy of the request in which every (layer, KV head)
sees the positions that it kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_attention import attend
from fake_text import POSITIONS, encode, make_rotary

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.heap import Fp8, Heap
from vllm_kvplugins.engine.probing import ProbeModel
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.ops import scatter_tokens
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry, ToolLoop
from vllm_kvplugins.plan.residency_plan import Compaction, ResidencyPlan
from vllm_kvplugins.scoring.logits import LogitRules

LAYERS, KV_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 8
SCALE = HEAD_DIM**-0.5
# [layer][KV head][compaction]: ascending positions
Kept = list[list[list[int]]]
# keys and values
Parts = tuple[torch.Tensor, ...]


@dataclass
class Request:
    """One request: its tokens, and the scheduler's state of it.

    Attributes:
        keys, values: [LAYERS, KV_HEADS, tokens, HEAD_DIM], the dense copy.
        queries: [LAYERS, tokens, KV_HEADS * GROUP, HEAD_DIM].
        visible: bool [LAYERS, KV_HEADS, tokens], not yet dropped.
        table: block ids by logical index; entries of freed blocks are stale.
        held: logical indices that it holds.
        kept: what its compactions kept, since it last started.
        turn_ends, loops: of its prompt.
        restored: the compaction behind the cache that it started from.
        patched: its patched prompt.
        prefix: name of its shared prefix; "": none.
        shared: blocks of that prefix.
    """

    name: str
    prompt: int
    answer: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    visible: torch.Tensor
    computed: int = 0
    generated: int = 0
    table: list[int] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    kept: list[Kept] = field(default_factory=list)
    turn_ends: tuple[int, ...] = ()
    loops: tuple[ToolLoop, ...] = ()
    restored: Compaction | None = None
    patched: tuple[int, ...] = ()
    prefix: str = ""
    shared: int = 0

    @staticmethod
    def make(name: str, prompt: int, answer: int) -> Request:
        rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        tokens = prompt + answer
        shape = (LAYERS, KV_HEADS, tokens, HEAD_DIM)
        # flat and peaked heads, so that adaptive allocators have a choice
        peak = torch.tensor([0.3, 4.0]).view(1, KV_HEADS, 1, 1)
        keys = torch.randn(shape, generator=rng) * peak
        values = torch.randn(shape, generator=rng)
        shape = (LAYERS, tokens, KV_HEADS * GROUP, HEAD_DIM)
        queries = torch.randn(shape, generator=rng)
        visible = torch.ones(LAYERS, KV_HEADS, tokens, dtype=torch.bool)
        return Request(name, prompt, answer, keys, values, queries, visible)

    @property
    def known(self) -> int:
        """Number of tokens that can be computed: the prompt and the generated ones."""
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return self.generated == self.answer

    def begin_with(self, other: Request, tokens: int) -> None:
        """Replace the first tokens by those of another request."""
        for plane in ("keys", "values"):
            getattr(self, plane)[:, :, :tokens] = getattr(other, plane)[:, :, :tokens]
        self.queries[:, :tokens] = other.queries[:, :tokens]

    def start_over(self) -> None:
        self.computed, self.table, self.held, self.kept = 0, [], set(), []
        self.visible[:] = True


class FakeSurprisal:
    """The fake model's hidden states: one number per token."""

    def states(self, first: int, count: int) -> torch.Tensor:
        return torch.zeros(count, 1)

    def surprisal(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert len(states) == len(targets)
        named = [f"surprise {token}".encode() for token in targets.tolist()]
        return torch.tensor([zlib.crc32(name) / 2**30 for name in named])


def output_weights() -> torch.Tensor:
    """The fake model's output projection, the same in all layers."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(KV_HEADS * GROUP, HEAD_DIM, 24, generator=generator)


def fp8_of_drafter(fp8: Fp8) -> Fp8:
    """The drafter's own scales: its elements are others than the model's."""
    scales = [
        tuple(3.0 * scale for scale in each)
        for each in (fp8.key_scales, fp8.value_scales)
    ]
    return Fp8(fp8.dtype, fp8.read_dtype, *scales)


def fp8_elements(fp8: Fp8, keys: torch.Tensor, values: torch.Tensor) -> Parts:
    """Elements of an fp8 cache, uint8 [LAYERS, ...] as given."""
    return tuple(
        torch.stack(
            [
                (layer / scale).to(fp8.dtype).view(torch.uint8)
                for layer, scale in zip(part, scales, strict=True)
            ]
        )
        for part, scales in ((keys, fp8.key_scales), (values, fp8.value_scales))
    )


class FakeEngine:
    """Runs requests under a policy, and checks the cache in every step.

    Args:
        drafts: there is a drafter, which is a copy of the model with every KV head
            twice.

    Attributes:
        draft_heap: the cache of the drafter's layers; None without a drafter.
        fetches: dropped tokens may come back.
        free: ids of free blocks; block 0 is the null block.
        steps: how many have run; every ``attend_every``-th attends.
        table: page table of the last step.
    """

    def __init__(
        self,
        policy: Any,
        block: int,
        blocks: int,
        sessions: bool = False,
        rules: Sequence[LogitRules] = (),
        fp8: Fp8 | None = None,
        drafts: bool = False,
    ) -> None:
        self.block, self.blocks = block, blocks
        layout = PageLayout.transposed_keys(block, HEAD_DIM)
        rows = LAYERS * blocks * KV_HEADS
        pages = torch.full((rows, layout.page_elems), torch.nan)
        self.unowned = torch.nan
        if fp8 is not None:
            self.unowned = 0x7F  # NaN in e4m3 and e5m2
            pages = torch.full(pages.shape, 0x7F, dtype=torch.uint8)
        self.heap = Heap(pages, layout, LAYERS, blocks, KV_HEADS, fp8)
        self.draft_heap = None
        if drafts:
            more = pages.new_full((2 * rows, layout.page_elems), self.unowned)
            own = None if fp8 is None else fp8_of_drafter(fp8)
            self.draft_heap = Heap(more, layout, LAYERS, blocks, 2 * KV_HEADS, own)
        size = pages.itemsize
        per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * size
        geometry = Geometry(block, LAYERS, KV_HEADS, per_token, HEAD_DIM, size)
        self.runtime = PolicyRuntime(parse_policy(policy), geometry, sessions)
        model = ProbeModel(self._run_probe, encode, POSITIONS, max_tokens=128)
        rotary = make_rotary(HEAD_DIM)
        scales = [SCALE] * LAYERS
        self.runtime.bind_heap(
            self.heap,
            scales,
            rotary,
            model,
            FakeSurprisal(),
            rules,
            self.draft_heap,
            output_weights=[output_weights] * LAYERS,
        )
        self.runtime.records = []
        self.fetches = self.runtime.policy.retrieval is not None
        self.free = list(range(blocks - 1, 0, -1))
        self.requests: dict[str, Request] = {}
        # the worker learns of them with the next step
        self.gone: set[str] = set()
        self.preempted: set[str] = set()
        # Of each shared prefix: the blocks that requests hold, in order, and which of
        # them are computed.
        self.prefixes: dict[str, list[int]] = {}
        self.prefix_tokens: dict[str, int] = {}
        self.steps, self.attend_every = 0, 1

    @property
    def retrieval(self) -> Any:
        """The runtime's only extension, of a retriever."""
        (extension,) = self.runtime.extensions
        return extension

    @property
    def spans(self) -> Any:
        """The runtime's only extension, of a span policy."""
        return self.retrieval

    # -- requests ---------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: int,
        answer: int,
        turn_ends: tuple[int, ...] = (),
        patched: tuple[int, ...] = (),
        prefix: str = "",
        shared: int = 0,
        loop_ends: tuple[int, ...] = (),
    ) -> Request:
        """A new request.

        Args:
            prefix: requests with the same name share their first ``shared`` blocks.
        """
        request = self.requests[name] = Request.make(name, prompt, answer)
        self._round(request)
        request.turn_ends, request.patched = turn_ends, patched
        request.loops = ToolLoop.of_ends(turn_ends, loop_ends)
        request.prefix, request.shared = prefix, shared
        if shared:
            tokens = shared * self.block
            request.begin_with(Request.make(prefix, tokens, 0), tokens)
        self.runtime.add_request(
            name, range(prompt), turn_ends, patched, shared, loop_ends
        )
        self._hit(request)
        return request

    def _round(self, request: Request) -> None:
        """Round keys and values to what an fp8 cache can hold."""
        fp8 = self.heap.fp8
        if fp8 is None:
            return
        parts = request.keys, request.values
        for part, elements, scales in zip(
            parts,
            fp8_elements(fp8, *parts),
            (fp8.key_scales, fp8.value_scales),
            strict=True,
        ):
            for layer, scale in enumerate(scales):
                part[layer] = fp8.dequantized(elements[layer], scale)

    def _hit(self, request: Request) -> None:
        """Let a request start behind the part of its prefix that others computed."""
        computed = self.prefix_tokens.get(request.prefix, 0)
        for index in range(computed // self.block if request.shared else 0):
            request.held.add(index)
            request.table.append(self.prefixes[request.prefix][index])
            request.computed = len(request.table) * self.block

    def plan(self, name: str) -> ResidencyPlan:
        request = self.requests[name]
        return self.runtime.plan(
            request.prompt,
            request.turn_ends,
            request.restored,
            request.shared,
            request.loops,
        )

    def remove(self, name: str) -> Request:
        """The request finishes or is aborted."""
        request = self.requests.pop(name)
        self._release(request, set(request.held))
        self.gone.add(name)
        return request

    def preempt(self, name: str) -> None:
        """Preempt the request: it loses its blocks and keeps its generated tokens."""
        request = self.requests[name]
        self._release(request, set(request.held))
        request.start_over()
        self.preempted.add(name)
        self._hit(request)

    def _release(self, request: Request, indices: set[int]) -> None:
        request.held -= indices
        others = [each for each in self.requests.values() if each is not request]
        in_use = {other.table[index] for other in others for index in other.held}
        freed = [request.table[index] for index in indices]
        freed = [block for block in freed if block not in in_use]
        if set(freed) & set(self.prefixes.get(request.prefix, ())):
            kept = [b for b in self.prefixes[request.prefix] if b in in_use]
            self.prefixes[request.prefix] = kept
            computed = self.prefix_tokens.get(request.prefix, 0)
            tokens = min(computed, len(kept) * self.block)
            self.prefix_tokens[request.prefix] = tokens
        self.free += freed
        for pages in self.pages:
            pages[:, freed] = self.unowned

    @property
    def pages(self) -> list[torch.Tensor]:
        """[LAYERS, blocks, KV heads, page_elems], of the model and of a drafter."""
        heaps = [self.heap, self.draft_heap]
        return [
            heap.pages.view(LAYERS, self.blocks, heap.num_kv_heads, -1)
            for heap in heaps
            if heap is not None
        ]

    # -- steps ------------------------------------------------------------

    def step(self, chunks: dict[str, int]) -> None:
        """One step of these requests, with at most this many new tokens each."""
        self.steps += 1
        self.runtime.finish(self.gone)
        self.runtime.forget(self.preempted)
        self.gone, self.preempted = set(), set()
        rows = self._schedule(chunks)
        table = self._block_table(rows)
        lens = torch.tensor([row.after_tokens for row in rows])
        flat = self.table = self.runtime.begin_step(rows, lens, table)
        for layer in range(LAYERS):
            self.runtime.before_layer(layer, self._queries(rows, layer))
        for index, row in enumerate(rows):
            span = slice(index * KV_HEADS, (index + 1) * KV_HEADS)
            pages = flat.pages[:, span].long()
            if len(flat.pages) == 1:
                layer = torch.arange(LAYERS)[:, None, None]
                pages = pages + layer * self.blocks * KV_HEADS
            lengths = flat.lengths[:, span].expand(LAYERS, -1)
            self._check_ownership(self.requests[row.request_id], pages, lengths)
            if self.steps % self.attend_every == 0:
                self._check_attention(row, pages, lengths)
        for layer in range(LAYERS):
            self.runtime.after_layer(layer, self._queries(rows, layer))
        due = [self._due(row) for row in rows]
        before = self.heap.pages.clone() if any(due) else None
        self.runtime.end_step()
        if before is not None:
            self._check_written(rows, before)
        self._settle(rows)
        self._check_state()

    def _schedule(self, chunks: dict[str, int]) -> list[Row]:
        """End chunks at compactions, allocate blocks, and write the new keys and
        values.
        """
        rows: list[Row] = []
        for name, chunk in chunks.items():
            request = self.requests[name]
            plan = self.plan(name)
            chunk = min(chunk, request.known - request.computed)
            new = plan.clip_chunk(request.computed, chunk)
            assert new > 0, "a step without tokens"
            first = rows[-1].first_query + rows[-1].new_tokens if rows else 0
            rows.append(Row(name, request.prompt, request.computed, new, first))
            while len(request.table) * self.block < rows[-1].after_tokens:
                index = len(request.table)
                request.held.add(index)
                shared = self.prefixes.setdefault(request.prefix, [])
                if index < request.shared and index < len(shared):
                    request.table.append(shared[index])
                    continue
                request.table.append(self.free.pop())
                if index < request.shared:
                    shared.append(request.table[index])
            self._write(request, request.computed, rows[-1].after_tokens)
        return rows

    def _write(self, request: Request, start: int, stop: int) -> None:
        parts = tuple(p[:, :, start:stop] for p in (request.keys, request.values))
        self._scatter(self.heap, request, start, parts)
        if self.draft_heap is not None:
            twice = tuple(part.repeat_interleave(2, 1) for part in parts)
            self._scatter(self.draft_heap, request, start, twice)

    def _scatter(self, heap: Heap, request: Request, start: int, parts: Parts) -> None:
        """Write keys and values of a request into a heap.

        Args:
            parts: two float32 [LAYERS, KV heads, tokens, HEAD_DIM].
        """
        if heap.fp8 is not None:
            parts = fp8_elements(heap.fp8, *parts)
        at = torch.arange(start, start + parts[0].shape[2])
        block = torch.tensor(request.table)[at // self.block]
        pages = heap.page_ids(block).reshape(-1)
        slots = (at % self.block).repeat(heap.rows)
        keys, values = (part.reshape(-1, HEAD_DIM) for part in parts)
        scatter_tokens(heap.kv, pages, slots, keys, values)

    def _due(self, row: Row) -> Compaction | None:
        plan = self.plan(row.request_id)
        return plan.due(row.computed_tokens, row.after_tokens)

    def _block_table(self, rows: list[Row]) -> torch.Tensor:
        tables = [self.requests[row.request_id].table for row in rows]
        out = torch.zeros(len(rows), max(map(len, tables)), dtype=torch.int32)
        for index, table in enumerate(tables):
            out[index, : len(table)] = torch.tensor(table)
        return out

    def _queries(self, rows: list[Row], layer: int) -> torch.Tensor:
        parts = [
            self.requests[row.request_id].queries[layer][
                row.computed_tokens : row.after_tokens
            ]
            for row in rows
        ]
        return torch.cat(parts)

    def _run_probe(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """The fake model's forward pass:

        numbers that depend on token, position and layer.
        """
        prober = self.runtime.prober
        assert prober is not None
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)  # of q, k and v
        rows = []
        for token, position in zip(token_ids.tolist(), positions.tolist(), strict=True):
            seed = zlib.crc32(f"{token} {position}".encode())
            rng = torch.Generator().manual_seed(seed)
            rows.append(torch.randn(LAYERS, sum(heads), HEAD_DIM, generator=rng))
        for layer, tokens in enumerate(torch.stack(rows, 1)):
            output = prober.attend(layer, *tokens.split(heads, dim=1))
            assert output.isfinite().all(), "a probe read memory that no request owns"

    def _settle(self, rows: list[Row]) -> None:
        """Free what the plan frees; sample for completely computed requests."""
        records, self.runtime.records = self.runtime.records or [], []
        compacted = {record.request_id: record for record in records}
        assert len(compacted) == len(records), "compacted twice in one step"
        for row in rows:
            request = self.requests[row.request_id]
            plan = self.plan(row.request_id)
            request.computed = row.after_tokens
            if request.shared:
                tokens = min(request.computed, request.shared * self.block)
                before = self.prefix_tokens.get(request.prefix, 0)
                self.prefix_tokens[request.prefix] = max(before, tokens)
            due = self._due(row)
            record = compacted.pop(row.request_id, None)
            assert (due is None) == (record is None), "compacted off the plan"
            if due is not None and record is not None:
                held = request.shared + len(due.retained)
                self._check_kept(request, record.kept_positions, held)
                retained = range(due.freed.start, due.freed.stop)
                self._release(request, set(retained) & request.held)
            assert len(request.held) == plan.resident_blocks(request.computed)
            if request.computed == request.known and not request.done:
                request.generated += 1
        assert not compacted, "a compaction of a request that was not in the step"

    # -- checks -----------------------------------------------------------

    def _check_kept(self, request: Request, kept: Kept, retained_blocks: int) -> None:
        """Exactly M * L * H pages, of tokens that were resident, each once; all tokens
        of the shared prefix are among them.
        """
        evicted_now = torch.zeros_like(request.visible)
        total = 0
        for layer, heads in enumerate(kept):
            for head, positions in enumerate(heads):
                assert positions == sorted(set(positions)), "a token twice"
                shared = request.shared * self.block
                assert positions[:shared] == list(range(shared)), "the prefix was cut"
                evicted_now[layer, head, positions] = True
                total += len(positions)
        tail = request.computed % self.block
        pages = retained_blocks * LAYERS * KV_HEADS
        assert total == pages * self.block + tail * LAYERS * KV_HEADS
        came_back = (evicted_now & ~request.visible).any()
        assert self.fetches or not came_back, "a dropped token came back"
        assert not evicted_now[..., request.computed :].any(), "a token of the future"
        evicted_now[..., request.computed :] = True
        request.visible = evicted_now
        request.kept.append(kept)

    def _check_written(self, rows: list[Row], before: torch.Tensor) -> None:
        """Compactions write only to their retained regions.

        The prefix cache may give the freed blocks to other requests.
        """
        zones = []
        for row in rows:
            due = self._due(row)
            if due is not None:
                table = self.requests[row.request_id].table
                zones += table[due.retained.start : due.retained.stop]
        # compare bits, because NaN is not equal to itself
        changed = self.heap.pages.view(torch.int32) != before.view(torch.int32)
        changed = changed.view(LAYERS, self.blocks, -1).any(-1).any(0)
        assert set(changed.nonzero()[:, 0].tolist()) <= set(zones), "wrote elsewhere"

    def _check_ownership(
        self, request: Request, pages: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """The page tables hold exactly the pages of the request's blocks."""
        used = -(-lengths // self.block)
        place = torch.arange(pages.shape[-1])
        named = pages[place < used[..., None]].sort().values
        blocks = torch.tensor([request.table[index] for index in request.held])
        owned = self.heap.page_ids(blocks).reshape(-1).sort().values
        assert torch.equal(named, owned), f"{request.name} reads other pages"

    def _check_attention(
        self, row: Row, pages: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """Attention over pages equals attention over the dense copy, and is finite
        although all other memory is NaN.
        """
        request, after = self.requests[row.request_id], row.after_tokens
        queries = request.queries[:, row.computed_tokens : after]
        keys, values = self.gathered(pages)
        if self.fetches:
            self._recognise(request, keys, lengths)
        # query j sees all tokens except the newer ones of the same step
        order = torch.arange(keys.shape[2])
        last = lengths[..., None] - row.new_tokens + torch.arange(row.new_tokens)
        paged = attend(queries, keys, values, order <= last[..., None])
        at = torch.arange(after)
        causal = at <= at[row.computed_tokens :, None]
        seen = request.visible[:, :, None, :after] & causal
        dense = attend(
            queries, request.keys[:, :, :after], request.values[:, :, :after], seen
        )
        assert paged.isfinite().all(), (
            f"{row.request_id} read memory that no request owns"
        )
        assert (paged - dense).abs().max() < 1e-9, f"{row.request_id} attends wrongly"

    def gathered(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of pages, dequantized.

        Args:
            pages: int64 [LAYERS, KV_HEADS, pages].
        """
        keys = [self.heap.keys(layer, each) for layer, each in enumerate(pages)]
        values = [self.heap.values(layer, each) for layer, each in enumerate(pages)]
        return torch.stack(keys), torch.stack(values)

    def _recognise(
        self, request: Request, keys: torch.Tensor, lengths: torch.Tensor
    ) -> None:
        """The tokens that are resident now, where this changes with every query."""
        used = torch.arange(keys.shape[2]) < lengths[..., None]
        same = (keys.unsqueeze(3) == request.keys.unsqueeze(2)).all(-1)
        same &= used[..., None]
        assert torch.equal(same.any(3), used), "a slot holds none of its tokens"
        assert (same.sum(2) <= 1).all(), "a token is resident twice"
        request.visible = same.any(2)

    def _check_state(self) -> None:
        self.runtime.check_integrity()
        assert not self.runtime.unscored_compactions, (
            "a score read memory that no request owns"
        )
        requests = self.requests.values()
        shared = {r.table[i] for r in requests for i in r.held if i < r.shared}
        held = [r.table[i] for r in requests for i in r.held if i >= r.shared]
        held += shared
        assert sorted(self.free + held) == list(range(1, self.blocks))
        for pages in self.pages:
            free = pages[:, self.free]
            unowned = free.isnan() if self.heap.fp8 is None else free == self.unowned
            assert unowned.all(), "a free block was written"

    def check_idle(self) -> None:
        """After the last request, nothing may be left."""
        self.runtime.finish(self.gone)
        self.runtime.check_integrity()
        assert not self.requests
        assert self.runtime.num_requests == 0, "requests leaked in the worker"
        assert len(self.free) == self.blocks - 1, "blocks leaked"
