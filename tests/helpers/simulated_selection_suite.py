"""A simulated GPU that selects tokens itself: steps never wait for it.

``tests/unit/test_suites.py`` runs it in its own process, because torch cannot undo the
simulation of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_cuda import CUDA
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
from vllm_kvplugins.ops.device import AsyncHostCopy

SETTINGS = {"name": "icecache", "budget": 12, "sinks": 2, "window": 8}
SETTINGS |= {"skip_layers": 1, "host_memory": 1 << 18}
STEPS = 3 * ANSWER


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch) -> None:
    monkeypatch.setenv("KVP_OPS", "torch")
    monkeypatch.setattr(pinned, "CHUNK_BYTES", 1 << 14)
    without_inference_mode(
        monkeypatch,
        (Fetcher, "_fetched"),
        (RetrievalController, "forget"),
        (RetrievalController, "detach"),
    )


def lived(policy: dict[str, Any], device: torch.device) -> tuple[Any, ...]:
    """Tables and final cache, fetched tokens, and waits of steps that only decode."""
    tables, waits, fetched, plain_steps = [], [], 0, 0
    with on(device) as gpu:
        life = Life(policy, device)
        while life.computed["short"] < PROMPTS["short"] + STEPS:
            before = len(gpu.waits) if gpu else 0
            rows = life.rows()
            tables += life.step(rows)
            fetched += life.retrieval.take_traffic().fetched
            # A compaction waits, and it is over before the next step begins.
            if all(row.new_tokens == 1 for row in rows) and not life.compacted:
                plain_steps += 1
                waits += gpu.waits[before:] if gpu else []
        if gpu:
            assert gpu.host.fetches > STEPS
            gpu.host.finish()  # nothing has overwritten what the GPU read
        fetched += life.retrieval.take_traffic().fetched
        results = [numbers(table).clone() for table in (*tables, life.heap.pages)]
        life.runtime.forget(list(PROMPTS))
        life.retrieval.tier.close()
        assert not gpu or not gpu.host.pinned
    assert plain_steps > STEPS // 2
    return results, fetched, waits


@pytest.mark.parametrize("reuse_every", [1, 2])
def test_decoding_never_waits(reuse_every: int):
    """The GPU has what a CPU has, bit for bit, and the host waited for nothing."""
    policy = SETTINGS | {"index": "device", "reuse_every": reuse_every}
    on_cpu, fetched, _ = lived(policy, torch.device("cpu"))
    on_gpu, fetched_on_gpu, waits = lived(policy, CUDA)
    for expected, actual in zip(on_cpu, on_gpu, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert waits == []
    assert fetched_on_gpu == fetched > 0


def test_the_simulation_sees_a_host_that_selects(monkeypatch):
    monkeypatch.delenv("KVP_OPS")  # codes on the host are compiled
    policy = SETTINGS | {"index": "auto", "host_fetch": "direct"}
    _, _, waits = lived(policy, CUDA)
    assert len(waits) > STEPS, "once per step and layer"


def test_all_host_memory_is_pinned_at_once():
    policy = SETTINGS | {"index": "device"}
    with on(CUDA) as gpu:
        assert gpu is not None
        life = Life(policy, CUDA)
        tier = life.retrieval.tier
        assert sum(gpu.host.pinned.values()) >= tier.pages.nbytes
        assert life.runtime.device_table_bytes >= len(tier.pages) * 16 * (8 + 4)
        tier.close()
        gpu.host.room = 1 << 15
        with pytest.raises(RuntimeError, match=r"KVP033.*lower host_memory"):
            Life(policy, CUDA)
        assert not gpu.host.pinned


class ByItself(AsyncHostCopy):
    """Tokens reach the host on their own stream.

    Their arrival says nothing about earlier reads of the GPU.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            super().__init__(tensor)


def test_nobody_writes_where_the_gpu_still_reads(monkeypatch):
    """Requests end and new ones start in a tier that holds only one set."""
    monkeypatch.setattr(offload_queue, "AsyncHostCopy", ByItself)
    policy = SETTINGS | {"index": "device"}
    with on(CUDA) as gpu:
        assert gpu is not None
        needed = 0
        for host_memory in (1 << 18, None):
            life = Life(policy | {"host_memory": host_memory or needed}, CUDA)
            tier = life.retrieval.tier
            for _ in range(1 if host_memory else 2):
                while life.computed["short"] < PROMPTS["short"] + ANSWER:
                    life.step(life.rows())
                needed = (len(tier.pages) - tier.num_free) * tier.page_bytes
                life.runtime.forget(list(PROMPTS))
                life.computed = dict.fromkeys(PROMPTS, 0)
            assert needed == len(tier.pages) * tier.page_bytes or host_memory
            gpu.host.finish()
            tier.close()
