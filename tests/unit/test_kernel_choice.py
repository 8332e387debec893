"""The choice of the attention kernel, and the errors if a kernel cannot run."""

from __future__ import annotations

import importlib.util
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm.config import ParallelConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8StaticTensorSym,
)
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from vllm_kvplugins.config import parse_kernel, parse_policy
from vllm_kvplugins.errors import KVPolicyError, codes_in
from vllm_kvplugins.vllm_adapter.attention import cpu, flash, flashinfer, triton
from vllm_kvplugins.vllm_adapter.attention.flat import PolicyImpl
from vllm_kvplugins.vllm_adapter.config import kernel_choice, validation


def platform(kind: str) -> SimpleNamespace:
    return SimpleNamespace(
        is_cpu=lambda: kind == "cpu",
        is_cuda=lambda: kind == "cuda",
        device_name=kind,
        device_type=kind,
    )


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform", platform("cuda"))
    monkeypatch.setattr(
        FlashAttentionBackend, "supports_head_size", lambda size: size <= 256
    )
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: 3)
    monkeypatch.setattr("vllm.utils.flashinfer.has_flashinfer", lambda: True)
    with_tools(monkeypatch, "/cuda/bin/nvcc", "ninja")


def with_tools(monkeypatch, *tools: str, packages: tuple[str, ...] = ()) -> None:
    """Programs and packages that FlashInfer finds."""
    monkeypatch.setenv("CUDA_HOME", "/cuda")
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name if name in packages else None
    )


def config(
    dtype: torch.dtype = torch.bfloat16, head_size: int = 64, cache: str = "auto"
) -> Any:
    model = SimpleNamespace(dtype=dtype, get_head_size=lambda: head_size)
    return SimpleNamespace(
        model_config=model,
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(
            cache_dtype=cache, kv_cache_dtype_skip_layers=None
        ),
    )


def asked(kernel: str | None = None) -> dict[str, Any]:
    return {"name": "snapkv"} | ({} if kernel is None else {"kernel": kernel})


def test_it_is_a_setting_beside_the_policy_s():
    parse_policy(asked("triton"))
    assert parse_kernel(asked("triton")) == "triton"
    assert parse_kernel(asked()) == parse_kernel("snapkv") == "auto"
    with pytest.raises(KVPolicyError, match=r"kernel: .*'flash'.*got 'cuda'"):
        parse_policy(asked("cuda"))
    with pytest.raises(KVPolicyError, match="did you mean 'kernel'"):
        parse_policy({"name": "snapkv", "kernell": "auto"})


def test_a_cpu_has_its_own(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernel_choice.problems(config(), asked()) == []
    assert kernel_choice.resolve_kernel(asked(), config()) == asked()
    assert kernel_choice.in_use(asked()) == "cpu"
    (problem,) = kernel_choice.problems(config(), asked("triton"))
    assert "interpreter" in problem
    (problem,) = kernel_choice.problems(config(), asked("flash"))
    assert "needs CUDA" in problem
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernel_choice.problems(config(), asked("triton")) == []


@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256])
def test_a_cpu_supports_the_usual_head_sizes(size):
    assert kernel_choice.problems(config(head_size=size), asked()) == []


@pytest.mark.parametrize("size", [48, 72])
def test_a_head_size_that_the_cpu_kernel_lacks_is_refused(size):
    (problem,) = kernel_choice.problems(config(head_size=size), asked())
    assert codes_in(problem) == ("KVP025",)


@pytest.mark.usefixtures("cuda")
def test_only_our_kernel_reads_fp8_on_a_gpu():
    asking = config(cache="fp8")
    assert kernel_choice.problems(asking, asked("triton")) == []
    assert kernel_choice.resolve_kernel(asked(), asking) == asked("triton")
    for kernel in ("flash", "flashinfer"):
        (problem,) = kernel_choice.problems(asking, asked(kernel))
        assert codes_in(problem) == ("KVP025",)
        assert "use 'triton' or 'auto'" in problem


