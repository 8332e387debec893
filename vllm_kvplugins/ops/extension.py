"""Finds and loads the compiled extension, once per process."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_kvplugins.errors import coded

EXTENSION_PATH = Path(__file__).parent.parent / "_C.abi.so"

# Version of the op schemas; csrc/page_copy.cpp states the same number. A library
# built for another version is refused.
OPS_VERSION = "15"

# Values of the environment variable KVP_SIMD, see csrc/include/kvp/simd.hpp.
SIMD_LEVELS = ("baseline", "avx2", "avx512", "avx512_bf16")


@dataclass(frozen=True, slots=True)
class Extension:
    """The outcome of loading the extension.

    Attributes:
        reason: why the extension is not in use; empty if it is.
        facts: build facts that the library reports, and ``simd``, the vector
            instructions that its kernels use in this process.
    """

    reason: str = ""
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def has_cuda(self) -> bool:
        """Whether the library contains CUDA kernels."""
        return self.facts.get("cuda") == "1"


@functools.cache
def load_extension() -> Extension:
    """Load the extension; the first call decides for the process.

    The environment variable ``KVP_SIMD`` limits the vector instructions of its
    kernels: ``baseline``, ``avx2``, ``avx512`` or ``avx512_bf16``.

    Returns:
        The outcome. A missing file is normal: the torch versions run instead. A file
        that cannot be used also causes a RuntimeWarning with the reason.

    Raises:
        ValueError: ``KVP_SIMD`` has another value.
    """
    limit = os.environ.get("KVP_SIMD", SIMD_LEVELS[-1])
    if limit not in SIMD_LEVELS:
        levels = ", ".join(SIMD_LEVELS)
        raise ValueError(
            coded("KVP402", f"KVP_SIMD must be one of {levels}, got {limit!r}")
        )
    if not EXTENSION_PATH.exists():
        return Extension(reason=f"{EXTENSION_PATH.name} has not been built")
    try:
        torch.ops.load_library(str(EXTENSION_PATH))
        text = torch.ops.kvp.build_info()
    except (OSError, RuntimeError, AttributeError) as error:
        return _unusable(str(error).strip() or type(error).__name__)
    facts = dict(pair.split("=", 1) for pair in text.split(";"))
    if facts.get("ops_version") != OPS_VERSION:
        return _unusable(
            f"it was built for ops version {facts.get('ops_version')}, "
            f"this package needs {OPS_VERSION}"
        )
    facts["simd"] = torch.ops.kvp.simd_in_use()
    return Extension(facts=facts)


def _unusable(problem: str) -> Extension:
    reason = f"{EXTENSION_PATH.name} cannot be used: {problem}"
    warnings.warn(
        f"{reason}. The slower torch versions run instead; reinstall "
        "vllm-kvplugins to rebuild it, or delete the file.",
        RuntimeWarning,
        stacklevel=3,
    )
    return Extension(reason=reason)


def torch_by_request() -> bool:
    """Whether ``KVP_OPS=torch`` allows only the torch versions."""
    return os.environ.get("KVP_OPS", "auto") == "torch"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def triton_for(device: torch.device) -> bool:
    """Whether Triton kernels run on a device."""
    return device.type == "cuda" and not torch_by_request() and _has_triton()


def compiled_for(device: torch.device) -> tuple[bool, str]:
    """Whether the compiled ops run on a device, and if not, why.

    The environment variable ``KVP_OPS`` is ``auto`` (default: compiled if
    possible), ``torch`` (never) or ``compiled`` (fail if impossible).

    Raises:
        ValueError: ``KVP_OPS`` has another value.
        RuntimeError: ``KVP_OPS=compiled``, but the compiled ops cannot run.
    """
    requested = os.environ.get("KVP_OPS", "auto")
    if torch_by_request():
        return False, "KVP_OPS=torch"
    if requested not in ("auto", "compiled"):
        raise ValueError(
            coded(
                "KVP400", f"KVP_OPS must be auto, torch or compiled, got {requested!r}"
            )
        )
    extension = load_extension()
    reason = extension.reason
    if not reason and device.type == "cuda" and not extension.has_cuda:
        reason = "the extension was built without CUDA"
    if not reason and device.type not in ("cpu", "cuda"):
        reason = f"the extension does not support {device.type}"
    if reason and requested == "compiled":
        raise RuntimeError(
            coded(
                "KVP401",
                f"KVP_OPS=compiled, but {reason}. Rebuild the extension, or set "
                "KVP_OPS=auto to allow the torch versions",
            )
        )
    return not reason, reason


def check_forced(device: torch.device) -> bool:
    """Whether ``KVP_OPS_CHECK=1`` turns on checks that this device skips.

    The checks wait for the device's stream. On a CPU the compiled ops always check.
    """
    return device.type != "cpu" and os.environ.get("KVP_OPS_CHECK") == "1"
