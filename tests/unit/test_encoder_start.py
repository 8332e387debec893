"""The encoder for episodes is loaded when a server starts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm_kvplugins.errors import KVPolicyError
from vllm_kvplugins.vllm_adapter.frontend import chat_episodes, encoder_start


def start(monkeypatch: pytest.MonkeyPatch, routing: Any) -> None:
    """An engine with a policy that has these episodes, or none."""

    class Engine:
        def __init__(self, config: Any) -> None:
            self.vllm_config, self.renderer = config, "renderer"

    policy = SimpleNamespace(episode_routing=routing) if routing != "stock" else None
    monkeypatch.setattr(encoder_start, "AsyncLLM", Engine)
    monkeypatch.setattr(encoder_start, "policy_of", lambda config: policy)
    encoder_start.install()
    encoder_start.install()
    Engine("config")


def test_it_is_loaded_once_without_waiting(monkeypatch):
    loads: list[Any] = []
    may_load, loaded = threading.Event(), threading.Event()

    def load() -> None:
        assert may_load.wait(10)
        loads.append("loaded")
        loaded.set()

    frontend = SimpleNamespace(router=SimpleNamespace(load=load))
    monkeypatch.setattr(chat_episodes, "_frontend", lambda *arguments: frontend)
    start(monkeypatch, SimpleNamespace(settings="settings"))
    assert loads == []
    may_load.set()
    assert loaded.wait(10)
    assert loads == ["loaded"]


@pytest.mark.parametrize("routing", [None, "stock"])
def test_nothing_is_loaded_without_episodes(monkeypatch, routing):
    monkeypatch.setattr(
        encoder_start, "load_encoder_ahead", lambda *arguments: pytest.fail("loaded")
    )
    start(monkeypatch, routing)


def test_an_encoder_that_cannot_be_loaded_is_told_at_the_start(monkeypatch, caplog):
    told = threading.Event()

    def load() -> None:
        raise KVPolicyError("no such encoder")

    frontend = SimpleNamespace(router=SimpleNamespace(load=load))
    monkeypatch.setattr(chat_episodes, "_frontend", lambda *arguments: frontend)
    monkeypatch.setattr(
        chat_episodes.logger, "error", lambda *arguments: told.set(), raising=True
    )
    start(monkeypatch, SimpleNamespace(settings="settings"))
    assert told.wait(10)
