"""Attention kernels over page lists: runs ``tests/helpers/kernel_suite.py``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUITE = Path(__file__).parents[1] / "helpers" / "kernel_suite.py"


@pytest.mark.slow
def test_the_suite():
    """On a GPU where there is one, else in Triton's interpreter."""
    pytest.importorskip("triton")
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = ["pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=SUITE.parents[2],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 48, done.stdout
