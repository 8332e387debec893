"""Wakes an idle engine when a session expires.

::

    idle engine:  _process_input_queue ── waits for requests ─────────────┐
    timer:                             ── first expiry ──> WAKEUP ────────┤
    has_work:     connector.has_pending_push_work: drops the session <────┘
    one step without requests takes the commands to the workers

vLLM's loop waits without a time limit, and nothing but a message in its queue wakes it.
An engine in the process of its caller (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) has no
loop; it drops sessions when its next request arrives.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

_INSTALLED = "_kvplugins_wakes_idle_engine"
_LONGEST_WAIT_S = 3600.0  # a longer one may overflow the system's timer


class IdleTimer:
    """Calls a function once, after a delay, unless it is cancelled.

    Args:
        delay_s: may be infinite.
        call: runs in a thread of its own.
    """

    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self._due = time.monotonic() + delay_s
        self._call = call
        self._cancelled = threading.Event()
        threading.Thread(target=self._run, name="kvp-expiry", daemon=True).start()

    def cancel(self) -> None:
        """Do not call the function, unless it has been called."""
        self._cancelled.set()

    def _run(self) -> None:
        while (left := self._due - time.monotonic()) > 0:
            if self._cancelled.wait(min(left, _LONGEST_WAIT_S)):
                return
        self._call()


def install() -> None:
    """Wrap the method in which an engine waits for requests; idempotent."""
    if getattr(EngineCoreProc, _INSTALLED, False):
        return
    setattr(EngineCoreProc, _INSTALLED, True)
    original = EngineCoreProc._process_input_queue

    @functools.wraps(original)
    def process_input_queue(self: Any) -> None:
        connector = self.scheduler.connector
        seconds_of = getattr(connector, "seconds_to_expiry", lambda: None)
        seconds = seconds_of()
        if seconds is None or self.has_work():
            original(self)
            return
        wakeup = (EngineCoreRequestType.WAKEUP, None)
        timer = IdleTimer(seconds, lambda: self.input_queue.put_nowait(wakeup))
        try:
            original(self)
        finally:
            timer.cancel()

    EngineCoreProc._process_input_queue = process_input_queue
