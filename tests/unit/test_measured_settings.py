"""Settings measured at start-up reach all processes, but not the graphs' hash."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from tiny_model import write_config

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.vllm_adapter.config import host_memory
from vllm_kvplugins.vllm_adapter.config.engine_config import policy_of, request_of
from vllm_kvplugins.vllm_adapter.scheduler import session_config

MIB = 1 << 20


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Configure an engine on a machine with this much free memory."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvplugins.plugin import register

    register()
    # vLLM would reconfigure this process's loggers
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    folder = str(write_config(tmp_path / "model"))
    environment = dict(os.environ)

    def started(limit: int, **settings: Any) -> Any:
        for module in (host_memory, session_config):
            monkeypatch.setattr(module, "default_limit_bytes", lambda: limit)
        config = {"name": "quest", "skip_layers": 0, "sessions": True, **settings}
        return EngineArgs(
            model=folder,
            dtype="bfloat16",
            max_model_len=512,
            additional_config={"mine": 1, "kv_policy": config},
        ).create_engine_config()

    yield started
    # vLLM's platform sets variables
    os.environ.clear()
    os.environ.update(environment)


def test_free_memory_changes_no_hash_of_compiled_graphs(start):
    first, second = start(10 * MIB), start(20 * MIB)
    assert first.compute_hash() == second.compute_hash()
    assert first.additional_config == second.additional_config
    assert first.additional_config["mine"] == 1
    # settings that are equal for all starts are part of the hash, like the user's
    assert start(10 * MIB, budget=64).compute_hash() != first.compute_hash()


def test_other_processes_know_what_was_measured(start):
    for limit in (10 * MIB, 20 * MIB):
        config = pickle.loads(pickle.dumps(start(limit)))
        assert policy_of(config).host_memory_bytes == limit
        assert parse_sessions(request_of(config)).session_memory == limit // 2


def test_what_a_user_says_is_not_measured(start):
    config = start(10 * MIB, host_memory="3MiB", session_memory="2MiB")
    assert policy_of(config).host_memory_bytes == 3 * MIB
    assert parse_sessions(request_of(config)).session_memory == 2 * MIB
    without = request_of(start(10 * MIB, sessions=False))
    assert parse_sessions(without).session_memory is None
