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
        found = thread.submit(lambda: AsyncHostCopy(torch.ones(1, device=CUDA)).wait())
        assert found.result().tolist() == [1]


@pytest.mark.parametrize("policy", policies(drop), ids=lambda p: p["name"])
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
    if life.runtime.policy.observation is None:
        assert waits == []


ASK_PAGES = {"snapkv", "pyramidkv", "chunkkv", "protokv", "tova", "h2o"}
ASK_PAGES |= {"infinipot", "epicache"}


@pytest.mark.parametrize("policy", policies(drop), ids=lambda p: p["name"])
def test_pages_are_asked_for_the_same_choice(monkeypatch, policy: dict[str, Any]):
    """With our kernels on a GPU; here the same ops on a CPU."""
    asked = []

    def noted(*args: Any) -> torch.Tensor:
        asked.append(args)
        return page_votes(*args)

    monkeypatch.setattr(compactor, "page_votes", noted)
    left = []
    for answer in (False, True):
        monkeypatch.setattr(
            compactor, "reads_votes_from_pages", lambda device, a=answer: a
        )
        life = Life(policy, torch.device("cpu"))
        while life.computed["short"] < PROMPTS["short"] + ANSWER:
            tables = life.step(life.rows())
        left.append([*tables, life.heap.pages])
        assert bool(asked) == (answer and policy["name"] in ASK_PAGES)
    for here, there in zip(*left, strict=True):
        assert here.equal(there)