def test_queries_stay_unquantized_on_a_gpu(monkeypatch):
    """vLLM's layer asks the attention whether it may quantize queries for an fp8 cache.
    Scores of a policy need them as they are."""
    gpu = platform("cuda")
    gpu.has_device_capability = lambda least: True
    gpu.get_device_capability = lambda: None
    gpu.get_device_name = gpu.fp8_dtype = lambda: None
    gpu.is_xpu = gpu.is_rocm = lambda: False
    monkeypatch.setattr("vllm.v1.attention.backends.triton_attn.current_platform", gpu)
    arguments = 4, 64, 0.125, 2, None, None, "fp8"
    stock, ours = (
        cls(*arguments) for cls in (TritonAttentionImpl, triton.TritonPolicyImpl)
    )
    assert stock.supports_quant_query_input
    assert not ours.supports_quant_query_input


@pytest.mark.parametrize(
    ("cache", "capability", "words"),
    [
        ("fp8", 89, []),
        ("fp8_e4m3", 90, []),
        ("auto", 80, []),
        ("fp8_e5m2", 90, ["supports fp8_e4m3 only"]),
        ("fp8", 86, ["8.9 or more"]),
        ("fp8_e5m2", 80, ["supports fp8_e4m3 only", "8.9 or more"]),
    ],
)
def test_fp8_on_a_gpu_needs_what_writes_the_cache(
    monkeypatch, cache, capability, words
):
    gpu = platform("cuda")
    gpu.has_device_capability = lambda least: capability >= least
    monkeypatch.setattr("vllm.platforms.current_platform", gpu)
    asking = config(cache=cache)
    asking.speculative_config = None
    problems = validation.fp8_problems(asking, parse_policy("snapkv"))
    assert len(problems) == len(words)
    for problem, part in zip(problems, words, strict=True):
        assert codes_in(problem) == ("KVP019",)
        assert part in problem


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("kernel_name", "dtype", "head_size", "kernel"),
    [
        ("auto", torch.bfloat16, 64, "flash"),
        ("auto", torch.float32, 64, "triton"),
        ("auto", torch.bfloat16, 512, "triton"),
        ("triton", torch.bfloat16, 64, "triton"),
        ("flash", torch.float16, 128, "flash"),
        ("flashinfer", torch.float16, 128, "flashinfer"),
    ],
)
def test_a_gpu_gets_flash_attention_if_it_can(kernel_name, dtype, head_size, kernel):
    asking = config(dtype, head_size)
    assert kernel_choice.problems(asking, asked(kernel_name)) == []
    settled = kernel_choice.resolve_kernel(asked(kernel_name), asking)
    assert settled == asked(kernel)
    assert asking.attention_config.backend is AttentionBackendEnum.CUSTOM
    assert kernel_choice.problems(asking, settled) == []
    assert kernel_choice.resolve_kernel(settled, asking) == settled


@pytest.mark.usefixtures("cuda")
def test_what_cannot_be_had_on_a_gpu_is_said():
    refusals = kernel_choice.problems(config(torch.float32, 512), asked("flash"))
    assert len(refusals) == 2
    assert all("kernel 'flash'" in problem for problem in refusals)
    refusals = kernel_choice.problems(config(torch.float32, 512), asked("flashinfer"))
    assert len(refusals) == 2
    assert all("kernel 'flashinfer'" in problem for problem in refusals)
    asking = config()
    asking.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
    (problem,) = kernel_choice.problems(asking, asked())
    assert "--attention-backend FLASH_ATTN" in problem


@pytest.mark.usefixtures("cuda")
def test_flash_attention_must_have_a_version_for_the_gpu(monkeypatch):
    """vLLM may lack FlashAttention's libraries, or those for this GPU, and reports
    it late.
    """
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: None)
    (problem,) = kernel_choice.problems(config(), asked("flash"))
    assert codes_in(problem) == ("KVP025",)
    assert "FlashAttention" in problem
    assert kernel_choice.resolve_kernel(asked(), config()) == asked("triton")


