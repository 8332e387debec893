"""Builds and runs the C++ tests of the header-only core, and the CUDA compile check."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiers import tiered

ROOT = Path(__file__).resolve().parents[2]
_LEVEL = "-O3" if os.environ.get("KVP_TEST_TIER") == "all" else "-O1"
CORE = (
    "for_all",
    "page_copy",
    "bulk_copy",
    "assign",
    "irregularity",
    "codes",
    "dci",
    "index_kernels",
    "threads",
    "votes",
    "svd",
    "low_rank",
    "page_votes",
    "paged_decode",
    "quantized_rows",
    "zoom",
)
# The others are compared in full by tests of the compiled operations.
QUICK = ("for_all", "codes", "threads")


def run(command: list[str], **environment: str) -> str:
    """Output of a command; fails the test with this output if the command fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        # vLLM preloads libraries once a test has made its configuration; sanitizers
        # want to be first.
        env={**os.environ, "LD_PRELOAD": "", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    "name",
    tiered(CORE, QUICK),
)
def test_core_matches_its_definition(tmp_path, name):
    build_and_run(tmp_path, name)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    "name", ["emulation", "page_copy", "bulk_copy", "page_votes", "low_rank", "assign"]
)
def test_cuda_kernels_match_the_core(tmp_path, name):
    """Kernels compiled for the host, where an emulator runs their threads in any
    order.
    """
    build_and_run(tmp_path, f"cuda_{name}", "-Itests/csrc/cuda_emulation")


def build_and_run(tmp_path: Path, name: str, *more: str) -> None:
    """With OpenMP; in the full tier optimized as shipped. Warnings are errors.

    The default tier optimizes little, because compiling takes most of the time there.
    """
    binary = tmp_path / f"test_{name}"
    warn = ["-Wall", "-Wextra", "-Werror"]
    flags = ["-std=c++17", _LEVEL, "-fopenmp", *warn, "-Icsrc/include", *more]
    source = f"tests/csrc/test_{name}.cpp"
    run(["g++", *flags, source, "-o", str(binary)])
    assert "0 failure(s)" in run([str(binary)], OMP_NUM_THREADS="2")


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it compiles everything twice, with little optimization
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_core_under_sanitizers():
    output = run(["scripts/check_sanitizers.sh"])
    assert "ok: address" in output
    if "skipped: thread sanitizer" in output:
        pytest.skip(output.splitlines()[-1])
    assert "ok: thread sanitizer" in output


@pytest.mark.slow
def test_cuda_sources_compile():
    output = run(["scripts/check_cuda_compile.sh"], PYTHON=sys.executable)
    if output.startswith("skipped"):
        pytest.skip(output.splitlines()[0])
    for source in (ROOT / "csrc").glob("*.cu"):
        for arch in ("sm_80", "sm_90a", "sm_100"):
            assert f"ok: {source.stem} {arch}" in output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_build_has_cuda_where_torch_has(tmp_path):
    """Whether CMake finds nvcc; a fake torch stands in for one with CUDA."""
    made_up, real = tmp_path / "torch", Path(torch.__file__).parent
    made_up.mkdir()
    facts = '__version__ = "2.13.0+cu130"\nclass version:\n    cuda = "13.0"\n'
    (made_up / "__init__.py").write_text(facts)
    for folder in ("include", "lib"):
        (made_up / folder).symlink_to(real / folder)
    build = str(tmp_path / "build")
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DKVP_OUTPUT_DIR={tmp_path}"]
    configure = ["cmake", "-S", ".", "-B", build, "-G", "Unix Makefiles", *options]
    output = run(configure, PYTHONPATH=str(tmp_path))
    assert "CUDA kernels ON" in output  # found without a hint
    run(["cmake", "--build", build, "--target", "csrc/bulk_copy.cu.o"])
    (flags,) = Path(build, "CMakeFiles", "kvp_C.dir").glob("flags.make")
    assert "-std=c++20" in flags.read_text()
    assert "compute_90" in flags.read_text()


def test_compute_sanitizer_says_what_it_lacks():
    """Compiles for a real GPU if there is one, which takes minutes."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: run scripts/check_compute_sanitizer.sh itself")
    output = run(["scripts/check_compute_sanitizer.sh"], PYTHON=sys.executable)
    assert output.startswith("skipped: ")
    tool = run(
        ["scripts/check_compute_sanitizer.sh"],
        PYTHON=sys.executable,
        COMPUTE_SANITIZER="/bin/false",
    )
    assert tool.startswith("skipped: torch")
    assert "sees no GPU" in tool
