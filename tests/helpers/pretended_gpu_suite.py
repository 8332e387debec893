"""Eviction on a GPU that is none: devices never mix, and decoding never waits.

``tests/unit/test_suites.py`` runs it in a process of its own: torch does not forget
that it once believed in a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from fake_text import POSITIONS, encode, make_rotary
from policy_settings import configure, policies_that, shares_pages
from pretend_cuda import CUDA, PretendedGPU, Pretending

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.ops import torch_ops
from vllm_kvplugins.ops.device import Arrival
from vllm_kvplugins.ops.layout import PageLayout
from vllm_kvplugins.ops.mixed_attention import CoarseEntries
from vllm_kvplugins.policies.base import Geometry, Retention
from vllm_kvplugins.residency import zooming
from vllm_kvplugins.residency.entries import EntryArena
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.plan import BlockSpan, Compaction
from vllm_kvplugins.residency.probing import ProbeModel
from vllm_kvplugins.residency.requests import Row
from vllm_kvplugins.residency.retrieval import Retrieval
from vllm_kvplugins.residency.runtime import PolicyRuntime
from vllm_kvplugins.residency.transfer import Transfer
from vllm_kvplugins.residency.zooming import Zooming

SEED = 20261122
LAYERS, KV_HEADS, GROUP, HEAD_DIM = 3, 2, 2, 8
BLOCK, BLOCKS, WIDTH = 4, 81, 40
SETTINGS = {"budget": 24, "window": 3, "sinks": 2, "recent": 1, "chunk_size": 4}
SETTINGS |= {"hash_bits": 1, "future": 16, "allocator": "head-adaptive"}
PROMPTS = {"long": 61, "short": 45}
ANSWER, CHUNK = 9, 40


@pytest.fixture
def gpu() -> Iterator[PretendedGPU]:
    with PretendedGPU() as pretended:
        yield pretended


def test_the_pretended_gpu(gpu: PretendedGPU):
    """It refuses and counts what it is there for."""
    here = torch.arange(5, device=CUDA)
    assert here.device == CUDA
    assert not gpu.waits
    with pytest.raises(RuntimeError, match="two devices"):
        here + torch.arange(5)
    assert (here + 1).numbers.tolist() == [1, 2, 3, 4, 5]
    view = here.view(5, 1)[2:]
    view += 7
    assert here.numbers.tolist() == [0, 1, 9, 10, 11]
    assert not gpu.waits
    for wait in (
        lambda: int(here.max()),
        lambda: here.tolist(),
        lambda: here[here > 3],
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: here.cpu(),
        lambda: here.nonzero(),
    ):
        before = len(gpu.waits)
        wait()
        assert len(gpu.waits) > before
    before = len(gpu.waits)
    torch.tensor([1, 2]).pin_memory().to(CUDA, non_blocking=True)
    assert len(gpu.waits) == before


def test_what_is_on_its_way_to_the_host_is_not_there(gpu: PretendedGPU):
    arrival = Arrival(torch.arange(3.0, device=CUDA))
    early = Arrival(torch.ones(2, device=CUDA))
    assert early._here.isnan().all()
    assert not gpu.waits
    assert arrival.wait().tolist() == [0, 1, 2]
    assert early._here.isnan().all(), "an event says nothing of what is sent later"
    assert early.wait().tolist() == [1, 1]
    assert len(gpu.waits) == 2
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: Arrival(torch.ones(1, device=CUDA)).wait())
        assert found.result().tolist() == [1]


class Losses:
    """Some tokens surprise more than others."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def states(self, first: int, count: int) -> torch.Tensor:
        return self._life.here(torch.zeros(count, 2))

    def losses(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert states.device == self._life.device
        return (targets % 7 == 3) * 5.0 + targets % 4


class Life:
    """Two requests under a policy, on a device."""

    def __init__(self, policy: dict[str, Any], device: torch.device) -> None:
        print("seed", SEED)
        self.device = device
        rng = torch.Generator().manual_seed(SEED)
        self.rng = rng
        layout = PageLayout.interleaved(BLOCK, HEAD_DIM)
        shape = (LAYERS * BLOCKS * KV_HEADS, layout.page_elems)
        pages = self.here(torch.randn(shape, generator=rng))
        heap = Heap(pages, layout.to(device), LAYERS, BLOCKS, KV_HEADS)
        self.heap = heap
        geometry = Geometry(BLOCK, LAYERS, KV_HEADS, 2 * LAYERS * KV_HEADS * 32)
        self.runtime = PolicyRuntime(parse_policy(policy), geometry)
        rotary = make_rotary(HEAD_DIM)
        for field in fields(rotary):
            value = getattr(rotary, field.name)
            if isinstance(value, torch.Tensor):
                object.__setattr__(rotary, field.name, self.here(value))
        model = ProbeModel(self._probe, encode, POSITIONS, max_tokens=128)
        scales = [HEAD_DIM**-0.5] * LAYERS
        self.runtime.attach(heap, scales, rotary, model, Losses(self))
        self.prompts = dict(PROMPTS)
        self.computed = dict.fromkeys(PROMPTS, 0)
        self.turns: dict[str, tuple[int, ...]] = {}
        order = (torch.randperm(BLOCKS - 1, generator=rng) + 1).int()
        self.tables = dict(zip(PROMPTS, order.split(WIDTH), strict=True))
        for name, prompt in PROMPTS.items():
            wants = self.runtime.policy.wants_history
            self.turns[name] = (prompt - 3,) if wants else ()
            self.runtime.learn(name, range(prompt), self.turns[name])

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else Pretending.of(tensor.clone())

    def _probe(self, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)  # of q, k and v
        assert token_ids.device == positions.device == self.device
        shape = (LAYERS, len(token_ids), sum(heads), HEAD_DIM)
        rng = torch.Generator().manual_seed(zlib.crc32(str(shape).encode()))
        for layer, tokens in enumerate(torch.randn(shape, generator=rng)):
            parts = [self.here(part) for part in tokens.split(heads, dim=1)]
            assert self.runtime.prober is not None
            self.runtime.prober.attend(layer, *parts)

    def rows(self) -> list[Row]:
        """The next step: who is late reads more of its prompt, or all generate."""
        rows: list[Row] = []
        prompts, done = self.prompts, self.computed
        late = [name for name, prompt in prompts.items() if done[name] < prompt]
        for name in late or prompts:
            plan = self.runtime._plan_of(name, prompts[name])
            most = min(CHUNK, prompts[name] - done[name]) if late else 1
            new = plan.clip_chunk(done[name], most)
            first = rows[-1].first_query + rows[-1].new_tokens if rows else 0
            rows.append(Row(name, prompts[name], done[name], new, first))
        return rows

    def step(self, rows: list[Row]) -> list[torch.Tensor]:
        """Page tables and lengths of a step, after which all is compacted."""
        first = rows[-1].first_query + rows[-1].new_tokens
        table = self.here(torch.stack([self.tables[row.request_id] for row in rows]))
        lens = self.here(torch.tensor([row.after_tokens for row in rows]).int())
        flat, seen = self.runtime.begin_step(rows, lens, table), []
        for layer in range(LAYERS):
            shape = (first, KV_HEADS * GROUP, HEAD_DIM)
            queries = self.here(torch.randn(shape, generator=self.rng))
            self.runtime.before_attention(layer, queries)
            spans = self.runtime.zooming
            if spans is not None and spans.takes_any:
                output = torch.zeros_like(queries)
                scope = flat.pages[0], flat.lengths[0]
                spans.attend(layer, queries, *scope, output)
                seen.append(output)
            self.runtime.after_attention(layer, queries)
        self.compacted = bool(self.runtime._due)
        self.runtime.end_step()
        self.runtime.check_integrity()
        self.computed |= {row.request_id: row.after_tokens for row in rows}
        return [flat.pages, flat.lengths, *seen]


def policies(retention: Retention) -> list[dict[str, Any]]:
    found = []
    for name in policies_that(retention):
        wanted = dict(SETTINGS)
        if retention is Retention.DROP and not shares_pages(name):
            wanted.pop("allocator")
        if retention is Retention.OFFLOAD:
            wanted = {"budget": 12, "sinks": 2, "window": 8, "skip_layers": 1}
            wanted |= {"host_memory": 4 << 20, "bits": 3, "page_tokens": 4}
        found.append(configure(name, wanted))
    return found


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.numbers if isinstance(tensor, Pretending) else tensor


@contextmanager
def on(device: torch.device) -> Iterator[PretendedGPU | None]:
    with PretendedGPU() if device.type == "cuda" else nullcontext() as gpu:
        yield gpu


@pytest.mark.parametrize("policy", policies(Retention.DROP), ids=lambda p: p["name"])
def test_eviction_on_a_gpu_is_that_on_a_cpu(monkeypatch, policy: dict[str, Any]):
    monkeypatch.setenv("KVP_OPS", "torch")
    found, waits = {}, []
    for device in (torch.device("cpu"), CUDA):
        tables = []
        with on(device) as gpu:
            life = Life(policy, device)
            while life.computed["short"] < PROMPTS["short"] + ANSWER:
                before = len(gpu.waits) if gpu else 0
                rows = life.rows()
                tables += life.step(rows)
                if gpu and all(row.new_tokens == 1 for row in rows):
                    waits += gpu.waits[before:]
        found[device.type] = [numbers(t) for t in (*tables, life.heap.pages)]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    if not life.runtime.policy.observes_steps:
        assert waits == []


def without_inference_mode(monkeypatch, *methods: tuple[type, str]) -> None:
    """Which does not know such tensors."""
    for owner, name in methods:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


AHEAD = [{"prefetch": "step"}, {"prefetch": "layer"}, {"reuse_every": 2}]
RETRIEVERS = policies(Retention.OFFLOAD)
RETRIEVERS += [configure("exact-topk", RETRIEVERS[0] | more) | more for more in AHEAD]
RETRIEVERS += [configure("icecache", RETRIEVERS[0] | {"lazy_index": True})]


@pytest.mark.parametrize(
    "policy", RETRIEVERS, ids=lambda p: "-".join(map(str, p.values()))
)
def test_retrieval_on_a_gpu_is_that_on_a_cpu(monkeypatch, policy: dict[str, Any]):
    """What is fetched, and where it lies; the host waits for queries and nothing
    else."""
    methods = ("_fetch_ahead", "forget", "detach")
    without_inference_mode(monkeypatch, *((Retrieval, name) for name in methods))
    found, fetched, late = {}, {}, []
    for device in (torch.device("cpu"), CUDA):
        tables = []
        with on(device) as gpu:
            life = Life(policy, device)
            while life.computed["short"] < PROMPTS["short"] + 4 * ANSWER:
                before = len(gpu.waits) if gpu else 0
                rows = life.rows()
                tables += life.step(rows)
                decoding = all(row.new_tokens == 1 for row in rows)
                if gpu and decoding and not life.compacted:
                    late.append(gpu.waits[before:])
            retrieval = life.runtime.retrieval
            assert retrieval is not None
            retrieval._join()
            fetched[device.type] = retrieval.take_traffic()
            assert not gpu or not gpu.sent, "nobody has waited for these"
            life.runtime.forget(list(PROMPTS))
            assert retrieval.tier.used_bytes == 0
        found[device.type] = [numbers(t) for t in (*tables, life.heap.pages)]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    assert fetched["cpu"] == fetched["cuda"]
    assert fetched["cpu"].fetched > 0
    layers = len(range(1, LAYERS, policy.get("reuse_every", 1)))
    if policy.get("prefetch", "off") == "off":
        assert late
        assert all(len(waits) <= layers for waits in late), late


SEKV: dict[str, Any] = {"name": "sekv", "budget": 24, "sinks": 2, "least_span": 3}
SEKV |= {"span_tokens": 4, "rank": HEAD_DIM, "sensitivity": 0.5}


def attended_elsewhere(
    queries: torch.Tensor,
    heap: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    entries: CoarseEntries,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kernel, which makes nobody wait and wants all where the heap is."""
    tensors = [queries, heap, pages, lengths, *entries.tensors]
    assert len({tensor.device for tensor in tensors}) == 1
    queries, heap, pages, lengths, *rest = (numbers(tensor) for tensor in tensors)
    layout = PageLayout.interleaved(layout.block_size, layout.head_dim)
    found = torch_ops.attend_mixed(queries, heap, layout, pages, lengths, scale, rest)
    if tensors[0] is queries:
        return found
    return Pretending.of(found[0]), Pretending.of(found[1])


@pytest.mark.parametrize("zoom_share", [0.4, 0.0])
def test_zooming_on_a_gpu_is_that_on_a_cpu(monkeypatch, zoom_share: float):
    """The host waits for the gates of a layer, and nothing else."""
    monkeypatch.setattr(zooming, "attend_mixed", attended_elsewhere)
    monkeypatch.setattr(Zooming, "_decompose", Zooming._decompose.__wrapped__)
    monkeypatch.setattr(EntryArena, "_allocate", EntryArena._allocate.__wrapped__)
    found, traffic, late = {}, {}, []
    for device in (torch.device("cpu"), CUDA):
        tables = []
        with on(device) as gpu:
            life = Life(SEKV | {"zoom_share": zoom_share}, device)
            while life.computed["short"] < PROMPTS["short"] + ANSWER:
                before = len(gpu.waits) if gpu else 0
                rows = life.rows()
                tables += life.step(rows)
                decoding = all(row.new_tokens == 1 for row in rows)
                if gpu and decoding:
                    late.append(gpu.waits[before:])
            assert life.runtime.zooming is not None
            traffic[device.type] = life.runtime.zooming.take_traffic()
            for entries in life.runtime.zooming._arena.layers:
                on_there = numbers(entries.attended_bias)
                assert on_there.equal(entries.bias), "host and GPU see other spans"
            life.runtime.forget(list(PROMPTS))
        found[device.type] = [numbers(t) for t in (*tables, life.heap.pages)]
    assert len(found["cpu"]) > 3 * ANSWER
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
    assert traffic["cpu"] == traffic["cuda"]
    assert (traffic["cpu"].fetched > 20) == (zoom_share > 0)
    # the first step waits for the factors as well
    waits_each = LAYERS if zoom_share else 0
    assert all(len(waits) == waits_each for waits in late[1:]), late


def zone_contents(life: Life, name: str) -> torch.Tensor:
    """Of a request's landing zone, page by page."""
    resident = life.runtime.tracked(name).resident
    assert resident is not None
    assert life.runtime.tables is not None
    pages, counts = (numbers(t) for t in life.runtime.tables.zone(resident.seat))
    used = torch.arange(pages.shape[1]) < counts[:, None]
    return numbers(life.heap.pages)[pages[used]]


@pytest.mark.parametrize("policy", [configure("snapkv", SETTINGS), RETRIEVERS[0]])
def test_sessions_leave_the_gpu_and_come_back(monkeypatch, gpu: PretendedGPU, policy):
    without_inference_mode(monkeypatch, (Retrieval, "forget"), (Retrieval, "detach"))
    monkeypatch.setenv("KVP_OPS", "torch")
    life = Life(policy, CUDA)
    while life.computed["short"] < PROMPTS["short"] + 3:
        life.step(life.rows())
    transfer, name = Transfer(life.runtime), "short"
    tokens, table = life.computed[name], life.tables[name]
    plan = life.runtime._plan_of(name, PROMPTS[name])
    last = plan.compaction(plan.num_done(tokens) - 1)
    compaction = Compaction(last.at_tokens, BlockSpan(0, last.zone.stop), last.zone)
    first, stop = compaction.zone.start, -(-tokens // BLOCK)
    # without their inference mode, which does not know such tensors
    save, restore = (f.__wrapped__ for f in (Transfer.save, Transfer.restore))
    own = table[first:stop].tolist()
    saved = save(transfer, name, compaction, tokens, own, tokens)
    kept = zone_contents(life, name).clone()
    for tensor in (saved.zone, saved.tail, saved.counts, saved.positions):
        assert not isinstance(tensor, Pretending), "still on the GPU"
    life.runtime.forget([name])
    others = table[stop : 2 * stop - first].tolist()
    life.prompts[name] = tokens + 5
    restore(transfer, name, life.prompts[name], saved, tokens, others)
    life.runtime.check_integrity()
    assert torch.equal(zone_contents(life, name), kept)
    life.tables[name] = torch.cat([table[:first], table[stop:], table[: stop - first]])
    life.step(life.rows())
