"""Retrieval, zooming and sessions on a simulated GPU.

``tests/unit/test_suites.py`` runs it in its own process, because torch cannot undo the
simulation of a GPU.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from policy_settings import configure, only_fetch
from routers import write_random_router
from simulated_cuda import CUDA, GpuTensor, SimulatedGPU
from simulated_requests import (
    ANSWER,
    BLOCK,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    PROMPTS,
    SEED,
    SETTINGS,
    Life,
    numbers,
    on,
    policies,
    without_inference_mode,
)

from vllm_kvplugins.engine.entries import EntryArena
from vllm_kvplugins.engine.retrieval import rounds
from vllm_kvplugins.engine.retrieval.controller import RetrievalController
from vllm_kvplugins.engine.retrieval.fetching import Fetcher
from vllm_kvplugins.engine.spans import controller
from vllm_kvplugins.engine.spans.controller import SpanController
from vllm_kvplugins.engine.spans.zoom_arena import ZoomArena
from vllm_kvplugins.index.compiled import CompiledIndex
from vllm_kvplugins.model_config import ModelFingerprint
from vllm_kvplugins.ops import device as ops_device
from vllm_kvplugins.ops import torch_ops
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction
from vllm_kvplugins.policies import icecache
from vllm_kvplugins.sessions import stored_pages
from vllm_kvplugins.sessions.transfer import PendingSave, Transfer

AHEAD = [{"prefetch": "step"}, {"prefetch": "layer"}, {"reuse_every": 2}]
RETRIEVERS = policies(only_fetch)
RETRIEVERS += [configure("exact-topk", RETRIEVERS[0] | more) | more for more in AHEAD]
RETRIEVERS += [configure("icecache", RETRIEVERS[0] | {"host_dtype": "int8"})]
RETRIEVERS += [configure("icecache", RETRIEVERS[0] | {"lazy_index": True})]


PAGES = {"fetch": "pages", "sinks": 8, "page_tokens": 16}
LONG_PROMPTS = {"long": 180, "short": 150}
OF_FP8 = [policy for policy in RETRIEVERS if "host_dtype" not in policy]


def run_long(
    life: Life, gpu: SimulatedGPU | None, late: list[list[str]]
) -> list[torch.Tensor]:
    """Generate four answers; return the page tables of all steps.

    Args:
        late: gets what the host waited for in each step that only decodes.
    """
    tables = []
    while life.computed["short"] < PROMPTS["short"] + 4 * ANSWER:
        before = len(gpu.waits) if gpu else 0
        rows = life.rows()
        tables += life.step(rows)
        decoding = all(row.new_tokens == 1 for row in rows)
        if gpu and decoding and not life.compacted:
            waits = gpu.waits[before:]
            # check_integrity reads the arena, which engines do not do
            late.append([each for each in waits if "entries.py" not in each])
    return tables


@pytest.mark.parametrize(
    ("policy", "fp8"),
    [(policy, False) for policy in RETRIEVERS] + [(policy, True) for policy in OF_FP8],
    ids=lambda p: "-".join(map(str, p.values())) if isinstance(p, dict) else str(p),
)
def test_retrieval_on_a_gpu_is_that_on_a_cpu(
    monkeypatch, policy: dict[str, Any], fp8: bool
):
    """Fetched tokens and their slots; the host waits only for queries."""
    without_inference_mode(
        monkeypatch,
        (Fetcher, "_fetched"),
        (RetrievalController, "forget"),
        (RetrievalController, "detach"),
    )
    actual, fetched, late = {}, {}, []
    for device in (torch.device("cpu"), CUDA):
        with on(device) as gpu:
            life = Life(policy, device, fp8=fp8)
            tables = run_long(life, gpu, late)
            retrieval = life.retrieval
            retrieval._wait_for_pending()
            fetched[device.type] = retrieval.take_traffic()
            assert not gpu or not gpu.sent, "the host has not waited for these copies"
            life.runtime.forget(list(PROMPTS))
            assert retrieval.tier.num_free == len(retrieval.tier.pages)
        actual[device.type] = [numbers(t) for t in (*tables, life.heap.pages)]
    for on_cpu, on_gpu in zip(actual["cpu"], actual["cuda"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=0)
    assert fetched["cpu"] == fetched["cuda"]
    assert fetched["cpu"].fetched > 0
    layers = len(range(1, LAYERS, policy.get("reuse_every", 1)))
    if policy.get("prefetch", "off") == "off":
        assert late
        assert all(len(waits) <= layers for waits in late), late


@pytest.mark.parametrize(
    "more", [{}, {"host_dtype": "int8"}, {"prefetch": "step"}], ids=str
)
@pytest.mark.parametrize("fp8", [False, True])
def test_whole_pages_on_a_gpu_are_those_on_a_cpu(
    monkeypatch, more: dict[str, Any], fp8: bool
):
    """Contents of the cache, also after tokens have moved on the host."""
    if fp8 and more.get("host_dtype"):
        pytest.skip("refused: fp8 elements are not quantized again")
    monkeypatch.setattr(icecache, "_STORED_SEGMENT", 32)
    without_inference_mode(
        monkeypatch,
        (Fetcher, "_fetched"),
        (RetrievalController, "forget"),
        (RetrievalController, "detach"),
    )
    policy = configure("icecache", RETRIEVERS[0] | PAGES | more)
    contents, fetched = {}, {}
    for device in (torch.device("cpu"), CUDA):
        with on(device):
            life = Life(policy, device, fp8=fp8, block=8, prompts=LONG_PROMPTS)
            while life.computed["short"] < LONG_PROMPTS["short"] + 6 * ANSWER:
                life.step(life.rows())
            retrieval = life.retrieval
            retrieval._wait_for_pending()
            assert retrieval.moved_tokens > 0
            fetched[device.type] = retrieval.take_traffic()
            life.runtime.forget(list(LONG_PROMPTS))
            assert retrieval.tier.num_free == len(retrieval.tier.pages)
        contents[device.type] = numbers(life.heap.pages)
    torch.testing.assert_close(contents["cuda"], contents["cpu"], rtol=0, atol=0)
    assert fetched["cpu"] == fetched["cuda"]
    assert fetched["cpu"].fetched > 0


def test_keys_that_wait_for_their_index_are_not_pinned(monkeypatch):
    """However late the index is, no tensor of the GPU is held."""
    without_inference_mode(
        monkeypatch, *((RetrievalController, n) for n in ("forget", "detach"))
    )
    pinned: list[weakref.ref[torch.Tensor]] = []
    staging, may_build = ops_device.staging, threading.Event()

    def staged(*shape: int, **options: Any) -> torch.Tensor:
        tensor = staging(*shape, **options)
        pinned.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(ops_device, "staging", staged)
    inserted: list[torch.Tensor] = []

    def append(index: CompiledIndex, keys: torch.Tensor, first: int) -> None:
        if threading.current_thread().name.startswith("kvp-index"):
            inserted.append(keys)

    monkeypatch.setattr(CompiledIndex, "append", append)
    with on(CUDA):
        life = Life(RETRIEVERS[-1], CUDA)
        retrieval = life.retrieval
        retrieval._indexer._thread.submit(may_build.wait, 60)
        while life.computed["short"] < PROMPTS["short"] + 2:
            life.step(life.rows())
        retrieval._wait_for_pending()
        state = retrieval._requests["long"]
        layers = state.layers.values()
        pending = [append for layer in layers for append in layer.pending]
        assert pending
        assert not any(each.done() for each in pending)
        assert pinned
        assert all(tensor() is None for tensor in pinned)
        may_build.set()
        for each in pending:
            each.result(60)
        for layer, pages in enumerate(state.pages, state.first_layer):
            stored = retrieval.tier.read_keys(pages, range(state.tokens))
            assert any(keys.equal(stored) for keys in inserted), layer
        life.runtime.forget(list(PROMPTS))


MODEL = ModelFingerprint(
    architecture=None,
    num_layers=LAYERS,
    num_heads=KV_HEADS * GROUP,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    hidden_size=None,
    vocab_size=None,
    rope=None,
)
SEKV: dict[str, Any] = {"name": "sekv", "budget": 28, "sinks": 2, "least_span": 3}
SEKV |= {"span_tokens": 4, "rank": HEAD_DIM, "sensitivity": 0.5}


def attended_elsewhere(
    queries: torch.Tensor,
    kv: PagedKV,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    entries: CoarseEntries,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A stand-in for a kernel that never makes the host wait and requires all inputs on
    the device.
    """
    tensors = [queries, kv.pages, pages, lengths, *entries.tensors]
    assert len({tensor.device for tensor in tensors}) == 1
    queries, heap, pages, lengths, *rest = (numbers(tensor) for tensor in tensors)
    layout = PageLayout.interleaved(kv.layout.block_size, kv.layout.head_dim)
    kv, entries = PagedKV(heap, layout), CoarseEntries(*rest)
    actual = torch_ops.attend_mixed(queries, kv, pages, lengths, scale, entries)
    if tensors[0] is queries:
        return actual
    return GpuTensor.of(actual[0]), GpuTensor.of(actual[1])


