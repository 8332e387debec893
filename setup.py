"""Builds the native extension through CMake; everything else is pyproject.toml.

The extension is optional: without it the same operations run in torch. The
environment variable ``KVP_BUILD`` says what to do:

``auto``     build it; if that fails, warn and install without it (default)
``require``  build it; if that fails, so does the installation
``0``        do not build it

``KVP_CUDA`` (``AUTO``, ``ON``, ``OFF``) and ``CMAKE_ARGS`` are passed to CMake.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LIBRARY = "vllm_kvplugins/_C.abi.so"
MODES = ("auto", "require", "0")


def build_mode() -> str:
    """The value of KVP_BUILD, checked."""
    mode = os.environ.get("KVP_BUILD", "auto")
    if mode not in MODES:
        raise SystemExit(f"KVP_BUILD must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


class CMakeBuild(build_ext):
    """Runs CMake instead of a compiler, and survives its failure if it may."""

    def get_ext_filename(self, fullname: str) -> str:
        """A name without Python's version: the library does not use its ABI."""
        return LIBRARY

    def build_extension(self, ext: Extension) -> None:
        """Build the library into the folder that setuptools packs."""
        target = Path(self.build_lib, LIBRARY).resolve()
        try:
            self._run_cmake(target)
        except (OSError, subprocess.CalledProcessError) as error:
            if build_mode() == "require":
                raise
            # A library of an earlier build would be packed, or in an editable
            # installation used, as if it were new.
            target.unlink(missing_ok=True)
            if self.editable_mode or self.inplace:
                (ROOT / LIBRARY).unlink(missing_ok=True)
            self._warn(error)

    def _run_cmake(self, target: Path) -> None:
        if shutil.which("cmake") is None:
            raise FileNotFoundError("cmake is not installed")
        build = Path(self.build_temp).resolve() / "kvp"
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

    @staticmethod
    def _cmake(*arguments: str) -> None:
        done = subprocess.run(
            ["cmake", *arguments],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        print(done.stdout, flush=True)
        if done.returncode:
            raise subprocess.CalledProcessError(
                done.returncode, f"cmake {' '.join(arguments)}", done.stdout
            )

    @staticmethod
    def _warn(error: Exception) -> None:
        line = "*" * 78
        output = getattr(error, "output", "") or ""
        hint = (
            "torch is not importable in the build environment: install with "
            "--no-build-isolation to use the installed one"
            if "cannot import torch" in " ".join(output.split())
            else f"{error}"
        )
        print(
            f"{line}\nWARNING: vllm-kvplugins: the native extension was NOT built.\n"
            f"{hint}\nThe slower torch versions of the page copies will be used.\n"
            "KVP_BUILD=require makes this an error, KVP_BUILD=0 skips the attempt.\n"
            f"{line}",
            file=sys.stderr,
            flush=True,
        )


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform, for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """``py3-none-<platform>``: the library is bound to no Python ABI."""
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


extensions = []
if build_mode() != "0":
    # optional: setuptools then tolerates that no file was made.
    extensions.append(Extension("vllm_kvplugins._C", sources=[], optional=True))

setup(
    ext_modules=extensions,
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
)
