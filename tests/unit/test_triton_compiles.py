"""Our Triton kernels compile for GPUs; needs no GPU.

Triton compiles to machine code with its bundled assembler. The launching functions
provide the kernels' arguments; kernels are compiled, not launched. Other tests
interpret the same source, without a compiler's requirements: matching types, enough
shared memory, one kernel for all steps of a server.
"""

from __future__ import annotations

import functools
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton.backends.nvidia.compiler")

import triton
from triton.backends.compiler import GPUTarget

from vllm_kvplugins.ops import code_select
from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.ops.triton import clusters, paged_attention
from vllm_kvplugins.ops.triton import code_select as triton_code_select
from vllm_kvplugins.scoring.logits import PLAIN, LogitRules

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter"
    ),
]
# shared memory in bytes per program, by compute capability
SHARED = {100: 227 << 10, 90: 227 << 10, 89: 99 << 10, 80: 163 << 10}
BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HEADS, GROUP = 2, 4


class Driver:
    """The properties of a GPU that Triton reads before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        # Not a real one, because Triton caches kernels of real ones
        return 1000 + self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class Compiled:
    """Replaces a kernel: a launch compiles it."""

    def __init__(self, kernel: Any, kernels: list[Any]) -> None:
        self._kernel, self._kernels = kernel, kernels

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._compile, grid)

    def _compile(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        self._kernels.append(self._kernel.warmup(*args, grid=grid, **kwargs))


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory):
    """Removes the kernels of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def kernels(request, monkeypatch):
    """The kernels that a call launches, compiled for a capability."""
    try:
        assert triton.knobs.nvidia.ptxas.path
    except RuntimeError as error:
        pytest.skip(f"Triton lacks its assembler: {error}")
    compiled: list[Any] = []
    for module, names in (
        (paged_attention, ("attend", "merge")),
        (clusters, ("_assign", "_look_up")),
        (triton_code_select, ("score", "vote", "swap", "fetch")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Compiled(getattr(module, name), compiled))
    driver = Driver(getattr(request, "param", 90))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return compiled


def attend(
    rows: int = 2,
    max_per_row: int = 1,
    dtype: torch.dtype = BF16,
    head_dim: int = 64,
    block: int = 16,
    splits: int = 1,
    entries: torch.dtype | None = None,
    pages: int = 5,
    shift: int = 0,
    rules: bool = False,
    fp8: torch.dtype | None = None,
) -> None:
    """A call of the kernels; only shapes, types and addresses matter."""
    tokens = rows * max_per_row
    start = torch.arange(rows + 1, dtype=torch.int32) * max_per_row
    lists = torch.zeros(shift + rows * HEADS * pages, dtype=torch.int32)[shift:]
    coarse = None
    if entries is not None:
        tensors = torch.zeros(9), *torch.zeros(2, rows * HEADS).long()
        coarse = CoarseEntries(*torch.zeros(2, 9, head_dim, dtype=entries), *tensors)
    paged_attention.attend_paged(
        paged_attention.NewTokens(
            torch.zeros(tokens, HEADS * GROUP, head_dim, dtype=dtype),
            None if max_per_row == 1 else start,
            max_per_row,
        ),
        PagedKV(
            torch.zeros(3, block * 2 * head_dim, dtype=torch.uint8 if fp8 else dtype),
            PageLayout.interleaved(block, head_dim),
        ),
        lists.view(rows * HEADS, pages),
        torch.ones(shift + rows * HEADS, dtype=torch.int32)[shift:],
        head_dim**-0.5,
        coarse,
        rules=LogitRules(torch.zeros(HEADS * GROUP), 30.0) if rules else PLAIN,
        fp8=paged_attention.Fp8Elements(fp8, 0.5, 0.25) if fp8 else None,
        splits=splits,
    )


def assert_fits(kernels: list[Any], capability: int, names: list[str]) -> None:
    assert [kernel.metadata.name for kernel in kernels] == names
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED[capability]


@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        (90, {}),
        (90, {"splits": 4, "block": 128}),
        (90, {"splits": 16, "head_dim": 128}),
        (90, {"head_dim": 128, "block": 128}),
        (90, {"splits": 2, "head_dim": 256}),
        (90, {"head_dim": 256, "block": 128, "max_per_row": 9}),
        (90, {"head_dim": 128, "max_per_row": 9}),
        (90, {"splits": 4, "head_dim": 128, "entries": BF16}),
        (90, {"head_dim": 128, "max_per_row": 9, "entries": FP32}),
        (90, {"splits": 4, "head_dim": 128, "dtype": FP32}),
        (90, {"splits": 4, "head_dim": 128, "rules": True}),
        (80, {"head_dim": 256, "max_per_row": 9, "rules": True}),
        (90, {"splits": 4, "head_dim": 128, "fp8": E4M3}),
        (90, {"head_dim": 256, "block": 128, "max_per_row": 9, "fp8": E5M2}),
        (100, {"splits": 4, "head_dim": 128, "fp8": E4M3}),
        (89, {"head_dim": 128, "max_per_row": 9, "fp8": E4M3}),
        (80, {"splits": 4, "head_dim": 128}),
        (80, {"head_dim": 256, "max_per_row": 9}),
        (80, {"head_dim": 256, "max_per_row": 9, "dtype": FP32, "block": 128}),
    ],
    indirect=["kernels"],
    ids=str,
)
def test_attention(request, kernels, case):
    attend(**case)
    names = ["attend", "merge"] if case.get("splits", 1) > 1 else ["attend"]
    assert_fits(kernels, request.node.callspec.params["kernels"], names)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_clusters(kernels, head_dim, masked):
    clusters.assign_and_average(
        torch.zeros(2, 70, head_dim, dtype=BF16),
        torch.zeros(2, 5, head_dim),
        torch.zeros(2, 70),
        torch.ones(2, 70, dtype=torch.bool) if masked else None,
    )
    assert_fits(kernels, 90, ["_assign", "_look_up"])


