"""Selects the attention kernel, once for all processes."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from typing import TYPE_CHECKING, Any

import torch

from vllm_kvplugins.config import parse_kernel
from vllm_kvplugins.errors import coded

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.kv_policy")

_ATTENTION = "vllm_kvplugins.vllm_adapter.attention"
_BACKENDS = {
    "cpu": f"{_ATTENTION}.cpu.PagedPolicyBackend",
    "flash": f"{_ATTENTION}.flash.FlashPolicyBackend",
    "flashinfer": f"{_ATTENTION}.flashinfer.FlashInferPolicyBackend",
    "triton": f"{_ATTENTION}.triton.TritonPolicyBackend",
}


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def problems(vllm_config: VllmConfig, request: dict[str, Any]) -> list[str]:
    """Reasons why the requested kernel cannot run here."""
    from vllm.platforms import current_platform

    kernel = parse_kernel(request)
    if current_platform.is_cpu():
        return _cpu_problems(kernel) or _head_size_problems(kernel, vllm_config)
    reasons = []
    backend = vllm_config.attention_config.backend
    # CUSTOM is our own, set by an earlier engine with the same settings object.
    if backend is not None and backend.name != "CUSTOM":
        reasons.append(
            coded(
                "KVP024",
                f"--attention-backend {backend.name} conflicts with the backend of the "
                'KV policy; remove it and set {"kernel": ...} in --kv-policy-config',
            )
        )
    if kernel in _KERNEL_PROBLEMS:
        reasons += [
            coded("KVP025", f"kernel {kernel!r}: {problem}; use 'triton' or 'auto'")
            for problem in _KERNEL_PROBLEMS[kernel](vllm_config)
        ]
    return reasons


def _cpu_problems(kernel: str) -> list[str]:
    if kernel == "auto" or (kernel == "triton" and interpreted()):
        return []
    if kernel == "triton":
        return [
            coded(
                "KVP025",
                "on a CPU, kernel 'triton' runs only in Triton's interpreter, which is "
                "very slow; use 'auto', or set TRITON_INTERPRET=1 for tests",
            )
        ]
    return [coded("KVP025", f"kernel {kernel!r} needs CUDA; on a CPU use 'auto'")]


def _head_size_problems(kernel: str, vllm_config: VllmConfig) -> list[str]:
    """Reasons why vLLM's CPU kernel does not support the model's heads.

    vLLM itself finds out at the first request, which ends its engine.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    model = vllm_config.model_config
    supported = CPUAttentionBackend.get_supported_head_sizes()
    if (
        kernel == "triton"
        or getattr(model, "use_mla", False)
        or model.get_head_size() in supported
    ):
        return []
    return [
        coded(
            "KVP025",
            f"vLLM's CPU kernel does not support head size {model.get_head_size()}, "
            f"only {', '.join(map(str, supported))}; serve another model",
        )
    ]


def _flash_problems(vllm_config: VllmConfig) -> list[str]:
    """Reasons why FlashAttention does not support this model."""
    from vllm.v1.attention.backends import fa_utils
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Flash

    model = vllm_config.model_config
    head_size = model.get_head_size()
    reasons = _fp8_problems(vllm_config)
    if not Flash.supports_dtype(model.dtype):
        reasons.append(f"FlashAttention does not support {model.dtype}")
    try:
        if not Flash.supports_head_size(head_size):
            reasons.append(f"FlashAttention does not support head size {head_size}")
        elif fa_utils.get_flash_attn_version(head_size=head_size) is None:
            reasons.append("this vLLM has no FlashAttention for this GPU")
    except (ImportError, OSError) as error:
        reasons.append(f"this vLLM does not include FlashAttention ({error})")
    return reasons


def _flashinfer_problems(vllm_config: VllmConfig) -> list[str]:
    """Reasons why FlashInfer does not support this model."""
    from vllm.utils.flashinfer import has_flashinfer

    model = vllm_config.model_config
    head_size = model.get_head_size()
    reasons = _fp8_problems(vllm_config)
    if not has_flashinfer():
        reasons.append(
            "FlashInfer is not installed, or has neither compiled kernels nor nvcc and "
            "ninja to build them (pip install flashinfer-python)"
        )
    elif not _has_flashinfer_attention():
        reasons.append(
            "FlashInfer's attention kernels are not compiled (flashinfer-cubin does "
            "not contain them), and nvcc or ninja is missing to build them (install "
            "flashinfer-jit-cache, for example with vllm download-kernels)"
        )
    if model.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"FlashInfer does not support {model.dtype}")
    if head_size not in _FLASHINFER_HEAD_SIZES:
        reasons.append(f"FlashInfer does not support head size {head_size}")
    return reasons


def _fp8_problems(vllm_config: VllmConfig) -> list[str]:
    dtype = str(vllm_config.cache_config.cache_dtype)
    if not dtype.startswith("fp8"):
        return []
    return [f"under a policy it reads plain elements, not a KV cache of {dtype}"]


def _has_flashinfer_attention() -> bool:
    """Whether FlashInfer has kernels for paged attention, or can build them.

    vLLM's own check also accepts downloaded kernels that do not include these.
    """
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    reasons = None if home else shutil.which("nvcc")
    nvcc = reasons or os.path.join(home or "/usr/local/cuda", "bin", "nvcc")
    return shutil.which(nvcc) is not None and shutil.which("ninja") is not None


_FLASHINFER_HEAD_SIZES = (64, 128, 256)
_KERNEL_PROBLEMS = {"flash": _flash_problems, "flashinfer": _flashinfer_problems}


def resolve_kernel(request: dict[str, Any], vllm_config: VllmConfig) -> dict[str, Any]:
    """Replace kernel ``auto`` by a specific one and set our backend in vLLM.

    Returns:
        The policy's settings; unchanged on a CPU.
    """
    from vllm.platforms import current_platform

    kernel = parse_kernel(request)
    if current_platform.is_cpu():
        return request
    if kernel == "auto":
        flash_problems = _flash_problems(vllm_config)
        kernel = "triton" if flash_problems else "flash"
        if flash_problems:
            logger.info("KV policy: using kernel triton: %s", "; ".join(flash_problems))
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    vllm_config.attention_config.backend = AttentionBackendEnum.CUSTOM
    logger.warning(
        "KV policy: kernel %s has not been tested on a GPU; compare answers with "
        "--kv-policy full (docs/gpu.md)",
        kernel,
    )
    return request | {"kernel": kernel}


def in_use(request: dict[str, Any]) -> str:
    """Name of the kernel of a resolved request."""
    kernel = parse_kernel(request)
    return "cpu" if kernel == "auto" else kernel


def register(request: dict[str, Any]) -> None:
    """Make vLLM build the layers of this process with our backend."""
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    register_backend(
        AttentionBackendEnum[_registry_entry()], _BACKENDS[in_use(request)]
    )


def is_registered() -> bool:
    """Whether vLLM builds the layers of this process with our backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    entry = AttentionBackendEnum[_registry_entry()]
    return entry.is_overridden() and entry.get_path() in _BACKENDS.values()


def unregister() -> None:
    """Restore the stock backend."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum[_registry_entry()].clear_override()


def _registry_entry() -> str:
    """Name of the entry in vLLM's backend registry that we override."""
    from vllm.platforms import current_platform

    return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"
