"""`vllm serve` with a policy, in its own process group, which always ends."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).parent.parent.parent
_START_S, _STOP_S = 240, 30
_PR_SET_PDEATHSIG = 1

BLOCK = 32
# Little more than the longest request needs, so that requests are preempted
BLOCKS = 26
MAX_TOKENS = 800  # of one request: prompt and answer
_ARGUMENTS = {
    "--host": "127.0.0.1",
    # Otherwise the shape of the batch decides between tokens with close logits
    "--dtype": "float32",
    "--block-size": BLOCK,
    "--max-model-len": MAX_TOKENS,
    "--max-num-seqs": 8,
    "--max-num-batched-tokens": 128,
    "--num-gpu-blocks-override": BLOCKS,
    "--seed": 0,
}

# Lines that must not occur in a log.
_ENGINES = re.compile(r"\((EngineCore|Worker)\w* ")
_BROKEN = (" ERROR ", " CRITICAL ", "Traceback")
_LOST = ("never retrieved", "never awaited", "Exception in ", "Exception ignored")


class Server:
    """Context manager around one server.

    Args:
        model: folder of the model.
        name: what to serve it as.
        policy: settings with their ``name``; None is stock vLLM.
        folder: for the log and the server's temporary files; should be short,
            as sockets lie in it.
    """

    def __init__(
        self, model: Path, name: str, policy: dict[str, Any] | None, folder: Path
    ) -> None:
        self.policy = policy
        self._folder = folder
        self.log = folder / "server.log"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [_vllm(), "serve", str(model), "--served-model-name", name]
        self._command += ["--enforce-eager", "--port", str(self.port)]
        for flag, value in _ARGUMENTS.items():
            self._command += [flag, str(value)]
        if policy is not None:
            settings = {k: v for k, v in policy.items() if k != "name"}
            self._command += ["--kv-policy", policy["name"]]
            self._command += ["--kv-policy-config", json.dumps(settings)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        try:
            self._start()
        except BaseException:  # Ctrl-C ends it as well
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        defaults = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        environment = defaults | os.environ
        environment |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            # For /reset_prefix_cache, which can preempt, and /collective_rpc.
            "VLLM_SERVER_DEV_MODE": "1",
            # Otherwise the first prompt_logprobs would compile a kernel for a minute.
            "TORCHDYNAMO_DISABLE": "1",
            "TMPDIR": str(self._folder),
            "VLLM_RPC_BASE_PATH": str(self._folder),
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches only the tests, which then stop the server cleanly.
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        deadline_s = time.monotonic() + _START_S
        while not self._answers():
            self.check_alive()
            assert time.monotonic() < deadline_s, f"no server in time:\n{self.tail()}"
            time.sleep(0.25)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _stop(self) -> None:
        """Signal the leader first, because it ends its engine itself; a signal to the
        whole group would break this.
        """
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            print("the server did not end by itself:", self.tail(), sep="\n")
        finally:
            with contextlib.suppress(
                ProcessLookupError
            ):  # the process has ended, as expected
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # -- what it looks like ----------------------------------------------------

    def check_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"the server ended with {code}:\n{self.tail()}"

    def check_log(self) -> None:
        """The log must not contain errors, apart from refused requests."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [
            line
            for line in lines
            if any(phrase in line for phrase in _LOST)
            or (_ENGINES.match(line) and any(phrase in line for phrase in _BROKEN))
        ]
        assert not errors, f"{len(errors)} errors in the log: {errors[:5]}"

    def tail(self, max_chars: int = 4000) -> str:
        """The last characters of the log."""
        return self.log.read_text(errors="replace")[-max_chars:]

    def keep_log(self, name: str) -> Path:
        """Copy the log to a folder that outlives the server."""
        kept = _ROOT / "build" / name
        kept.parent.mkdir(exist_ok=True)
        shutil.copy(self.log, kept)
        return kept

    def rss_bytes(self) -> int:
        """Resident memory of the server and its child processes."""
        assert self._process is not None
        leader = psutil.Process(self._process.pid)
        total = 0
        for process in [leader, *leader.children(recursive=True)]:
            # A child process that has ended meanwhile
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of /metrics by name, summed over their labels."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(\w[\w:]*)(?:\{.*\})? (\S+)$", text, re.M):
        values[name] = values.get(name, 0.0) + float(value)
    return values


def _vllm() -> str:
    beside = Path(sys.executable).parent / "vllm"
    command = str(beside) if beside.exists() else shutil.which("vllm")
    assert command, "there is no vllm command; scripts/test.sh sets one up"
    return command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_parent() -> None:
    """Send SIGTERM to the server when the test process is killed and cannot stop it.

    vLLM may miss it while it starts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
