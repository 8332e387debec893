"""Host-side search has its own threads, independent of vLLM's settings."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.ops.extension import load_extension
from vllm_kvplugins.ops.threads import Helper
from vllm_kvplugins.sessions.file_thread import FileThread

BEFORE = 6  # torch's threads while weights are loaded
CORES = 16


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(BEFORE)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("policy", "ranks", "exported", "threads"),
    [
        ("exact-topk", 1, {}, BEFORE),
        ("sekv", 1, {}, BEFORE),
        ("snapkv", 1, {}, 1),  # keeps nothing on the host
        ("exact-topk", 4, {}, CORES // 4),
        ("exact-topk", 32, {}, 1),
        # as vLLM starts ranks
        (
            "exact-topk",
            2,
            {"OMP_NUM_THREADS": "6", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM": "1"},
            BEFORE,
        ),
        # as a user configures it, for the number of ranks
        ("exact-topk", 4, {"OMP_NUM_THREADS": "6"}, BEFORE),
        ("snapkv", 4, {"OMP_NUM_THREADS": "6"}, BEFORE),
    ],
)
def test_threads_of_a_gpu_s_worker(monkeypatch, policy, ranks, exported, threads):
    torch_utils = pytest.importorskip("vllm.utils.torch_utils")
    from vllm_kvplugins.vllm_adapter.worker import gpu_worker

    for name in ("OMP_NUM_THREADS", "VLLM_OMP_NUM_THREADS_SET_BY_VLLM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch_utils, "available_cpu_count", lambda: CORES)
    loaded: list[Any] = []

    def load_model(self: Any, **options: Any) -> None:
        """A worker that loads nothing and shuts down as vLLM's does."""
        loaded.append(options)
        torch_utils.set_torch_threads_for_runtime()

    monkeypatch.setattr(gpu_worker.Worker, "load_model", load_model)
    worker = gpu_worker.KVPolicyGPUWorker.__new__(gpu_worker.KVPolicyGPUWorker)
    runtime = SimpleNamespace(policy=parse_policy(policy))
    worker.kv_policy = SimpleNamespace(runtime=runtime, bind_layers=list)
    config = SimpleNamespace(static_forward_context={})
    worker.vllm_config = SimpleNamespace(compilation_config=config)
    worker.parallel_config = SimpleNamespace(
        local_world_size=ranks, data_parallel_size_local=1
    )
    worker.load_model(load_dummy_weights=True)
    assert torch.get_num_threads() == threads
    assert loaded == [{"load_dummy_weights": True}]


def test_helper_threads_use_as_many_cores_as_torch():
    """OpenMP settings of one thread do not apply to a new thread."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    libraries = {line.split()[-1] for line in lines if "omp" in line.split("/")[-1]}
    settings = [
        library.omp_get_max_threads
        for library in map(ctypes.CDLL, sorted(libraries))
        if hasattr(library, "omp_get_max_threads")
    ]
    if not settings:
        pytest.skip("no OpenMP is loaded")
    # torch's library, which the compiled ops use; other packages bring their own
    settings = [ask for ask in settings if ask() == BEFORE]
    assert settings, "torch has no OpenMP that was found"
    for threads in (5, 3):
        torch.set_num_threads(threads)
        with Helper("kvp-test") as thread:
            for _ in range(2):
                counts = [thread.submit(ask).result() for ask in settings]
                assert counts == [threads] * len(settings)


def thread_ids() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.skipif(bool(load_extension().reason), reason=load_extension().reason)
@pytest.mark.parametrize("kind", [Helper, FileThread])
def test_a_task_leaves_no_openmp_threads(kind):
    """If they stay, idle threads of the model sleep, and its loops start later.

    Threads of earlier tests may end meanwhile.
    """
    torch.set_num_threads(3)
    rows = torch.ones(1000, 1000)

    def in_parallel() -> set[str]:
        rows.add(1).sum()
        return thread_ids()

    thread = kind("kvp-test")
    before = thread.submit(thread_ids).result()
    for _ in range(2):
        assert len(thread.submit(in_parallel).result() - before) == 2
        assert not thread.submit(thread_ids).result() - before


def test_a_task_that_fails_raises_its_error():
    with Helper("kvp-test") as thread, pytest.raises(ZeroDivisionError):
        thread.submit(divmod, 1, 0).result()