@pytest.mark.usefixtures("cuda")
def test_flashinfer_must_be_installed_by_those_who_want_it(monkeypatch):
    monkeypatch.setattr("vllm.utils.flashinfer.has_flashinfer", lambda: False)
    (problem,) = kernel_choice.problems(config(), asked("flashinfer"))
    assert "pip install flashinfer-python" in problem
    assert "'triton'" in problem
    assert kernel_choice.problems(config(), asked()) == []


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("tools", "packages", "can"),
    [
        (["/cuda/bin/nvcc", "ninja"], (), True),
        ([], ("flashinfer_jit_cache",), True),
        (["ninja"], ("flashinfer_cubin",), False),
        (["/cuda/bin/nvcc"], ("flashinfer_cubin",), False),
    ],
)
def test_flashinfer_must_have_attention_kernels(monkeypatch, tools, packages, can):
    """vLLM also accepts flashinfer-cubin, which contains other kernels."""
    with_tools(monkeypatch, *tools, packages=packages)
    refusals = kernel_choice.problems(config(), asked("flashinfer"))
    assert len(refusals) == (not can)
    assert all("flashinfer-jit-cache" in problem for problem in refusals)
    assert kernel_choice.resolve_kernel(asked(), config()) == asked("flash")


def test_where_nvcc_is_found(monkeypatch):
    with_tools(monkeypatch, "nvcc", "ninja")
    assert not kernel_choice._has_flashinfer_attention(), "CUDA_HOME is what counts"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert kernel_choice._has_flashinfer_attention()
    with_tools(monkeypatch, "/usr/local/cuda/bin/nvcc", "ninja")
    monkeypatch.delenv("CUDA_HOME")
    assert kernel_choice._has_flashinfer_attention()


@pytest.mark.usefixtures("cuda")
def test_the_backend_takes_the_place_for_custom_ones():
    kernel_choice.register(asked("triton"))
    try:
        refusals = AttentionBackendEnum.CUSTOM.get_class()
        assert refusals is triton.TritonPolicyBackend
        kernel_choice.register(asked("flash"))
        refusals = AttentionBackendEnum.CUSTOM.get_class()
        assert refusals is flash.FlashPolicyBackend
        kernel_choice.register(asked("flashinfer"))
        refusals = AttentionBackendEnum.CUSTOM.get_class()
        assert refusals is flashinfer.FlashInferPolicyBackend
    finally:
        kernel_choice.unregister()
    with pytest.raises(ValueError, match="must be registered"):
        AttentionBackendEnum.CUSTOM.get_class()


@pytest.mark.parametrize("module", [cpu, flash, flashinfer, triton])
def test_no_layer_quantizes_what_it_writes(module):
    """vLLM leaves the answer to the layer."""
    impls = [kind for kind in vars(module).values() if is_layer(kind)]
    (kind,) = impls
    impl = object.__new__(kind)
    assert impl.fused_output_quant_supported(kFp8StaticTensorSym) is False


def is_layer(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, PolicyImpl)
        and (kind is not PolicyImpl)
    )


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr("vllm.platforms.current_platform", platform("rocm"))
    from vllm.engine.arg_utils import EngineArgs

    (problem,) = validation.argument_problems(EngineArgs(model="."))
    assert "platform 'rocm'" in problem


def test_steps_in_parts_are_refused():
    """The adapter reads the kinds of rows from the whole batch."""
    for config, refused in (
        (ParallelConfig(), False),
        (ParallelConfig(enable_dbo=True), True),
        (ParallelConfig(ubatch_size=2), True),
    ):
        refusals = validation._parallel_problems(config)
        assert bool(refusals) == refused
        assert all("--enable-dbo" in problem for problem in refusals)
