"""Runs one scenario with a vLLM engine in a process of its own.

vLLM keeps much of its state per process, so tests do not build engines
themselves: they name a function in a ``scenarios_*`` module, give it plain
arguments and get back what it returned, through JSON files.

``KVP_TEST_RUNNER=V2 KVP_TEST_KERNEL=triton python -m pytest tests/engine`` runs them on
model runner V2, with our Triton kernel in its interpreter; with
``KVP_TEST_INTERPRETER=torch``, too, in one that is much faster
(``helpers/cpu_v2/kernel_on_torch.py``); without the second variable with vLLM's kernel
for CPUs. A step takes several times as long, so add ``--timeout=3600``. Tests that
choose a runner themselves keep theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
# Steps take several times as long: random traffic is shorter then.
INTERPRETED = os.environ.get("KVP_TEST_RUNNER") == "V2"
_PATIENCE = 6 if INTERPRETED else 1


def engine_environment(**changes: str | None) -> dict[str, str]:
    """Environment of a process that runs vLLM; None removes a variable."""
    # One unpinned thread: two that wait for each other on a busy machine are
    # thirty times slower, and these models are small.
    env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= os.environ
    env |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
    }
    paths = [str(_ROOT), str(_HERE), str(_HERE.parent / "helpers")]
    if INTERPRETED:
        env |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
        paths.append(str(_HERE.parent / "helpers" / "cpu_v2"))
    if env.get("PYTHONPATH"):
        paths.append(env["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(paths)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def run_scenario(
    scenario: str,
    arguments: dict[str, Any],
    environment: dict[str, str | None] | None = None,
    timeout: float = 400,
) -> Any:
    """Call ``module:function(**arguments)`` in a fresh process.

    Args:
        timeout: in seconds; longer where kernels are interpreted.

    Returns:
        What the function returned, after a round trip through JSON.

    Raises:
        AssertionError: the process failed; carries the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        request.write_text(json.dumps({"scenario": scenario, "arguments": arguments}))
        done = subprocess.run(
            [sys.executable, str(_HERE / "runner.py"), str(request), str(result)],
            env=engine_environment(**(environment or {})),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE * timeout,
            check=False,
        )
        assert done.returncode == 0, (
            f"{scenario} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        )
        return json.loads(result.read_text())