def select(
    group: int = 4,
    head_dim: int = 128,
    requests: int = 2,
    pages: int = 5,
    width: int = 7,
    dtype: torch.dtype = BF16,
) -> None:
    """Votes, swaps and fetches; only shapes, types and addresses matter."""
    longs = functools.partial(torch.zeros, dtype=torch.int64)
    codes = torch.zeros(9, 16, head_dim, dtype=torch.int8)
    keys = code_select.KeyCodes(codes, torch.zeros(9, 16))
    host = code_select.HostRequests(longs(requests, HEADS, pages), longs(requests))
    votes = triton_code_select.code_votes(
        torch.zeros(requests, HEADS, group, head_dim, dtype=dtype),
        torch.zeros(requests, HEADS, head_dim),
        keys,
        host,
        head_dim**-0.5,
    )
    held = longs(requests, HEADS, width + 3)
    hot = code_select.HotTokens(held, longs(requests), longs(requests), width)
    rows, _ = triton_code_select.swap_tokens(votes, 16, host, hot)
    kv = PagedKV(
        torch.zeros(3, 16 * 2 * head_dim, dtype=dtype),
        PageLayout.interleaved(16, head_dim),
    )
    host_pages = torch.zeros(9, 2, 16, head_dim, dtype=dtype)
    triton_code_select.fetch_rows(kv, host_pages, rows, rows, rows)


SELECTION = ["score", "vote", "swap", "fetch"]


@pytest.mark.parametrize(
    ("kernels", "case"),
    [
        (80, {}),
        (90, {}),
        (100, {}),
        (90, {"head_dim": 64, "group": 1, "dtype": FP32}),
        (80, {"head_dim": 256, "group": 40}),
        (100, {"head_dim": 96, "dtype": torch.float16}),
    ],
    indirect=["kernels"],
    ids=str,
)
def test_selection(request, kernels, case):
    select(**case)
    assert_fits(kernels, request.node.callspec.params["kernels"], SELECTION)


def test_selection_of_all_steps_shares_kernels(kernels):
    for requests, pages, width in ((1, 1, 1), (2, 16, 16), (16, 33, 256)):
        select(requests=requests, pages=pages, width=width)
    assert len({id(kernel) for kernel in kernels}) == len(SELECTION)


def test_codes_meet_in_tensor_cores_and_rows_cross_the_bus_in_wide_loads(kernels):
    select()
    ptx = {kernel.metadata.name: kernel.asm["ptx"] for kernel in kernels}
    assert re.search(r"mma.*\.s32\.s8\.s8\.s32", ptx["score"])
    assert "ld.global.v4.b32" in ptx["fetch"]


def test_a_server_s_steps_share_a_kernel(kernels):
    """All numbers of requests and pages, and all offsets of page lists, share a
    kernel.
    """
    for rows, pages, shift in ((2, 5, 0), (1, 16, 0), (16, 1, 1), (33, 7, 3)):
        attend(rows, pages=pages, splits=2, shift=shift)
    assert len(kernels) == 8
    assert {kernel.metadata.name for kernel in kernels} == {"attend", "merge"}
    assert len({id(kernel) for kernel in kernels}) == 2


@pytest.mark.parametrize(("fp8", "width"), [(None, "10"), (E4M3, "8")], ids=str)
def test_loads_of_keys_and_values_are_wide(kernels, fp8, width):
    """8 elements per load, although little is known before the launch; page ids have 4
    bytes.
    """
    attend(33, pages=7, shift=1, fp8=fp8)
    (kernel,) = kernels
    compiled = re.findall(
        r"cp\.async\.c.\.shared\.global .*, 0x(\w+)", kernel.asm["ptx"]
    )
    assert set(compiled) == {"10", width, "4"}, "queries, keys and values, page ids"
    assert compiled.count(width) > compiled.count("4")


def test_parts_are_powers_of_two(monkeypatch):
    """The number of splits, for each compiled variant."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )
    cuda = torch.device("cuda")
    programs = range(8, 1200, 8)
    compiled = [paged_attention._splits(cuda, each, 1 << 20, 64) for each in programs]
    assert compiled[:5] == [16, 16, 8, 8, 4]
    assert set(compiled) == {1, 2, 4, 8, 16}
    assert paged_attention._splits(cuda, 8, 200, 64) == 1
