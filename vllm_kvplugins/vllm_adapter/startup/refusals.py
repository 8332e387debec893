"""Shows why an engine does not start: the reasons, without tracebacks.

::

    vllm serve ── create_engine_config refuses ───────────────────────┐
        │                                                             v
        └── EngineCore ── scheduler refuses ──> report file ──> KVPolicyError
                └── Worker ── layers refuse ──────┘            (front end)

Most reasons are known in the front end. Some appear only when a worker has loaded the
model, in another process. There vLLM logs a traceback, and the front end raises an
error that says to look at the log. While an engine starts, a filter on vLLM's loggers
writes the reasons to a file instead, and the front end raises them as a
``KVPolicyError``.

A command (``vllm serve``) prints a ``KVPolicyError`` as its message alone. A program
that builds an ``LLM`` receives the exception.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_kvplugins.config import CONFIG_KEY
from vllm_kvplugins.errors import KVPolicyError

# Environment variable with the path of the report file. It exists while an engine with
# a policy starts; processes of the engine inherit the variable.
REPORT = "KVP_REFUSAL_REPORT"

_ENGINE_LOGGER = "vllm.v1.engine.core"
_WORKER_LOGGER = "vllm.v1.executor.multiproc_executor"
_INSTALLED = "_kvplugins_installed"


def print_without_traceback() -> None:
    """Print an uncaught ``KVPolicyError`` as its message; idempotent.

    For processes that a command line configures.
    """
    previous = sys.excepthook
    if getattr(previous, _INSTALLED, False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, KVPolicyError):
            print(f"error: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    setattr(hook, _INSTALLED, True)
    sys.excepthook = hook


# -- the front end -----------------------------------------------------------------


def install() -> None:
    """Wrap the two steps in which vLLM starts engine processes; idempotent.

    On a vLLM without them, its own error messages stay.
    """
    from vllm.v1.engine import utils

    manager = getattr(utils, "CoreEngineProcManager", None)
    wait = getattr(utils, "wait_for_engine_startup", None)
    if manager is None or wait is None or hasattr(wait, _INSTALLED):
        return
    start = manager.__init__

    @functools.wraps(start)
    def start_processes(self: Any, *args: Any, **kwargs: Any) -> None:
        # Without a local client nobody waits for the processes.
        watched = kwargs.get("local_client") and _has_policy(kwargs.get("vllm_config"))
        with _reports() if watched else contextlib.nullcontext():
            start(self, *args, **kwargs)

    @functools.wraps(wait)
    def wait_for_engine_startup(*args: Any, **kwargs: Any) -> Any:
        try:
            return wait(*args, **kwargs)
        except RuntimeError:
            if reasons := _take_reasons():
                raise KVPolicyError(reasons) from None
            raise
        finally:
            _take_reasons()

    setattr(wait_for_engine_startup, _INSTALLED, True)
    manager.__init__ = start_processes
    utils.wait_for_engine_startup = wait_for_engine_startup


_report_path: Path | None = None  # of the engine that this process starts


def _has_policy(vllm_config: Any) -> bool:
    config = getattr(vllm_config, "additional_config", None)
    return isinstance(config, dict) and CONFIG_KEY in config


@contextlib.contextmanager
def _reports() -> Iterator[None]:
    """Processes that are started in this context report to a new file."""
    global _report_path
    handle, name = tempfile.mkstemp(prefix="kv-policy-", suffix=".refused")
    os.close(handle)
    _report_path = Path(name)
    os.environ[REPORT] = name
    report_to_parent()  # for processes that are forked
    try:
        yield
    finally:
        del os.environ[REPORT]


def _take_reasons() -> str:
    """What the processes reported. Removes the file: the log shows tracebacks again."""
    global _report_path
    if _report_path is None:
        return ""
    path, _report_path = _report_path, None
    try:
        return path.read_text().strip()
    except OSError:
        return ""
    finally:
        path.unlink(missing_ok=True)


# -- processes of the engine ---------------------------------------------------------


def report_to_parent() -> None:
    """In a process of an engine that starts: report refusals instead of logging them.

    Does nothing in other processes.
    """
    if REPORT not in os.environ:
        return
    for name in (_ENGINE_LOGGER, _WORKER_LOGGER):
        logger = logging.getLogger(name)
        if not any(isinstance(each, _ReportFilter) for each in logger.filters):
            logger.addFilter(_ReportFilter())


class _ReportFilter(logging.Filter):
    """Removes log records with the traceback of a refusal; writes the reasons."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        path = Path(os.environ.get(REPORT, ""))
        if error is None or not path.is_file():
            return True  # no failure, or the engine has started
        if isinstance(error, KVPolicyError) and str(error) not in path.read_text():
            path.write_text(f"{error}\n")
        if not path.read_text():
            return True  # another failure
        if record.name == _ENGINE_LOGGER:
            # vLLM would raise the error again, and Python print its traceback.
            raise SystemExit(1)
        return False
