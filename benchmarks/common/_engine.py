"""Runs an engine in a child process, one step per command.

A benchmark starts two or more of these and interleaves them in one run (A, B, A, B …),
so that drift of the machine affects all of them equally. The child reads one JSON
object per line on standard input and answers each with one JSON line. Its logs go to a
temporary file.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# The widest vector instructions of the CPU; kernels differ by them.
_VECTORS = ("avx512_bf16", "avx512f", "avx2", "asimd")
_CHILD = Path(__file__).resolve().with_name("_engine_child.py")


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Settings of one engine. ``config``: the policy as JSON; "{}" is stock vLLM."""

    config: str

    @property
    def options(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.config)
        return parsed


class EngineProcess:
    """A vLLM engine with ``policy`` (None = stock), driven step by step.

    Args:
        deadline: kill the engine at this ``time.monotonic()``; None = never.
        engine: arguments of ``vllm.LLM``.

    Raises:
        RuntimeError: the child died or reached the deadline. The message has the end of
            its log. Every later command raises it as well.
    """

    def __init__(
        self,
        policy: dict[str, Any] | None,
        deadline: float | None = None,
        **engine: Any,
    ) -> None:
        self.name = policy["name"] if policy else "stock"
        self.deadline = deadline
        # :meth:`close` closes it; it must outlive this method
        self.log = tempfile.NamedTemporaryFile(  # noqa: SIM115
            "w+", prefix=f"kvp-{self.name}-", errors="replace"
        )
        env = dict(
            os.environ,
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            KVP_CALIBRATE="0",  # nothing else runs while it measures
        )
        self.process = subprocess.Popen(
            [sys.executable, str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=env,
            text=True,
            start_new_session=True,  # so that _kill() also ends its children
        )
        self.facts: dict[str, Any] = self.ask("open", policy=policy, engine=engine)

    def ask(self, command: str, **arguments: Any) -> Any:
        if self.deadline is None:
            return self._ask(command, arguments)
        left = max(self.deadline - time.monotonic(), 0.0)
        watch = threading.Timer(left, self._kill)
        watch.start()
        try:
            return self._ask(command, arguments)
        finally:
            watch.cancel()

    def _ask(self, command: str, arguments: dict[str, Any]) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except OSError:  # a broken pipe
            answer = ""
        if not answer:
            late = self.deadline is not None and time.monotonic() >= self.deadline
            self.log.seek(0)
            why = "ran out of time" if late else "died"
            raise RuntimeError(f"{self.name} {why}:\n{self.log.read()[-3000:]}")
        return json.loads(answer)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            assert self.process.stdin
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._kill()
        self.process.wait()
        self.log.close()


def child_rows(script: str, request: str, label: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that ``script --child REQUEST`` prints after "RESULT ".

    Raises:
        RuntimeError: the child failed. The message has the end of its log.
    """
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(
            [sys.executable, script, "--child", request],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("RESULT "):
                yield json.loads(line[7:])
        if child.wait():
            log.seek(0)
            raise RuntimeError(f"{label} failed:\n{log.read()[-3000:]}")


def provenance() -> dict[str, str]:
    """Machine, commit and command, to print next to every result.

    Of absolute paths in the command only the names remain. The environment variable
    KVP_COMMIT sets the commit where git is not available.
    """
    facts = _cpu_facts()
    model = facts.get("model name", platform.processor())
    flags = facts.get("flags", facts.get("Features", "")).split()
    vectors = next((name for name in _VECTORS if name in flags), "")
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:  # git is not installed
        commit = ""
    commit = commit or os.environ.get("KVP_COMMIT", "")
    script = os.path.relpath(sys.argv[0], ROOT)
    return {
        "machine": f"{model}, {os.cpu_count()} cores" + (vectors and f", {vectors}"),
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "command": " ".join(["python", script, *map(_without_folder, sys.argv[1:])]),
    }


def _cpu_facts() -> dict[str, str]:
    """Properties of the first CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    pairs = (line.split(":", 1) for line in reversed(lines) if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _without_folder(argument: str) -> str:
    return Path(argument).name if argument.startswith("/") else argument


def kernel_provenance(load: float, repeats: int) -> dict[str, Any]:
    """:func:`provenance` of a benchmark of the compiled ops.

    Args:
        load: 1-minute load average of the machine before the run.
        repeats: number of repetitions of the run.
    """
    from vllm_kvplugins import ops

    return {
        **provenance(),
        "kernels": "simd " + ops.extension_info()["simd"],
        "load": f"{load:.2f} before, {os.getloadavg()[0]:.2f} after",
        "repeats": repeats,
    }


def synthetic_prompt(tokenizer_size: int, length: int, seed: int) -> list[int]:
    """Token ids with repeats, so that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(1000, min(tokenizer_size, 40000), (400,), generator=generator)
    picks = torch.randint(0, 400, (length,), generator=generator)
    return words[picks].tolist()
