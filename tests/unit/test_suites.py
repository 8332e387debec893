"""Runs suites of ``tests/helpers`` that need their own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow  # minutes

HELPERS = Path(__file__).parents[1] / "helpers"


def run_suite(name: str, **environment: str) -> int:
    """Run the suite and return the number of passed tests; any failure fails this
    test.
    """
    command = ["pytest", "-q", "-p", "no:cacheprovider", str(HELPERS / name)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=HELPERS.parents[1],
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


def test_kernels():
    """Attention kernels:

    on a GPU if there is one, otherwise in Triton's interpreter.
    """
    pytest.importorskip("triton")
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert run_suite("kernel_suite.py", **environment) >= 48


def test_kernels_that_select():
    """Votes, swaps and fetches, where attention runs above."""
    pytest.importorskip("triton")
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert run_suite("selection_kernel_suite.py", **environment) >= 46


def test_kernels_on_torch():
    """The kernels' source on torch, which also runs whole engines."""
    pytest.importorskip("triton")
    paths = [str(HELPERS / "cpu_v2"), os.environ.get("PYTHONPATH", "")]
    passed = run_suite(
        "kernel_suite.py",
        TRITON_INTERPRET="1",
        KVP_TEST_KERNEL="triton",
        KVP_TEST_INTERPRETER="torch",
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
    )
    assert passed >= 48


def test_a_simulated_gpu():
    assert run_suite("simulated_gpu_suite.py") >= 82
    assert run_suite("simulated_host_suite.py") >= 31
    assert run_suite("simulated_direct_suite.py") >= 18
    assert run_suite("simulated_selection_suite.py") >= 5


def test_simulated_graphs():
    pytest.importorskip("vllm")
    pytest.importorskip("triton")
    assert run_suite("graph_suite.py", TRITON_INTERPRET="1") >= 15


def test_page_tables_on_a_simulated_gpu():
    assert run_suite("simulated_tables_suite.py") == 4
