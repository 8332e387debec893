"""An idle engine wakes up when a session expires."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from vllm_kvplugins.vllm_adapter.scheduler import idle_wakeup
from vllm_kvplugins.vllm_adapter.scheduler.idle_wakeup import IdleTimer


class Core:
    """An engine that waits for one message."""

    def __init__(self, seconds: float | None, works: bool = False) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.scheduler = SimpleNamespace(
            connector=SimpleNamespace(seconds_to_expiry=lambda: seconds)
        )
        self.works = works
        self.received: object = None

    def has_work(self) -> bool:
        return self.works

    def wait(self) -> None:
        try:
            self.received = self.input_queue.get(timeout=5 if not self.works else 0.1)
        except queue.Empty:
            self.received = None


@pytest.fixture
def process(monkeypatch):
    """The method of an engine's class, wrapped."""
    monkeypatch.setattr(EngineCoreProc, "_process_input_queue", Core.wait)
    monkeypatch.setattr(EngineCoreProc, idle_wakeup._INSTALLED, False, raising=False)
    for _ in range(2):
        idle_wakeup.install()
    return EngineCoreProc._process_input_queue


def test_an_idle_engine_gets_one_message_when_the_time_has_come(process):
    core = Core(0.05)
    process(core)
    assert core.received == (EngineCoreRequestType.WAKEUP, None)
    time.sleep(0.15)
    assert core.input_queue.empty(), "wrapped twice"


@pytest.mark.parametrize("seconds", [None, 0.05])
def test_an_engine_that_works_is_not_woken(process, seconds):
    core = Core(seconds, works=True)
    process(core)
    assert core.received is None


def test_a_request_cancels_the_timer(process):
    core = Core(0.1)
    core.input_queue.put("a request")
    process(core)
    assert core.received == "a request"
    time.sleep(0.2)
    assert core.input_queue.empty()


def test_an_engine_of_stock_vllm_is_left_alone(process):
    core = Core(None)
    core.scheduler.connector = None
    core.input_queue.put("a request")
    process(core)
    assert core.received == "a request"


def test_a_timer_without_end_can_be_cancelled():
    timer = IdleTimer(float("inf"), lambda: None)
    timer.cancel()
    threads = [t for t in threading.enumerate() if t.name == "kvp-expiry"]
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
