"""Runs one scenario with a vLLM engine in its own process.

vLLM keeps much of its state per process, so tests do not create engines themselves.
They name a function in a ``scenarios_*`` module, pass plain arguments and receive its
result, through JSON files.

An import of vLLM takes longer than most scenarios. So each pytest process starts a fork
server (``runner.py``) that imports vLLM once and forks a child per scenario. Scenarios
whose environment differs in more than ``_READ_LATE`` get another server.

``KVP_TEST_RUNNER=V2 KVP_TEST_KERNEL=triton python -m pytest tests/engine`` runs them on
model runner V2, with our Triton kernel in Triton's interpreter. With
``KVP_TEST_INTERPRETER=torch`` in addition they use a much faster interpreter
(``helpers/cpu_v2/kernel_on_torch.py``). Without ``KVP_TEST_KERNEL`` they use vLLM's CPU
kernel. A step takes several times as long, so add ``--timeout=3600``. Tests that choose
a runner themselves keep it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_ROOT = _HERE.parent.parent
# Steps take several times as long, so random traffic is shorter.
INTERPRETED = os.environ.get("KVP_TEST_RUNNER") == "V2"
_PATIENCE = 6 if INTERPRETED else 1
# Variables that vLLM, this package or a test's patch reads at or after the start of an
# engine.
# Imports may read all others.
_READ_LATE = {
    "KVP_CALIBRATE",
    "KVP_MODEL_DIR",
    "KVP_OPS",
    "KVP_TEST_ASYNC",
    "KVP_TEST_OPERATIONS",
    "VLLM_CPU_CI_ENV",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_PLUGINS",
}
_MOST_SERVERS = 2  # each server holds vLLM's imports, some 700 MB


def engine_environment(**changes: str | None) -> dict[str, str]:
    """Environment of a process that runs vLLM; None removes a variable."""
    # One unpinned thread: on a busy machine, two threads that wait for each other are
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
    helpers = _HERE.parent / "helpers"
    oracles = _HERE.parent / "oracles"
    folders = (_ROOT, _HERE, helpers, oracles, helpers / "cpu_v2")
    paths = [str(folder) for folder in folders]
    if INTERPRETED:
        env |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
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
    """Call ``module:function(**arguments)`` in a process of its own.

    Args:
        environment: changes to ``engine_environment()``.
        timeout: in seconds; longer where kernels are interpreted.

    Returns:
        What the function returned, after a round trip through JSON.

    Raises:
        AssertionError: the process failed; carries the end of its output.
        subprocess.TimeoutExpired: the process took too long and was killed.
    """
    env = engine_environment(**(environment or {}))
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        output = Path(folder, "output.txt")
        request.write_text(json.dumps({"scenario": scenario, "arguments": arguments}))
        code = _server(env).call(
            {
                "arguments": str(request),
                "result": str(result),
                "output": str(output),
                "folder": folder,
                "environment": env,
            },
            _PATIENCE * timeout,
        )
        assert code == 0, f"{scenario} ended with {code}:\n{_end_of(output)}"
        return json.loads(result.read_text())


class _Server:
    """A fork server, and the log of its own output."""

    def __init__(self, env: dict[str, str]) -> None:
        self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "runner.py")],
            env=env,
            cwd=tempfile.gettempdir(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def call(self, request: dict[str, Any], timeout: float) -> int:
        """The exit code of one child.

        A timeout, and any other exception, ends the server and the child with it.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(
                    "scenario", timeout, _end_of(Path(request["output"])).encode()
                )
            reply = self._process.stdout.readline()
            if not reply:
                last_lines = _end_of(Path(self._log.name))
                raise AssertionError(f"the fork server ended:\n{last_lines}")
            return int(reply)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server; it kills a child that still runs."""
        for key, server in list(_servers.items()):
            if server is self:
                del _servers[key]
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=60)
        self._log.close()


_Key = frozenset[tuple[str, str]]
_servers: dict[_Key, _Server] = {}  # the most recently used server comes last


def _server(env: dict[str, str]) -> _Server:
    """A running server with this environment, or a new one."""
    key = frozenset(
        (name, value)
        for name, value in env.items()
        if name not in _READ_LATE and not name.startswith("PYTEST_")
    )
    server = _servers.pop(key, None)
    if server is None:
        if len(_servers) >= _MOST_SERVERS:
            next(iter(_servers.values())).close()
        server = _Server(env)
    _servers[key] = server
    return server


@atexit.register
def _close_servers() -> None:
    for server in list(_servers.values()):
        server.close()


def _end_of(path: Path) -> str:
    return path.read_text(errors="replace")[-6000:] if path.exists() else ""
