"""A ``vllm serve`` process for a test, and requests to it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START_S, _STOP_S, _ANSWER_S = 300, 60, 300


@contextmanager
def serving(
    python: str | Path,
    model: str,
    folder: Path,
    *arguments: str,
    start_s: float = _START_S,
    **environment: str,
) -> Iterator[str]:
    """The address of a server, until the block ends. It serves the model as ``m``.

    Args:
        python: interpreter of the environment with vLLM.
        folder: working directory, and place of the log.
        arguments: of ``vllm serve``.
        start_s: how long the server may take to start.
        environment: the whole environment; by default that of the test.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "m", "--enforce-eager", *arguments]
    log = folder / f"server-{port}.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=output, env=environment or None
        )
    try:
        base = f"http://127.0.0.1:{port}"
        _wait_until_ready(server, base, log, start_s)
        yield base
    finally:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(
    server: subprocess.Popen[bytes], base: str, log: Path, start_s: float
) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5)
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(f"not ready after {start_s} s\n{log.read_text()[-4000:]}")


def post(
    base: str, path: str, headers: Mapping[str, str] | None = None, **body: Any
) -> Any:
    """The JSON that a server answers to a greedy request for the model ``m``."""
    request = urllib.request.Request(
        base + path,
        json.dumps({"model": "m", "temperature": 0} | body).encode(),
        {"Content-Type": "application/json"} | dict(headers or {}),
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
        return json.load(response)


def metric(base: str, name: str) -> float:
    """The sum of a metric's samples."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith((f"{name}{{", f"{name} "))
    )
