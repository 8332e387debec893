"""Builds the C++ extension with CMake; everything else is in pyproject.toml.

A wheel without the extension would refuse icecache and run the other policies slowly,
so a build that cannot make the extension fails and says why. Environment variables:

``KVP_BUILD_EXTENSION``  ``1`` (default) builds the extension; ``0`` leaves it out and
                         makes a wheel for any platform.
``KVP_CUDA``             ``AUTO`` (default: CUDA kernels if torch has CUDA and nvcc is
                         found), ``ON`` or ``OFF``.
``KVP_BUILD_DIR``        folder that keeps CMake's build, so that the next one compiles
                         only what changed; default: a temporary folder.
``CMAKE_ARGS``           further arguments of CMake.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "vllm_kvplugins/_C.abi.so"


def builds_extension() -> bool:
    """Whether KVP_BUILD_EXTENSION asks for the extension."""
    if "KVP_BUILD" in os.environ:
        fail("KVP_BUILD is now KVP_BUILD_EXTENSION: 1 (the default) builds, 0 does not")
    value = os.environ.get("KVP_BUILD_EXTENSION", "1")
    if value not in ("0", "1"):
        fail(f"KVP_BUILD_EXTENSION must be 0 or 1, got {value!r}")
    return value == "1"


def fail(reason: str) -> NoReturn:
    """End the build with a reason that stands out from CMake's output."""
    line = "*" * 78
    raise SystemExit(f"\n{line}\nvllm-kvplugins: {reason}\n{line}")


class CMakeBuild(build_ext):
    """Runs CMake instead of a compiler."""

    def get_ext_filename(self, fullname: str) -> str:
        """A file name without Python's version: the library does not use its ABI."""
        return LIBRARY

    def build_extension(self, ext: Extension) -> None:
        """Build the library into the folder that setuptools packs."""
        target = Path(self.build_lib, LIBRARY).resolve()
        # A library of an earlier build must never be packed as if it were new.
        target.unlink(missing_ok=True)
        if shutil.which("cmake") is None:
            self._not_built("CMake is not installed: pip install cmake")
        kept = os.environ.get("KVP_BUILD_DIR")
        build = Path(kept or Path(self.build_temp, "kvp")).resolve()
        build.mkdir(parents=True, exist_ok=True)
        self._cmake(
            "-S",
            str(ROOT),
            "-B",
            str(build),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DKVP_OUTPUT_DIR={target.parent}",
            f"-DKVP_CUDA={os.environ.get('KVP_CUDA', 'AUTO')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        )
        jobs = self.parallel or os.cpu_count() or 1
        self._cmake("--build", str(build), "--parallel", str(jobs))
        if not target.exists():
            self._not_built(f"CMake ended without an error but made no {target}")

    def _cmake(self, *arguments: str) -> None:
        command = ["cmake", *arguments]
        done = subprocess.run(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        print(done.stdout, flush=True)
        if done.returncode:
            self._not_built(_reason(done.stdout, command))

    def _not_built(self, reason: str) -> NoReturn:
        # An editable installation would go on using its old library.
        if self.editable_mode or self.inplace:
            (ROOT / LIBRARY).unlink(missing_ok=True)
        fail(
            f"the C++ extension could not be built.\n{reason}\n"
            "KVP_BUILD_EXTENSION=0 installs without it: icecache is then refused, and\n"
            "page copies, scores and clustering run in torch, which is slower."
        )


def _reason(output: str, command: list[str]) -> str:
    """What the user can do about a failed command, else the command and its error."""
    flat = " ".join(output.split())
    if "cannot import torch" in flat:
        return (
            "The build environment has no torch. Install torch first, or drop "
            "--no-build-isolation."
        )
    if "No CMAKE_CXX_COMPILER could be found" in flat:
        return "There is no C++ compiler. Install one, e.g. apt-get install g++."
    errors = [text for text in output.splitlines() if "error" in text.lower()][:3]
    return "\n".join([f"Failed: {' '.join(command)}", *errors])


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform, for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-<platform>``: the library is bound to no Python ABI."""
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(
    ext_modules=(
        [Extension("vllm_kvplugins._C", sources=[])] if builds_extension() else []
    ),
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
