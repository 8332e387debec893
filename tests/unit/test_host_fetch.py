"""Fetching tokens from host memory, and the conditions for direct reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import make_layout
from test_ops import (
    DTYPES,
    LAYOUTS,
    NUM_PAGES,
    assert_same_bits,
    make_heap,
    make_places,
)

from vllm_kvplugins import ops
from vllm_kvplugins.config import parse_policy
from vllm_kvplugins.engine.retrieval import pinned
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.ops import dispatch, host_fetch

BACKENDS = ["torch"] if dispatch.load_extension().reason else ["compiled", "torch"]
BLOCK, DIM, ROWS, N = 16, 24, 40, 30


def arguments(kind: str, dtype: torch.dtype) -> list[Any]:
    """Arguments of a call; rows may repeat."""
    print("seed 11")
    random = torch.Generator().manual_seed(11)
    layout = make_layout(kind, BLOCK, DIM, 11)
    rows = make_heap(make_layout("natural", 1, DIM, 11), dtype, seed=12)
    rows = rows.reshape(-1, DIM).repeat(3, 1)[:ROWS].contiguous()
    host_rows = torch.randint(ROWS, (2, N), generator=random)
    heap = make_heap(layout, dtype, seed=13, gap=5)
    return [ops.PagedKV(heap, layout), *make_places(layout, N, 14), rows, *host_rows]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_to_their_slots(monkeypatch, backend, kind, dtype):
    monkeypatch.setenv("KVP_OPS", backend)
    kv, pages, slots, rows, keys, values = arguments(kind, dtype)
    heap, layout = kv.pages, kv.layout
    expected = heap.clone()
    for i in range(N):
        at = slots[i] * DIM + torch.arange(DIM)
        expected[pages[i], layout.k_offsets[at].long()] = rows[keys[i]]
        expected[pages[i], layout.v_offsets[at].long()] = rows[values[i]]
    ops.fetch_tokens(kv, pages, slots, rows, keys, values)
    assert_same_bits(heap, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        (1, NUM_PAGES, r"pages\[3\] is page 9, but the heap has pages 0 to 8"),
        (2, -1, r"slots\[3\] is slot -1, but pages have slots 0 to 15"),
        (4, ROWS, r"key_rows\[3\] is row 40, but there are rows 0 to 39"),
        (5, -2, r"value_rows\[3\] is row -2, but there are rows 0 to 39"),
    ],
)
def test_what_does_not_exist_is_refused(monkeypatch, backend, which, value, message):
    monkeypatch.setenv("KVP_OPS", backend)
    case = arguments("natural", torch.float32)
    before = case[0].pages.clone()
    case[which][3] = value
    with pytest.raises(ValueError, match=message):
        ops.fetch_tokens(*case)
    assert_same_bits(case[0].pages, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_not_fit_is_refused(monkeypatch, backend):
    monkeypatch.setenv("KVP_OPS", backend)
    case = arguments("natural", torch.float32)
    for which, wrong in (
        (3, case[3].bfloat16()),
        (3, case[3][:, 1:].contiguous()),
        (4, case[4][1:]),
        (5, case[5].int()),
        (1, torch.zeros_like(case[1])),  # then pairs repeat
    ):
        changed = list(case)
        changed[which] = wrong
        with pytest.raises(ValueError, match=r"kvp\.fetch_tokens"):
            ops.fetch_tokens(*changed)


# -- who may --------------------------------------------------------------------------


def test_a_cpu_reads_nothing_directly():
    cpu = torch.device("cpu")
    assert "cpu device" in (host_fetch.direct_problem(cpu) or "")
    with pytest.raises(RuntimeError, match=r"cannot be read directly: .*cpu device"):
        HostTier(1 << 20, 16, 8, torch.float32, cpu)


def test_a_gpu_needs_our_kernels(monkeypatch):
    monkeypatch.setenv("KVP_OPS", "torch")
    cuda = torch.device("cuda", 0)
    assert host_fetch.direct_problem(cuda) == "KVP_OPS=torch"
    with pytest.raises(RuntimeError, match="cannot be read directly: KVP_OPS=torch"):
        pinned.PinnedArena(1 << 20, cuda)


DIRECT = {"name": "exact-topk", "host_fetch": "direct"}


def test_settings():
    assert parse_policy("exact-topk").host_fetch == "staged"
    assert parse_policy(DIRECT).host_fetch == "direct"
    with pytest.raises(KVPolicyError, match="host_fetch"):
        parse_policy(DIRECT | {"host_fetch": "pinned"})


def test_refusals_at_start_up(monkeypatch):
    pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")
    from vllm_kvplugins.vllm_adapter.config import host_memory

    direct = parse_policy(DIRECT)
    policies = [parse_policy(name) for name in ("exact-topk", "snapkv", "sekv")]
    for kind in ("cpu", "cuda"):
        platform = SimpleNamespace(is_cpu=lambda kind=kind: kind == "cpu")
        monkeypatch.setattr("vllm.platforms.current_platform", platform)
        for policy in policies:
            assert host_memory.fetch_problems(policy) == []
        (message,) = host_memory.fetch_problems(direct)
        assert codes_in(message) == ("KVP033",)
        assert ("on a CPU" in message) == (kind == "cpu")
        assert ("CUDA kernels (" in message) == (kind == "cuda")
    monkeypatch.setattr(host_memory, "direct_problem", lambda device: None)
    assert host_memory.fetch_problems(direct) == []


def test_a_process_that_may_not_pin_is_refused(monkeypatch):
    pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")
    from vllm_kvplugins.vllm_adapter.config import host_memory

    held: dict[int, int] = {}

    def pin(memory: torch.Tensor, device: torch.device) -> None:
        if not allowed:
            raise ValueError("kvp.pin_host: cudaErrorMemoryAllocation, out of memory")
        held[memory.data_ptr()] = memory.nbytes

    monkeypatch.setattr(host_fetch, "direct_problem", lambda device: None)
    monkeypatch.setattr(host_fetch, "pin", pin)
    monkeypatch.setattr(host_fetch, "unpin", lambda memory: held.pop(memory.data_ptr()))
    cuda, allowed = torch.device("cuda", 0), False
    (message,) = host_memory.pinning_problems(parse_policy(DIRECT), cuda)
    assert "out of memory" in message
    assert "ulimit -l" in message
    assert host_memory.pinning_problems(parse_policy("exact-topk"), cuda) == []
    allowed = True
    assert host_memory.pinning_problems(parse_policy(DIRECT), cuda) == []
    assert not held, "it was a try"
