"""A simulated GPU reads tokens directly from host memory.

``tests/unit/test_suites.py`` runs it in its own process, because torch cannot undo the
simulation of a GPU.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import _gpu_copies
import pytest
import torch
from policy_settings import configure
from simulated_cuda import CUDA, SimulatedGPU
from simulated_requests import (
    ANSWER,
    PROMPTS,
    Life,
    numbers,
    on,
    without_inference_mode,
)

from vllm_kvplugins.engine.retrieval import offload_queue, pinned
from vllm_kvplugins.engine.retrieval.controller import RetrievalController
from vllm_kvplugins.engine.retrieval.fetching import Fetcher
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.step_extension import Traffic
from vllm_kvplugins.ops.device import AsyncHostCopy
from vllm_kvplugins.ops.hot_set import HostPages, HotSet, fill_hot
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.policies import icecache

SETTINGS = {"budget": 12, "sinks": 2, "window": 8, "skip_layers": 1}
SETTINGS |= {"host_memory": 1 << 20, "page_tokens": 4}
CHUNK = 1 << 12  # bytes
POLICIES = [
    configure(name, SETTINGS | {"prefetch": prefetch})
    for name in ("exact-topk", "icecache")
    for prefetch in ("off", "step", "layer")
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch) -> None:
    monkeypatch.setattr(pinned, "CHUNK_BYTES", CHUNK)
    without_inference_mode(
        monkeypatch,
        (Fetcher, "_fetched"),
        (RetrievalController, "forget"),
        (RetrievalController, "detach"),
    )


@pytest.fixture
def gpu() -> Iterator[SimulatedGPU]:
    with SimulatedGPU() as simulated:
        yield simulated
        gc.collect()
        assert not simulated.host.pinned


def lived(
    life: Life, tokens: int = PROMPTS["short"] + 3 * ANSWER
) -> tuple[list[torch.Tensor], Traffic]:
    """Page tables of two requests, final cache contents, and fetched tokens."""
    tables = []
    while life.computed["short"] < tokens:
        tables += life.step(life.rows())
    retrieval = life.retrieval
    retrieval._wait_for_pending()
    traffic = retrieval.take_traffic()
    results = [numbers(t).clone() for t in (*tables, life.heap.pages)]
    return results, traffic


@pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: f"{p['name']}-{p['prefetch']}"
)
def test_direct_is_staged(policy: dict[str, Any]):
    """Results are equal bit for bit, and the host does not wait more often."""
    results, traffic, waits = {}, {}, {}
    for how in ("staged", "direct"):
        with on(CUDA) as gpu:
            life = Life(policy | {"host_fetch": how}, CUDA)
            results[how], traffic[how] = lived(life)
            waits[how] = len(gpu.waits)
            assert (gpu.host.fetches > 20) == (how == "direct")
            assert bool(gpu.host.pinned) == (how == "direct")
            life.runtime.forget(list(PROMPTS))
            life.runtime.check_integrity()
            gpu.host.finish()
            life.runtime.unbind_heap()
            assert not gpu.host.pinned
    same(results["staged"], results["direct"])
    assert traffic["staged"] == traffic["direct"]
    assert traffic["staged"].fetched > 0
    assert waits["staged"] == waits["direct"]


@pytest.mark.parametrize("prefetch", ["off", "step"])
def test_whole_pages_are_read_directly(monkeypatch, prefetch: str):
    """Also those that the host puts in order while earlier reads are pending."""
    monkeypatch.setattr(icecache, "_STORED_SEGMENT", 32)
    prompts = {"long": 180, "short": 150}
    settings = {"fetch": "pages", "sinks": 8, "prefetch": prefetch}
    policy = configure("icecache", SETTINGS | settings | {"page_tokens": 16})
    results = {}
    for how in ("staged", "direct"):
        with on(CUDA) as gpu:
            life = Life(policy | {"host_fetch": how}, CUDA, block=8, prompts=prompts)
            results[how], traffic = lived(life, 150 + 6 * ANSWER)
            assert traffic.fetched > 0
            assert life.retrieval.moved_tokens > 0
            assert (gpu.host.fetches > 20) == (how == "direct")
            life.runtime.forget(list(prompts))
            life.runtime.check_integrity()
            gpu.host.finish()
            life.runtime.unbind_heap()
    same(results["staged"], results["direct"])


@pytest.mark.parametrize("name", ["exact-topk", "icecache"])
def test_what_is_chosen_for_the_next_step_is_not_this_steps(monkeypatch, name):
    """Results do not depend on the progress of the thread that prefetches."""
    (policy,) = (p for p in POLICIES if (p["name"], p["prefetch"]) == (name, "step"))
    results, traffic = lived(Life(policy, torch.device("cpu")))
    fill = Fetcher._fill_hot_slots

    def late(self: Fetcher, batch: Any, layer: int) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            for _, _, future in self._pending:
                future.result()
        return fill(self, batch, layer)

    monkeypatch.setattr(Fetcher, "_fill_hot_slots", late)
    again, traffic_again = lived(Life(policy, torch.device("cpu")))
    same(results, again)
    assert traffic == traffic_again


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


class ByItself(AsyncHostCopy):
    """Tokens reach the host on their own stream.

    Their arrival says nothing about earlier reads of the GPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            super().__init__(tensor)