@pytest.mark.parametrize("zoom", ["mean-key", "trained", "none"])
def test_zooming_on_a_gpu_is_that_on_a_cpu(monkeypatch, tmp_path, zoom: str):
    """The host waits only for the gates of a layer."""
    settings: dict[str, Any] = {"zoom_share": 0.0 if zoom == "none" else 0.4}
    if zoom == "trained":
        path = tmp_path / "router.safetensors"
        random = torch.Generator().manual_seed(SEED)
        # thresholds low enough for some spans, too high for others
        tau = torch.full((LAYERS, KV_HEADS * GROUP), -0.5)
        write_random_router(path, MODEL, random, threshold=tau)
        settings["router"] = str(path)
    monkeypatch.setattr(controller, "attend_mixed", attended_elsewhere)
    monkeypatch.setattr(
        SpanController, "_decompose", SpanController._decompose.__wrapped__
    )
    for arena in (EntryArena, ZoomArena):
        monkeypatch.setattr(arena, "_allocate", arena._allocate.__wrapped__)
    actual, traffic, late = {}, {}, []
    for device in (torch.device("cpu"), CUDA):
        tables = []
        with on(device) as gpu:
            life = Life(SEKV | settings, device)
            while life.computed["short"] < PROMPTS["short"] + ANSWER:
                before = len(gpu.waits) if gpu else 0
                rows = life.rows()
                tables += life.step(rows)
                decoding = all(row.new_tokens == 1 for row in rows)
                if gpu and decoding:
                    late.append(gpu.waits[before:])
            traffic[device.type] = life.spans.take_traffic()
            for entries in life.spans._arena.layers:
                on_there = numbers(entries.attended_bias)
                assert on_there.equal(entries.bias), "host and GPU see other spans"
            life.runtime.forget(list(PROMPTS))
        actual[device.type] = [numbers(t) for t in (*tables, life.heap.pages)]
    assert len(actual["cpu"]) > 3 * ANSWER
    for on_cpu, on_gpu in zip(actual["cpu"], actual["cuda"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-6)
    assert traffic["cpu"] == traffic["cuda"]
    assert (traffic["cpu"].fetched > 20) == (zoom != "none")
    # the first step waits for the factors as well
    waits_each = 0 if zoom == "none" else LAYERS
    assert all(len(waits) == waits_each for waits in late[1:]), late


def check_session(retrieval: RetrievalController) -> None:
    """A session waits without entries, and its request gets the same ones."""
    means, state = retrieval._means, retrieval._requests["short"]
    assert means is not None
    chunks = state.tokens // 4
    before = [
        numbers(means._run_of(state, plane)[:, :, :chunks]).clone() for plane in (0, 1)
    ]
    assert retrieval.detach("short") is state
    assert not state.means.room
    assert all(rows.device.type == "cpu" for rows in state.host_means)
    retrieval.attach("short", state)
    for plane, rows in enumerate(before):
        assert numbers(means._run_of(state, plane)[:, :, :chunks]).equal(rows)
    assert not state.host_means


@pytest.mark.parametrize(
    ("index", "fp8"), [("auto", False), ("auto", True), ("device", False)]
)
def test_means_on_a_gpu_are_those_on_a_cpu(monkeypatch, index: str, fp8: bool):
    """Attention to pages and means. With means, too, the host waits only for queries,
    or for nothing where the device selects.
    """
    if index == "device":
        monkeypatch.setenv("KVP_OPS", "torch")
    without_inference_mode(
        monkeypatch,
        (Fetcher, "_fetched"),
        (RetrievalController, "forget"),
        (RetrievalController, "detach"),
    )
    monkeypatch.setattr(rounds, "attend_mixed", attended_elsewhere)
    monkeypatch.setattr(EntryArena, "_allocate", EntryArena._allocate.__wrapped__)
    more = {"mean_tokens": 4, "index": index, "host_memory": 1 << 18}
    policy = configure("icecache", RETRIEVERS[0] | more)
    actual, late = {}, []
    for device in (torch.device("cpu"), CUDA):
        with on(device) as gpu:
            life = Life(policy, device, fp8=fp8)
            tables = run_long(life, gpu, late)
            means = life.retrieval._means
            assert means is not None
            tables += [means._arena.keys, means._arena.values, means._arena.bias]
            actual[device.type] = [numbers(t).clone() for t in tables]
            check_session(life.retrieval)
            life.runtime.forget(list(PROMPTS))
            assert means.num_bytes == 0
            life.retrieval.tier.close()
    for on_cpu, on_gpu in zip(actual["cpu"], actual["cuda"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-6)
    assert late
    most = 0 if index == "device" else LAYERS - 1
    assert all(len(waits) <= most for waits in late), late


def zone_contents(life: Life, name: str) -> torch.Tensor:
    """Contents of a request's retained region, page by page."""
    resident = life.runtime.request_state(name).resident
    assert resident is not None
    assert life.runtime.tables is not None
    pages, counts = (
        numbers(t) for t in life.runtime.tables.retained(resident.slot_index)
    )
    used = torch.arange(pages.shape[1]) < counts[:, None]
    return numbers(life.heap.pages)[pages[used]]


def largest_made_on_gpu(monkeypatch: pytest.MonkeyPatch, pool: GpuTensor) -> list[int]:
    """Size in bytes of the largest keys or values tensor that is created from now on,
    except the pool.
    """
    largest, wrap = [0], GpuTensor.of
    its_own = pool.numbers.untyped_storage().data_ptr()

    def noted(numbers: torch.Tensor) -> GpuTensor:
        storage = numbers.untyped_storage()
        other = storage.data_ptr() != its_own
        if largest and other and numbers.dtype == pool.dtype:
            largest[0] = max(largest[0], storage.nbytes())
        return wrap(numbers)

    monkeypatch.setattr(GpuTensor, "of", staticmethod(noted))
    return largest


@pytest.fixture
def gpu() -> Iterator[SimulatedGPU]:
    with SimulatedGPU() as simulated:
        yield simulated


@pytest.mark.parametrize("in_place", [False, True], ids=["loaded", "parked"])
@pytest.mark.parametrize("policy", [configure("snapkv", SETTINGS), RETRIEVERS[0]])
def test_sessions_leave_the_gpu_and_come_back(
    monkeypatch, gpu: SimulatedGPU, policy, in_place
):
    without_inference_mode(
        monkeypatch, (RetrievalController, "forget"), (RetrievalController, "detach")
    )
    monkeypatch.setenv("KVP_OPS", "torch")
    life = Life(policy, CUDA)
    while life.computed["short"] < PROMPTS["short"] + 3:
        life.step(life.rows())
    transfer, name = Transfer(life.runtime), "short"
    tokens, table = life.computed[name], life.tables[name]
    plan = life.runtime._plan_of(name, PROMPTS[name])
    last = plan.compaction(plan.num_done(tokens) - 1)
    compaction = Compaction(
        last.at_tokens, BlockSpan(0, last.retained.stop), last.retained
    )
    first, stop = compaction.retained.start, -(-tokens // BLOCK)
    pages = life.heap.pages
    largest = largest_made_on_gpu(monkeypatch, pages)
    whole = (stop - first) * life.heap.rows * pages[:1].nbytes
    monkeypatch.setattr(stored_pages, "PIECE_BYTES", whole // 4)
    # without inference mode, which does not support these tensors
    save, finish, restore = (
        f.__wrapped__ for f in (Transfer.save, PendingSave.finish, Transfer.restore)
    )
    own = table[first:stop].tolist()
    saved = finish(save(transfer, name, compaction, tokens, own, tokens))
    assert whole // 8 < largest.pop() <= whole // 4, "copied whole, there"
    contents = zone_contents(life, name).clone()
    (part,) = saved.parts
    moved = (
        part.retained,
        part.tail,
        part.counts,
        part.positions,
        part.retained_ids,
    )
    for tensor in moved:
        assert not isinstance(tensor, GpuTensor), "still on the GPU"
    life.runtime.forget([name])
    others = table[stop : 2 * stop - first].tolist()
    life.prompts[name] = tokens + 5
    blocks = own if in_place else others
    largest[:] = [0]
    restore(transfer, name, life.prompts[name], saved, tokens, blocks, in_place)
    assert largest.pop() <= whole // 4, "copied whole, there"
    life.runtime.check_integrity()
    assert torch.equal(zone_contents(life, name), contents)
    if not in_place:
        parts = [table[:first], table[stop:], table[: stop - first]]
        life.tables[name] = torch.cat(parts)
    life.step(life.rows())
