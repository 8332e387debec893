"""Front ends' counts of clusterings reach Prometheus, once per process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from vllm_kvplugins.vllm_adapter.scheduler import clustering_metrics
from vllm_kvplugins.vllm_adapter.scheduler.metrics import PolicyPromMetrics

NAMES = ("found", "saved", "refused", "failures")


def samples(engine: str) -> list[float | None]:
    labels = {"model_name": "a-model", "engine": engine}
    return [
        REGISTRY.get_sample_value(f"vllm:kv_policy_clusterings_{name}_total", labels)
        for name in NAMES
    ]


def test_counts_go_to_the_first_engine_of_this_process(monkeypatch):
    monkeypatch.setattr(clustering_metrics, "_counters", {})
    clustering_metrics.count("found")  # no metrics yet: nothing to count with
    before = set(REGISTRY._collector_to_names)
    engines = {engine: ["a-model", str(engine)] for engine in (3, 4)}
    kinds = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    try:
        PolicyPromMetrics(config, kinds, ["model_name", "engine"], engines)
        assert samples("3") == samples("4") == [0, 0, 0, 0]
        for times, name in enumerate(NAMES, 1):
            for _ in range(times):
                clustering_metrics.count(name)
        assert samples("3") == [1, 2, 3, 4]
        assert samples("4") == [0, 0, 0, 0]
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)
