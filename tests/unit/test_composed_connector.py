"""Our KV connector together with another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="install a vLLM (see scripts/)")

from vllm_kvplugins.vllm_adapter.scheduler.composed_connector import (
    ComposedConnector,
    _KnownMetrics,
)
from vllm_kvplugins.vllm_adapter.scheduler.connector import KVPolicyConnector
from vllm_kvplugins.vllm_adapter.scheduler.metrics import PolicyStats


def test_statistics_are_rebuilt_and_those_of_unknown_connectors_left_out():
    sent = {"KVPolicyConnector": {"compressions": 3}, "MyStore": {"hits": 1}}
    stats = ComposedConnector.build_kv_connector_stats(sent)
    assert stats is not None
    assert set(stats.data) == {"KVPolicyConnector"}
    ours = stats.data["KVPolicyConnector"]
    assert isinstance(ours, PolicyStats)
    assert ours.data == {"compressions": 3}
    again = ComposedConnector.build_kv_connector_stats(stats.data)
    assert again is not None
    assert again.data["KVPolicyConnector"] is ours
    empty = ComposedConnector.build_kv_connector_stats()
    assert empty is not None
    assert empty.is_empty()


def test_an_idle_engine_asks_our_connector_for_the_next_expiry():
    connector = ComposedConnector.__new__(ComposedConnector)
    ours = KVPolicyConnector.__new__(KVPolicyConnector)
    directory = SimpleNamespace(seconds_to_expiry=lambda: 7.0)
    ours.sessions = SimpleNamespace(directory=directory)
    connector._connectors = [object(), ours]
    assert connector.seconds_to_expiry() == 7.0
    ours.sessions = None
    assert connector.seconds_to_expiry() is None


def test_connectors_without_metrics_are_not_observed():
    seen: list[Any] = []
    metrics = SimpleNamespace(
        _prom_metrics={"KVPolicyConnector": object()},
        observe=lambda data, engine: seen.append((data, engine)),
    )
    _KnownMetrics(metrics).observe({"KVPolicyConnector": {"a": 1}, "MyStore": {}}, 2)
    assert seen == [({"KVPolicyConnector": {"a": 1}}, 2)]