@pytest.mark.parametrize("prefetch", ["off", "step"])
def test_nobody_writes_where_the_gpu_still_reads(
    gpu: SimulatedGPU, monkeypatch, prefetch: str
):
    """Requests end and new ones start in a tier that holds only one set."""
    monkeypatch.setattr(offload_queue, "AsyncHostCopy", ByItself)
    policy = POLICIES[0] | {"prefetch": prefetch}
    life = Life(policy, CUDA)
    lived(life)
    tier = life.retrieval.tier
    needed = (len(tier.pages) - tier.num_free) * tier.page_bytes
    life = Life(policy | {"host_fetch": "direct", "host_memory": needed}, CUDA)
    for _ in range(2):
        lived(life)
        assert life.retrieval.tier.num_free == 0
        life.runtime.forget(list(PROMPTS))
        life.computed = dict.fromkeys(PROMPTS, 0)
    gpu.host.finish()


TOKENS, HEADS, DIM = 4, 1, 16  # of a page: 512 bytes


class Scene:
    """A tier of a few pages, and a GPU heap with room for the tokens of one."""

    def __init__(self, num_pages: int) -> None:
        bytes_each = 2 * TOKENS * DIM * 4
        self.tier = HostTier(num_pages * bytes_each, TOKENS, DIM, torch.float32, CUDA)
        layout = PageLayout.interleaved(TOKENS, DIM)
        self.heap = torch.zeros(1, layout.page_elems, device=CUDA)
        self.layout = layout.to(CUDA)

    def fetch(self, pages: torch.Tensor) -> None:
        """The tokens of a page."""
        at = torch.arange(TOKENS).view(1, HEADS, TOKENS)
        fill_hot(
            PagedKV(self.heap, self.layout),
            HostPages(
                self.tier.pages,
                pages[-1:].repeat(2).view(1, HEADS, 2),
                self.tier.reads,
            ),
            at,
            torch.tensor([0]),
            HotSet(
                at + TOKENS, torch.zeros_like(at), at.clone(), torch.tensor([TOKENS])
            ),
        )


def test_pages_rest_until_they_are_read(gpu: SimulatedGPU):
    """The tier hands out other pages first; if there are none, the host waits."""
    scene = Scene(num_pages=5)
    tier = scene.tier
    first_slots = tier.take(2)
    tier.write(first_slots[None], 0, torch.ones(1, 8, DIM), -torch.ones(1, 8, DIM))
    gpu.waits.clear()
    scene.fetch(first_slots)
    assert numbers(scene.heap).abs().eq(1).all()
    tier.release(first_slots)
    assert tier.num_free == 5
    tier.check_integrity([])
    other_slots = tier.take(3)
    assert not set(other_slots.tolist()) & set(first_slots.tolist())
    assert not gpu.waits, "enough pages were free"
    again = tier.take(1)
    assert len(gpu.waits) == 1, "no other page was free"
    assert int(again) in first_slots.tolist()
    tier.write(again[None], 0, torch.zeros(1, 4, DIM), torch.zeros(1, 4, DIM))
    gpu.host.finish()


