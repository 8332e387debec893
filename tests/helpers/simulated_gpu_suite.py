"""Eviction on a simulated GPU: devices never mix, and decoding never waits.

``tests/unit/test_suites.py`` runs it in its own process, because torch cannot undo the
simulation of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from policy_settings import drop
from simulated_cuda import CUDA, SimulatedGPU
from simulated_requests import ANSWER, PROMPTS, Life, numbers, on, policies

from vllm_kvplugins.engine import compactor
from vllm_kvplugins.ops.device import AsyncHostCopy
from vllm_kvplugins.ops.page_votes import page_votes


@pytest.fixture
def gpu() -> Iterator[SimulatedGPU]:
    with SimulatedGPU() as simulated:
        yield simulated


def test_the_simulated_gpu(gpu: SimulatedGPU):
    """The simulation refuses and counts what it should."""
    on_gpu = torch.arange(5, device=CUDA)
    assert on_gpu.device == CUDA
    assert not gpu.waits
    with pytest.raises(RuntimeError, match="two devices"):
        on_gpu + torch.arange(5)
    assert (on_gpu + 1).numbers.tolist() == [1, 2, 3, 4, 5]
    view = on_gpu.view(5, 1)[2:]
    view += 7
    assert on_gpu.numbers.tolist() == [0, 1, 9, 10, 11]
    assert not gpu.waits
    for wait in (
        lambda: int(on_gpu.max()),
        lambda: on_gpu.tolist(),
        lambda: on_gpu[on_gpu > 3],
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: on_gpu.cpu(),
        lambda: on_gpu.nonzero(),
    ):
        before = len(gpu.waits)
        wait()
        assert len(gpu.waits) > before
    before = len(gpu.waits)
    torch.tensor([1, 2]).pin_memory().to(CUDA, non_blocking=True)
    assert len(gpu.waits) == before


def test_what_is_on_its_way_to_the_host_is_not_there(gpu: SimulatedGPU):
    arrival = AsyncHostCopy(torch.arange(3.0, device=CUDA))
    early = AsyncHostCopy(torch.ones(2, device=CUDA))
    assert early._host.isnan().all()
    assert not gpu.waits
    assert arrival.wait().tolist() == [0, 1, 2]
    assert early._host.isnan().all(), "an event says nothing of what is sent later"
    assert early.wait().tolist() == [1, 1]
    assert len(gpu.waits) == 2
    with ThreadPoolExecutor(1) as thread:
        results = thread.submit(
            lambda: AsyncHostCopy(torch.ones(1, device=CUDA)).wait()
        )
        assert results.result().tolist() == [1]


@pytest.mark.parametrize(
    ("draft_layers", "fp8"), [(0, False), (2, False), (0, True)], ids=str
)
@pytest.mark.parametrize("policy", policies(drop), ids=lambda p: p["name"])
def test_eviction_on_a_gpu_is_that_on_a_cpu(
    monkeypatch, policy: dict[str, Any], draft_layers: int, fp8: bool
):
    """Without a drafter, with the layers of one, and with an fp8 cache."""
    monkeypatch.setenv("KVP_OPS", "torch")
    results, waits = {}, []
    for device in (torch.device("cpu"), CUDA):
        tables = []
        with on(device) as gpu:
            life = Life(policy, device, draft_layers, fp8)
            while life.computed["short"] < PROMPTS["short"] + ANSWER:
                before = len(gpu.waits) if gpu else 0
                rows = life.rows()
                tables += life.step(rows)
                if gpu and all(row.new_tokens == 1 for row in rows):
                    waits += gpu.waits[before:]
        heaps = [life.heap] + ([life.draft_heap] if life.draft_heap else [])
        pages = [heap.pages for heap in heaps]
        results[device.type] = [numbers(t) for t in (*tables, *pages)]
    for on_cpu, on_gpu in zip(results["cpu"], results["cuda"], strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=0)
    if life.runtime.policy.observation is None:
        assert waits == []


ASK_PAGES = {"snapkv", "pyramidkv", "chunkkv", "protokv", "tova", "h2o"}
ASK_PAGES |= {"criticalkv", "infinipot", "epicache"}


@pytest.mark.parametrize("policy", policies(drop), ids=lambda p: p["name"])
def test_votes_from_pages_make_the_same_choice(monkeypatch, policy: dict[str, Any]):
    """The conditions of a GPU with our kernels, and the same ops on a CPU."""
    calls = []

    def noted(*args: Any) -> torch.Tensor:
        calls.append(args)
        return page_votes(*args)

    monkeypatch.setattr(compactor, "page_votes", noted)
    final = []
    for answer in (False, True):
        monkeypatch.setattr(
            compactor, "reads_votes_from_pages", lambda device, a=answer: a
        )
        life = Life(policy, torch.device("cpu"))
        while life.computed["short"] < PROMPTS["short"] + ANSWER:
            tables = life.step(life.rows())
        final.append([*tables, life.heap.pages])
        assert bool(calls) == (answer and policy["name"] in ASK_PAGES)
    for from_slots, from_pages in zip(*final, strict=True):
        assert from_pages.equal(from_slots)
