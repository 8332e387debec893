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

from vllm_kvplugins.ops.coarse_entries import CoarseEntries
from vllm_kvplugins.ops.layout import PagedKV, PageLayout
from vllm_kvplugins.ops.triton import clusters, paged_attention

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter"
    ),
]
# bytes of shared memory that a program may have, by compute capability
SHARED = {90: 227 << 10, 80: 163 << 10}
BF16, FP32 = torch.bfloat16, torch.float32
HEADS, GROUP = 2, 4


class Driver:
    """What Triton asks of a GPU before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return 1000 + self._capability  # no real one, whose kernels are kept as well

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class Compiled:
    """In a kernel's place: a launch compiles it."""

    def __init__(self, kernel: Any, made: list[Any]) -> None:
        self._kernel, self._made = kernel, made

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self._compile, grid)

    def _compile(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        self._made.append(self._kernel.warmup(*args, grid=grid, **kwargs))


@pytest.fixture(scope="module", autouse=True)
def fresh(tmp_path_factory):
    """No kernel of an earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture
def made(request, monkeypatch):
    """The kernels that a call launches, compiled for a capability."""
    try:
        assert triton.knobs.nvidia.ptxas.path
    except RuntimeError as error:
        pytest.skip(f"Triton lacks its assembler: {error}")
    found: list[Any] = []
    for module, names in (
        (paged_attention, ("attend", "merge")),
        (clusters, ("_assign", "_look_up")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Compiled(getattr(module, name), found))
    driver = Driver(getattr(request, "param", 90))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return found


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
) -> None:
    """A call of the kernels; only shapes, types and addresses count."""
    tokens = rows * max_per_row
    start = torch.arange(rows + 1, dtype=torch.int32) * max_per_row
    lists = torch.zeros(shift + rows * HEADS * pages, dtype=torch.int32)[shift:]
    coarse = None
    if entries is not None:
        rest = torch.zeros(9), *torch.zeros(2, rows * HEADS).long()
        coarse = CoarseEntries(*torch.zeros(2, 9, head_dim, dtype=entries), *rest)
    paged_attention.attend_paged(
        paged_attention.NewTokens(
            torch.zeros(tokens, HEADS * GROUP, head_dim, dtype=dtype),
            None if max_per_row == 1 else start,
            max_per_row,
        ),
        PagedKV(
            torch.zeros(3, block * 2 * head_dim, dtype=dtype),
            PageLayout.interleaved(block, head_dim),
        ),
        lists.view(rows * HEADS, pages),
        torch.ones(shift + rows * HEADS, dtype=torch.int32)[shift:],
        head_dim**-0.5,
        coarse,
        splits=splits,
    )


def assert_fits(made: list[Any], capability: int, names: list[str]) -> None:
    assert [kernel.metadata.name for kernel in made] == names
    for kernel in made:
        assert kernel.asm["cubin"]
        assert f".target sm_{capability}" in kernel.asm["ptx"]
        assert kernel.metadata.shared <= SHARED[capability]


@pytest.mark.parametrize(
    ("made", "case"),
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
        (80, {"splits": 4, "head_dim": 128}),
        (80, {"head_dim": 256, "max_per_row": 9}),
        (80, {"head_dim": 256, "max_per_row": 9, "dtype": FP32, "block": 128}),
    ],
    indirect=["made"],
    ids=str,
)
def test_attention(request, made, case):
    attend(**case)
    names = ["attend", "merge"] if case.get("splits", 1) > 1 else ["attend"]
    assert_fits(made, request.node.callspec.params["made"], names)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_clusters(made, head_dim, masked):
    clusters.assign_and_average(
        torch.zeros(2, 70, head_dim, dtype=BF16),
        torch.zeros(2, 5, head_dim),
        torch.zeros(2, 70),
        torch.ones(2, 70, dtype=torch.bool) if masked else None,
    )
    assert_fits(made, 90, ["_assign", "_look_up"])


def test_a_server_s_steps_share_a_kernel(made):
    """However many requests and pages they have, and wherever page lists begin."""
    for rows, pages, shift in ((2, 5, 0), (1, 16, 0), (16, 1, 1), (33, 7, 3)):
        attend(rows, pages=pages, splits=2, shift=shift)
    assert len(made) == 8
    assert {kernel.metadata.name for kernel in made} == {"attend", "merge"}
    assert len({id(kernel) for kernel in made}) == 2


def test_loads_of_keys_and_values_are_wide(made):
    """16 bytes at once, whatever is not known before the launch; page ids have 4."""
    attend(33, pages=7, shift=1)
    (kernel,) = made
    found = re.findall(r"cp\.async\.c.\.shared\.global .*, 0x(\w+)", kernel.asm["ptx"])
    assert set(found) == {"10", "4"}
    assert found.count("10") > 2 * found.count("4")


def test_parts_are_powers_of_two(monkeypatch):
    """As the kernel is compiled for each number."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(multi_processor_count=132),
    )
    cuda = torch.device("cuda")
    programs = range(8, 1200, 8)
    found = [paged_attention._splits(cuda, each, 1 << 20, 64) for each in programs]
    assert found[:5] == [16, 16, 8, 8, 4]
    assert set(found) == {1, 2, 4, 8, 16}
    assert paged_attention._splits(cuda, 8, 200, 64) == 1
