"""The policy runtime without vLLM: a constructed heap, driven step by step.

The attended keys of a compacted request are read back through its page table and
compared with the keys written before the compaction.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.page_table import FlatTable
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.ops import gather_keys, gather_values
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.streaming_llm import StreamingLLM
from vllm_kvplugins.scoring.selection import keep_top

SEED = 20261121
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 8
BLOCKS, BLOCK = 64, 16
SCALE = HEAD_DIM**-0.5
WINDOW, BUDGET, SINKS = 8, 40, 4

SNAPKV = {"name": "snapkv", "budget": BUDGET, "window": WINDOW, "kernel_size": 3}
STREAMING = {"name": "streaming-llm", "budget": BUDGET, "sinks": SINKS}
POLICIES = [
    SNAPKV,
    SNAPKV | {"allocator": "cross-layer"},
    SNAPKV | {"allocator": "head-adaptive"},
    SNAPKV | {"allocator": "pyramid"},
    STREAMING,
    STREAMING | {"allocator": "pyramid"},
]
policies = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: f"{p['name']}-{p.get('allocator', 'uniform')}"
)


class Bench:
    """A runtime on a heap of random tokens, and its requests.

    Attributes:
        keys, values: [LAYERS, BLOCKS, KV_HEADS, BLOCK, HEAD_DIM], as written.
        blocks: block ids per request.
    """

    def __init__(self, policy: dict[str, Any], seed: int = SEED) -> None:
        print("seed", seed)
        self.rng = torch.Generator().manual_seed(seed)
        shape = (LAYERS, BLOCKS, KV_HEADS, BLOCK, HEAD_DIM)
        self.keys = torch.randn(shape, generator=self.rng)
        # flat and peaked attention, so that adaptive allocators have a choice
        scale = torch.tensor([0.1, 8.0] * LAYERS)
        self.keys *= scale.view(LAYERS, 1, KV_HEADS, 1, 1)
        self.values = torch.randn(shape, generator=self.rng)
        pages = torch.cat([self.keys.flatten(3), self.values.flatten(3)], -1)
        layout = PageLayout.natural(BLOCK, HEAD_DIM)
        heap = Heap(pages.flatten(0, 2).clone(), layout, LAYERS, BLOCKS, KV_HEADS)
        geometry = Geometry(
            BLOCK, LAYERS, KV_HEADS, 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
        )
        self.runtime = PolicyRuntime(parse_policy(policy), geometry)
        self.runtime.bind_heap(heap, [SCALE] * LAYERS, None)
        self.runtime.records = []
        self.heap = heap
        self.free = (torch.randperm(BLOCKS - 1, generator=self.rng) + 1).tolist()
        self.blocks: dict[str, list[int]] = {}
        self.queries: dict[str, torch.Tensor] = {}

    def step(self, *rows: tuple[str, int, int, int]) -> FlatTable:
        """One step of (request, prompt tokens, computed tokens, new tokens)."""
        tables, first = [], 0
        for name, prompt, computed, new in rows:
            own_blocks = self.blocks.setdefault(name, [])
            while len(own_blocks) * BLOCK < computed + new:
                own_blocks.append(self.free.pop())
            tables.append(Row(name, prompt, computed, new, first))
            first += new
        width = max(len(self.blocks[row.request_id]) for row in tables)
        table = torch.zeros(len(tables), width, dtype=torch.int32)
        for index, row in enumerate(tables):
            own_blocks = self.blocks[row.request_id]
            table[index, : len(own_blocks)] = torch.tensor(own_blocks)
        lens = torch.tensor([row.computed_tokens + row.new_tokens for row in tables])
        flat = self.runtime.begin_step(tables, lens, table)
        for layer in range(LAYERS):
            shape = (first, KV_HEADS * GROUP, HEAD_DIM)
            queries = torch.randn(shape, generator=self.rng)
            for row in tables:
                stop = row.first_query + row.new_tokens
                part = queries[row.first_query : stop].transpose(0, 1)
                key = f"{row.request_id}/{layer}"
                before = self.queries.get(key) if row.computed_tokens else None
                both = part if before is None else torch.cat([before, part], 1)
                self.queries[key] = both
            self.runtime.after_layer(layer, queries)
        self.runtime.end_step()
        self.runtime.check_integrity()
        return flat

    @property
    def slot_indices(self) -> int:
        """Ids of compacted requests."""
        assert self.runtime.tables is not None
        return self.runtime.tables.num_slot_indices

    def original(self, plane: torch.Tensor, name: str, layer: int) -> torch.Tensor:
        """[KV_HEADS, slots, HEAD_DIM] of a request as it was written."""
        return plane[layer, self.blocks[name]].transpose(0, 1).flatten(1, 2)

    def prompt_keys(self, name: str, layer: int, prompt: int) -> torch.Tensor:
        return self.original(self.keys, name, layer)[:, :prompt]

    def attended(self, flat: FlatTable, index: int, layer: int, head: int):
        """Keys and values behind a row's page table, in its order."""
        scope = layer if len(flat.pages) > 1 else 0
        base = 0 if len(flat.pages) > 1 else layer * BLOCKS * KV_HEADS
        sequence = index * KV_HEADS + head
        length = int(flat.lengths[scope, sequence])
        used = -(-length // BLOCK)
        pages = flat.pages[scope, sequence, :used].long()[None] + base
        keys = gather_keys(self.heap.kv, pages)[0, :length]
        return keys, gather_values(self.heap.kv, pages)[0, :length]

    def wanted_positions(self, name: str, prompt: int) -> list[list[list[int]]]:
        """Kept prompt positions per layer and head, from whole tensors."""
        policy: Any = self.runtime.policy
        full = prompt // BLOCK * BLOCK
        scores = torch.stack(
            [
                policy.score(
                    LayerView(
                        layer=layer,
                        positions=torch.arange(prompt).expand(KV_HEADS, -1),
                        valid=None,
                        queries=self.queries[f"{name}/{layer}"][
                            :, prompt - WINDOW : prompt
                        ],
                        query_positions=torch.arange(prompt - WINDOW, prompt),
                        scale=SCALE,
                        rotary=None,
                        observed=None,
                        budget_tokens=BUDGET,
                        load_keys=partial(self.prompt_keys, name, layer, prompt),
                        load_values=lambda: pytest.fail("values are not needed"),
                    )
                )[:, :full]
                for layer in range(LAYERS)
            ]
        )
        retained = -(-(BUDGET - prompt % BLOCK) // BLOCK)
        page_counts = torch.full((LAYERS, KV_HEADS), full // BLOCK)
        counts = policy.page_allocator().allocate(scores, retained, BLOCK, page_counts)
        keep = keep_top(scores, counts * BLOCK)
        tail = list(range(full, prompt))
        return [
            [head.nonzero()[:, 0].tolist() + tail for head in layer] for layer in keep
        ]


def sort_rows(tokens: torch.Tensor) -> list[list[float]]:
    return sorted(tokens.tolist())


@policies
def test_the_kept_tokens_are_attended_to_and_no_others(policy):
    bench = Bench(policy)
    prompt = 6 * BLOCK + 5
    bench.step(("a", prompt, 0, 64))
    assert bench.slot_indices == 0
    # "a" ends its prompt next to a decoding request, so its queries come second
    bench.step(("short", 30, 0, 30))
    bench.step(("short", 30, 30, 1), ("a", prompt, 64, prompt - 64))
    assert bench.slot_indices == 1
    expected = bench.wanted_positions("a", prompt)
    (record,) = bench.runtime.records
    assert record.kept_positions == expected
    counts = {len(head) for layer in expected for head in layer}
    assert (len(counts) > 1) == (policy.get("allocator", "uniform") != "uniform")

    generated = 20
    for token in range(generated):
        flat = bench.step(("a", prompt, prompt + token, 1))
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            positions = [*expected[layer][head], *range(prompt, prompt + generated)]
            keys, values = bench.attended(flat, 0, layer, head)
            original = bench.original(bench.keys, "a", layer)[head][positions]
            assert sort_rows(keys) == sort_rows(original)
            original = bench.original(bench.values, "a", layer)[head][positions]
            assert sort_rows(values) == sort_rows(original)


def test_streaming_llm_keeps_sinks_and_the_newest():
    bench = Bench(STREAMING)
    prompt = 6 * BLOCK + 5
    bench.step(("a", prompt, 0, prompt))
    kept = -(-(BUDGET - 5) // BLOCK) * BLOCK
    newest = range(6 * BLOCK - (kept - SINKS), prompt)
    (record,) = bench.runtime.records
    assert record.kept_positions == [[[*range(SINKS), *newest]] * KV_HEADS] * LAYERS


def test_keys_are_read_only_for_policies_that_score_by_them(monkeypatch):
    read = []
    keys = Heap.keys
    monkeypatch.setattr(
        Heap, "keys", lambda heap, *of: read.append(of[0]) or keys(heap, *of)
    )
    for policy, expected in ((STREAMING, []), (SNAPKV, list(range(LAYERS)))):
        bench = Bench(policy)
        bench.step(("a", 6 * BLOCK, 0, 6 * BLOCK))
        assert len(bench.runtime.records) == 1
        assert read == expected, "each layer once, or not at all"


@policies
def test_freed_blocks_are_not_written(policy):
    """The prefix cache may give these blocks to other requests."""
    bench = Bench(policy)
    prompt = 9 * BLOCK + 1
    before = bench.heap.pages.clone()
    bench.step(("a", prompt, 0, prompt))
    pages = bench.heap.pages.view(LAYERS, BLOCKS, -1)
    changed = (pages != before.view_as(pages)).any(-1).any(0).nonzero()[:, 0].tolist()
    retained = bench.runtime.plan(prompt).compactions[0].retained
    assert changed
    assert set(changed) <= set(bench.blocks["a"][retained.start : retained.stop])


def test_two_requests_compact_in_one_step_without_mixing():
    bench = Bench(SNAPKV | {"allocator": "cross-layer"})
    prompts = {"a": 6 * BLOCK, "b": 8 * BLOCK + 3}
    flat = bench.step(*((name, size, 0, size) for name, size in prompts.items()))
    expected = {name: bench.wanted_positions(name, n) for name, n in prompts.items()}
    flat = bench.step(*((name, size, size, 1) for name, size in prompts.items()))
    for index, (name, size) in enumerate(prompts.items()):
        for layer in range(LAYERS):
            for head in range(KV_HEADS):
                positions = [*expected[name][layer][head], size]
                keys, _ = bench.attended(flat, index, layer, head)
                original = bench.original(bench.keys, name, layer)[head][positions]
                assert sort_rows(keys) == sort_rows(original), (name, layer, head)


def test_short_prompts_are_left_alone():
    bench = Bench(SNAPKV)
    before = bench.heap.pages.clone()
    bench.step(("a", BUDGET, 0, BUDGET))
    flat = bench.step(("a", BUDGET, BUDGET, 1))
    assert bench.slot_indices == 0
    assert torch.equal(bench.heap.pages, before)
    assert (flat.lengths == BUDGET + 1).all()


def test_a_request_that_starts_over_loses_its_seat():
    """A request that is preempted after its compaction is recomputed and compacted
    again.
    """
    bench = Bench(SNAPKV)
    prompt = 6 * BLOCK
    bench.step(("a", prompt, 0, prompt))
    bench.step(("a", prompt, prompt, 1))
    assert bench.slot_indices == 1
    bench.blocks.pop("a")
    flat = bench.step(("a", prompt, 0, 64))
    assert bench.slot_indices == 0
    assert (flat.lengths == 64).all(), "everything is attended to again"
    bench.step(("a", prompt, 64, prompt - 64))
    assert bench.slot_indices == 1
    # the answer's earlier tokens are one more chunk
    flat = bench.step(("a", prompt, prompt, 7))
    assert (flat.lengths < prompt).all()


def test_forget_can_be_repeated_and_seats_are_reused():
    bench = Bench(SNAPKV)
    for name in ("a", "b", "c"):
        bench.step((name, 6 * BLOCK, 0, 6 * BLOCK))
    runtime = bench.runtime
    assert bench.slot_indices == 3
    runtime.forget(["a", "stranger"])
    runtime.forget(["a"])
    runtime.check_integrity()
    assert bench.slot_indices == 2
    bench.step(("d", 6 * BLOCK, 0, 6 * BLOCK))
    runtime.forget(["b", "c", "d"])
    runtime.check_integrity()
    assert bench.slot_indices == 0


def test_check_integrity_sees_a_lost_and_a_shared_seat():
    bench = Bench(SNAPKV)
    for name in ("a", "b"):
        bench.step((name, 6 * BLOCK, 0, 6 * BLOCK))
    requests = bench.runtime._requests
    kept = requests.pop("a")
    with pytest.raises(AssertionError, match="leaked"):
        bench.runtime.check_integrity()
    requests["a"] = requests["b"]
    with pytest.raises(AssertionError, match="shared"):
        bench.runtime.check_integrity()
    requests["a"] = kept
    bench.runtime.check_integrity()


def test_a_window_may_be_spread_over_chunks():
    prompt = 6 * BLOCK + 5
    kept = []
    for chunks in ([prompt], [prompt - 3, 3], [50, prompt - 50 - 5, 1, 2, 2]):
        bench = Bench(SNAPKV)
        computed = 0
        for chunk in chunks:
            # next to a decoding request, so that queries do not start at 0
            bench.step(("other", 1, computed, 1), ("a", prompt, computed, chunk))
            computed += chunk
        (record,) = bench.runtime.records
        assert record.kept_positions == bench.wanted_positions("a", prompt)
        kept.append(record.kept_positions)
    assert len(kept) == 3


def test_a_step_past_the_compaction_is_our_bug_and_shows():
    bench = Bench(SNAPKV)
    prompt = 6 * BLOCK
    bench.step(("a", prompt, 0, prompt - 3))
    with pytest.raises(AssertionError, match="ran past a compaction"):
        bench.step(("a", prompt, prompt - 3, 4))


def test_missing_queries_are_our_bug_and_show():
    bench = Bench(SNAPKV)
    prompt = 6 * BLOCK
    with pytest.raises(AssertionError, match="queries 88 to 96 are missing"):
        bench.step(("a", prompt, prompt - 3, 3))


@pytest.mark.parametrize(
    "scores",
    [
        lambda view: view.positions[:, 5:].float(),
        lambda view: view.positions[:1].float(),
        lambda view: view.positions[0].float(),
        lambda view: view.positions.t().float(),
        lambda view: view.positions,
    ],
    ids=("too few", "one head", "no heads", "turned", "whole numbers"),
)
def test_scores_that_are_not_one_per_slot_are_refused(monkeypatch, scores):
    """Broadcast or truncated scores would fit, but belong to other tokens."""
    bench = Bench(STREAMING)
    monkeypatch.setattr(StreamingLLM, "score", lambda policy, view: scores(view))
    with pytest.raises(KVPolicyError, match=r"streaming-llm.score returned .* layer 0"):
        bench.step(("a", 6 * BLOCK, 0, 6 * BLOCK))


FOLDING = [
    SNAPKV | {"decode_budget": 48, "fold_blocks": 2},
    SNAPKV | {"decode_budget": 48, "fold_blocks": 1, "allocator": "cross-layer"},
    STREAMING | {"decode_budget": 32, "fold_blocks": 2},
]


@pytest.mark.parametrize("policy", FOLDING, ids=("snapkv", "cross-layer", "streaming"))
@pytest.mark.parametrize("prompt", [6 * BLOCK + 5, 20], ids=("long", "short"))
def test_folds_while_generating_keep_what_the_record_says(policy, prompt):
    bench = Bench(policy)
    bench.step(("a", prompt, 0, prompt))
    plan = bench.runtime.plan(prompt)
    kept: list[set[int]] = [set(range(prompt)) for _ in range(LAYERS * KV_HEADS)]
    for computed in range(prompt, prompt + 10 * BLOCK):
        flat = bench.step(("a", prompt, computed, 1))
        done = plan.num_done(computed)
        assert len(bench.runtime.records) == plan.num_done(computed + 1)
        resident = plan.resident_blocks(computed) if done else -1
        for row in range(LAYERS * KV_HEADS):
            layer, head = divmod(row, KV_HEADS)
            scope = layer if len(flat.pages) > 1 else 0
            if done:
                record = bench.runtime.records[done - 1]
                seen = set(record.kept_positions[layer][head])
                assert seen <= kept[row] | set(range(prompt, computed)), "came back"
                since = plan.compaction(done - 1).at_tokens
                kept[row] = seen | set(range(since, computed + 1))
            else:
                kept[row].add(computed)
            assert int(flat.lengths[scope, head]) == len(kept[row])
            compacted = plan.num_done(computed + 1) > done  # after attention
            if computed % 7 == 0 and not compacted:  # reading back is slow
                keys, _ = bench.attended(flat, 0, layer, head)
                original = bench.original(bench.keys, "a", layer)[head]
                assert sort_rows(keys) == sort_rows(original[sorted(kept[row])])
        if resident > 0:
            held = sum(map(len, kept)) / len(kept)
            assert held <= (resident + 1) * BLOCK
    assert len(bench.runtime.records) >= 3, "hardly a fold"


def test_heap_of_another_size_is_refused():
    layout = PageLayout.natural(BLOCK, HEAD_DIM)
    with pytest.raises(ValueError, match="is not 12 pages"):
        Heap(torch.zeros(11, layout.page_elems), layout, 2, 3, 2)


def test_durations_are_handed_over_once():
    bench = Bench(SNAPKV)
    bench.step(("a", 6 * BLOCK, 0, 6 * BLOCK))
    assert len(bench.runtime.take_compression_seconds()) == 1
    assert bench.runtime.take_compression_seconds() == []
