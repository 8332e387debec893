"""A measurement of a model's layers in a process of its own, next to a server.

A server calls ``start``. It starts this module as a program, which runs
``kvplugins research calibrate`` as a child at the lowest priority, and remembers why
the child failed. Both processes end with the server, even if it is killed.

Imports neither vLLM nor torch, because the program waits most of its time. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_kvplugins import __version__
from vllm_kvplugins.errors import KVPolicyError, coded

SWITCH = "KVP_CALIBRATE"
# Exit statuses of the program.
DONE, FAILED, BUSY, STOPPED = 0, 1, 3, 4

_LOWEST_PRIORITY = 19
_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "1000"  # largest oom_score_adj
# A user or a service manager ends a process with these; it has not failed.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",  # the error is the last line of the log
    "COLUMNS": "200",  # so that an error stays one line in the log
}
_REASON_LENGTH = 500


@dataclass(frozen=True, slots=True)
class JobFiles:
    """A profile, and the files next to it that belong to its measurement.

    Attributes:
        profile: ends in ``.json``.
    """

    profile: Path

    @property
    def log(self) -> Path:
        """Output of the measurement."""
        return self.profile.with_suffix(".log")

    @property
    def lock(self) -> Path:
        """Locked by the process that measures; stays as an empty file."""
        return self.profile.with_suffix(".lock")

    @property
    def failure(self) -> Path:
        """Why the last measurement failed."""
        return self.profile.with_suffix(".failed.json")


def is_enabled() -> bool:
    """Whether the environment variable ``KVP_CALIBRATE`` permits measurements.

    Raises:
        KVPolicyError: it is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "1"
    if value not in ("0", "1"):
        raise KVPolicyError(
            coded("KVP119", f"{SWITCH} is {value!r}; set 0 or 1, or unset it")
        )
    return value == "1"


# -- remembered failures -------------------------------------------------------


def remembered_failure(files: JobFiles) -> str | None:
    """Why the last measurement failed; None if this version has not failed."""
    try:
        content = json.loads(files.failure.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or content.get("plugin") != __version__:
        return None
    reason = content.get("reason")
    return reason if isinstance(reason, str) else None


def remember_failure(files: JobFiles, reason: str) -> None:
    """Store why a measurement failed, so that no start repeats it."""
    content = {"plugin": __version__, "reason": reason}
    replace_text(files.failure, json.dumps(content, indent=1) + "\n")


def forget_failure(files: JobFiles) -> None:
    """Forget an earlier failure: the profile exists now."""
    files.failure.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a file that readers see either as before or complete.

    Raises:
        OSError: the file cannot be written; it stays as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


# -- the server's side ---------------------------------------------------------


def is_running(files: JobFiles) -> bool:
    """Whether some process measures this model now. Creates the lock file.

    Raises:
        OSError: the lock file cannot be created.
    """
    with _locked(files) as acquired:
        return not acquired


def start(files: JobFiles, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a measurement that ends with this process.

    The kernel ends it when the calling *thread* ends, so call this from a thread that
    lives as long as the server. It also ends with the process that started this one
    with ``multiprocessing``: an engine can outlive a front end that was killed.

    Args:
        command: writes ``files.profile``.

    Returns:
        The process, whose exit status is one of this module's.
    """
    program = [sys.executable, "-m", __name__, "--parent", str(os.getpid())]
    front_end = multiprocessing.parent_process()
    if front_end is not None:
        program += ["--front-end", str(front_end.pid)]
    return subprocess.Popen(
        [*program, str(files.profile), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | _ENVIRONMENT,
    )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a measurement, with the command that it runs."""
    process.kill()
    process.wait()


# -- the program ---------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run a command that measures a model, and remember why it failed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--front-end", type=int)
    parser.add_argument("profile", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    end_with(chosen.parent)
    # Ctrl-C in the server's terminal is for the server. Not a new session: where Linux
    # shares processors among sessions, a priority counts within a session only.
    os.setpgid(0, 0)
    os.nice(_LOWEST_PRIORITY)
    with suppress(OSError):  # if memory runs out, the kernel ends this process first
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)
    files = JobFiles(chosen.profile)
    with _locked(files) as acquired:
        if not acquired:
            return BUSY
        return _measure(files, chosen.command, chosen.front_end or chosen.parent)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends.

    Args:
        parent: process ID. If it has ended already, this process exits.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(STOPPED)


def _measure(files: JobFiles, command: list[str], server: int) -> int:
    own, before = os.getpid(), _version(files.profile)
    with files.log.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: end_with(own),  # this process has one thread
        )
    if not _outlived_by(server, process):
        stop(process)
        return STOPPED
    status = process.wait()
    if -status in _STOP_SIGNALS:
        return STOPPED
    if status == 0 and _version(files.profile) != before:
        forget_failure(files)
        return DONE
    remember_failure(files, _reason(status, files.log))
    return FAILED


def _outlived_by(server: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until one of two processes ends; whether the server still runs then."""
    try:
        ends = [os.pidfd_open(server), os.pidfd_open(process.pid)]
    except ProcessLookupError:  # the child has not been waited for, so it exists
        return False
    waiting = select.poll()
    for end in ends:
        waiting.register(end, select.POLLIN)
    ended = [descriptor for descriptor, _ in waiting.poll()]
    return ends[0] not in ended


def _version(path: Path) -> tuple[int, int] | None:
    """What differs between a file and its replacement; None without a file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _reason(status: int, log: Path) -> str:
    """Why the command failed: its signal, its error message, or its last line."""
    if status == -signal.SIGKILL:
        return "it was killed, probably because memory ran out"
    if status < 0:
        return f"it ended with signal {-status}"
    if status == 0:
        return "it wrote no profile"
    text = log.read_text(encoding="utf-8", errors="replace").strip()
    lines = [line.strip() for line in text.splitlines()]
    errors = [i for i, line in enumerate(lines) if line.startswith("error:")]
    told = lines[errors[-1] :] if errors else lines[-1:]
    message = " ".join(told).removeprefix("error:").strip()
    return message[:_REASON_LENGTH] or f"it ended with status {status}"


@contextmanager
def _locked(files: JobFiles) -> Iterator[bool]:
    """Try to take the lock; yield whether that worked. The lock ends with us."""
    handle = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
