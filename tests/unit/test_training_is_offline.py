"""Serving never imports the training code, directly or indirectly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
ROOT = Path(__file__).parents[2]

# Imports the plugin and every module of the adapter: scheduler, worker, attention,
# front end, start-up. A module may lack an optional library, but never one of ours.
CODE = """
import importlib, json, pkgutil, sys
import vllm_kvplugins.plugin, vllm_kvplugins.vllm_adapter as adapter
missing = []
for found in pkgutil.walk_packages(adapter.__path__, adapter.__name__ + "."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vllm_kvplugins"):
            raise
        missing.append(found.name)
ours = sorted(name for name in sys.modules if name.startswith("vllm_kvplugins"))
print("RESULT " + json.dumps({"loaded": ours, "missing": missing}))
"""


@pytest.mark.slow
def test_serving_does_not_import_training():
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    loaded, missing = result["loaded"], result["missing"]
    for part in ("scheduler", "worker", "attention", "frontend", "startup"):
        prefix = f"vllm_kvplugins.vllm_adapter.{part}."
        assert any(name.startswith(prefix) for name in loaded), part
    # kernels of other platforms only
    assert all(".attention." in name or ".worker." in name for name in missing), missing
    assert [name for name in loaded if "vllm_kvplugins.training" in name] == []
