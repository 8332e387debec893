"""Processes that a serving benchmark starts, and always ends.

Every command runs in its own process group, so that ending the group also ends the
command's children. Signals that arrive while a process starts or ends are delivered
afterwards; otherwise an exception at that moment could leave a process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_S = 20.0  # vLLM's own shutdown takes a few seconds


# The errors in a log that follow from another one.
_SECONDARY = ("Engine core initialization failed", "EngineCore failed to start")
_ERROR = re.compile(r"\b\w*(?:Error|Exception): (?:.+)")


class ServerError(RuntimeError):
    """A process failed; the message has the end of its log.

    Attributes:
        reason: the error that caused it, in one line.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.reason = reason_of(log) or message.splitlines()[0]


def reason_of(log: str) -> str:
    """The last error in a log that does not only follow from another; "" = none."""
    errors = [match[0].strip() for match in _ERROR.finditer(log)]
    causes = [e for e in errors if not any(second in e for second in _SECONDARY)]
    return (causes or errors or [""])[-1]


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Delay signals within the block and deliver the first one after it."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def exit_on_signals() -> None:
    """Turn SIGTERM and SIGHUP into an exception, like Ctrl-C.

    Enables Ctrl-C even if a shell started this process in the background and ignored
    it. SIGHUP stays ignored under nohup.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, leave)


class Group:
    """A command in its own process group; a context manager that ends the group."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Prepare the command; entering the block starts it.

        Args:
            command: program and arguments.
            log: file for standard output and standard error.
            env: environment variables in addition to those of this process.
        """
        self.command = list(command)
        self.log = log
        # Nothing of the plugin may run next to a server that is measured.
        self.env = dict(os.environ) | {"KVP_CALIBRATE": "0"} | dict(env or {})
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Group:
        try:
            with signals_deferred(), self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.env,
                    start_new_session=True,
                )
        except BaseException:  # for example a delayed signal
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while the command runs."""
        assert self.process is not None
        return self.process.poll()

    def cpu_s(self) -> float:
        """Processor time of the command and its children, also of ended ones."""
        assert self.process is not None
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            for process in (leader, *leader.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    # Its own time, and that of ended children that it has waited for.
                    total += sum(process.cpu_times()[:4])
        return total

    def text(self) -> str:
        """The log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def stop(self, patience_s: float = STOP_S) -> None:
        """End the command, then the rest of its group.

        The leader gets SIGTERM first, alone: vLLM's API server then shuts down its
        engine, which fails if the engine gets the signal as well.
        """
        with signals_deferred():
            process, self.process = self.process, None
            if process is None:
                return
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(patience_s)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_to_end(command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
    """Run a command and wait for it.

    Raises:
        ServerError: the exit code is not 0.
    """
    with Group(command, log, env) as group:
        assert group.process is not None
        code = group.process.wait()
        if code:
            shown = " ".join(command)
            raise ServerError(f"{shown}\nended with code {code}:\n{group.tail()}")


# -- vLLM -----------------------------------------------------------------------


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def vllm_command(*arguments: str) -> list[str]:
    """``vllm ARGUMENTS`` with this interpreter, independent of PATH."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]


class Server(Group):
    """A ``vllm serve`` process; entering the block waits for ``/health``."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        start_timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare a server on a free port.

        Args:
            arguments: of ``vllm serve``, without host and port.
            folder: for the log and for the files that vLLM leaves in TMPDIR.
            start_timeout_s: time limit for the start.
            env: further environment variables.
        """
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_timeout_s = start_timeout_s
        self.start_s = 0.0
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        super().__init__(
            vllm_command("serve", *arguments, *address),
            folder / "server.log",
            {
                "TMPDIR": str(folder),
                "VLLM_RPC_BASE_PATH": str(folder),
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            }
            | dict(env or {}),
        )

    def __enter__(self) -> Server:
        try:
            super().__enter__()
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self) -> None:
        began = time.monotonic()
        while not self.healthy():
            self.start_s = time.monotonic() - began
            if self.exit_code is not None:
                why = f"ended with code {self.exit_code} before it was ready"
            elif self.start_s > self.start_timeout_s:
                why = f"was not ready after {self.start_s:.0f} s"
            else:
                time.sleep(0.5)
                continue
            raise ServerError(
                f"the server {why}; the end of its log:\n{self.tail()}", self.text()
            )
        self.start_s = time.monotonic() - began

    def healthy(self) -> bool:
        """Whether ``/health`` answers with 200."""
        return is_healthy(self.url)

    def require_alive(self) -> None:
        """Raise ServerError with the end of the log if the server has ended."""
        if self.exit_code is not None:
            raise ServerError(
                f"the server ended with code {self.exit_code} under load; "
                f"the end of its log:\n{self.tail()}",
                self.text(),
            )


class RunningServer:
    """A server that somebody else started; nothing here ends it.

    Args:
        url: its address.

    Raises:
        ServerError: it does not answer, or has no model.

    Attributes:
        served: name of its first model.
        root: where the model came from, as the server names it.
    """

    start_s = 0.0

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
                models = json.load(answer)["data"]
        except (OSError, ValueError, KeyError) as error:
            raise ServerError(f"{self.url}/v1/models: {error}") from error
        if not models:
            raise ServerError(f"{self.url} serves no model")
        self.served = str(models[0]["id"])
        self.root = str(models[0].get("root") or self.served)

    def cpu_s(self) -> None:
        """Not known: the server may run on another machine."""

    def require_alive(self) -> None:
        """Raise ServerError if ``/health`` does not answer."""
        if not is_healthy(self.url):
            raise ServerError(f"the server at {self.url} no longer answers")


def is_healthy(url: str) -> bool:
    """Whether ``/health`` answers with 200."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def serving(
    arguments: Sequence[str],
    start_timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server with its own folder; the block's end removes both."""
    with (
        tempfile.TemporaryDirectory(prefix="kvp-serving-") as folder,
        Server(arguments, Path(folder), start_timeout_s, env) as server,
    ):
        yield server