def test_the_gpu_is_caught_reading_what_was_overwritten(gpu: SimulatedGPU):
    scene = Scene(num_pages=2)
    first_slots = scene.tier.take(1)
    scene.tier.write(first_slots[None], 0, torch.ones(1, 4, DIM), torch.ones(1, 4, DIM))
    scene.fetch(first_slots)
    scene.tier.write(
        first_slots[None], 3, torch.zeros(1, 1, DIM), torch.zeros(1, 1, DIM)
    )
    with pytest.raises(AssertionError, match="still reading"):
        gpu.host.finish()
    plain = torch.zeros(2, DIM)
    with pytest.raises(AssertionError, match="not pinned"):
        gpu.host._require_pinned(plain, torch.tensor([1]))


def test_memory_is_pinned_as_it_fills_and_once(gpu: SimulatedGPU):
    """Pinning runs a chunk ahead on another thread; the end unpins all memory."""
    scene = Scene(num_pages=4 * CHUNK // 512 + 3)
    tier, each = scene.tier, CHUNK // 512
    arena = tier._arena
    assert arena is not None

    def chunks() -> int:
        if arena._next is not None:
            arena._next.result(30)
        assert list(gpu.host.pinned) == [c.data_ptr() for c in arena._pinned]
        return len(gpu.host.pinned)

    assert chunks() == 2
    first = tier.take(each)
    assert chunks() == 2
    gpu.host.quick.clear()
    tier.take(1)  # the second region; the third is being pinned
    assert len(gpu.host.pinned) == 2
    assert arena._next is not None
    assert not arena._next.done()
    gpu.host.quick.set()
    tier.take(2 * each)  # more than is pinned
    assert chunks() == 5
    tier.release(first)
    tier.take(2 * each + 2)
    assert tier.num_free == 0
    assert sum(gpu.host.pinned.values()) >= tier.pages.nbytes
    assert gpu.host.freed == 0
    scene.fetch(first)
    tier.close()
    assert tier.reads is None
    assert not gpu.host.pinned
    freed = gpu.host.freed
    tier.close()
    assert gpu.host.freed == freed >= tier.pages.nbytes


def test_memory_that_nobody_holds_is_unpinned(gpu: SimulatedGPU):
    scene = Scene(num_pages=3)
    scene.fetch(scene.tier.take(1))
    assert gpu.host.pinned
    del scene
    gc.collect()
    assert not gpu.host.pinned
    assert gpu.waits, "behind the read data"


def test_what_cannot_be_pinned_is_staged(gpu: SimulatedGPU, caplog):
    """The warning appears once; results are the same."""
    life = Life(POLICIES[0] | {"host_fetch": "direct"}, CUDA)
    while gpu.host.fetches < 5:
        life.step(life.rows())
    gpu.host.room = 0
    results, traffic = lived(life)
    assert life.retrieval.tier.reads is None
    (warning,) = [r.message for r in caplog.records if "cannot pin" in r.message]
    assert "cudaErrorMemoryAllocation" in warning
    fetches, pinned_then = gpu.host.fetches, len(gpu.host.pinned)
    assert pinned_then > 2
    plain = lived(Life(POLICIES[0], CUDA))
    same(results[-1:], plain[0][-1:])
    assert traffic == plain[1]
    assert (gpu.host.fetches, len(gpu.host.pinned)) == (fetches, pinned_then)
    gpu.host.finish()


def test_nothing_at_all_can_be_pinned(gpu: SimulatedGPU):
    gpu.host.room = CHUNK - 1
    with pytest.raises(RuntimeError, match=r"cannot be pinned: .*out of memory"):
        Scene(num_pages=100)
    assert not gpu.host.pinned


@pytest.mark.parametrize("how", ["staged", "direct"])
def test_the_smoke_test_for_gpus_measures_it(gpu: SimulatedGPU, how: str):
    run = _gpu_copies.fetcher(CUDA, how, 32)
    assert [int(run()) for _ in range(6)] == [8 * 32] * 6
    assert gpu.host.fetches == (6 if how == "direct" else 0)
    gpu.host.finish()
