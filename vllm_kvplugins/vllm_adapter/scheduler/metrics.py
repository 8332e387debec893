"""Metrics of a policy: collected in scheduler and workers, exported to Prometheus.

| metric | kind | meaning |
|---|---|---|
| ``vllm:kv_policy_resident_tokens`` | gauge | resident token slots per KV head |
| ``vllm:kv_policy_budget_ratio`` | gauge | resident slots / context tokens |
| ``vllm:kv_policy_blocks_freed_total`` | counter | blocks freed by compaction |
| ``vllm:kv_policy_compressions_total`` | counter | compactions |
| ``vllm:kv_policy_compression_seconds`` | histogram | time of one compaction |
| ``vllm:kv_policy_selected_tokens_total`` | counter | slots filled by retrieval |
| ``vllm:kv_policy_fetched_tokens_total`` | counter | of these, read from host memory |
| ``vllm:kv_policy_failed_indices_total`` | counter | indices that failed to build |
| ``vllm:kv_policy_device_table_bytes`` | gauge | device memory outside the pool |
| ``vllm:kv_policy_host_bytes`` | gauge | host memory of requests and sessions |
| ``vllm:kv_policy_host_reserved_bytes`` | gauge | host memory reserved |
| ``vllm:kv_policy_held_requests`` | gauge | requests waiting for host memory |
| ``vllm:kv_policy_sessions`` | gauge | sessions that can be continued |
| ``vllm:kv_policy_session_bytes`` | gauge | host memory of sessions |
| ``vllm:kv_policy_session_unwritten_bytes`` | gauge | of these, waiting for the disk |
| ``vllm:kv_policy_session_disk_bytes`` | gauge | bytes of session files |
| ``vllm:kv_policy_session_hits_total`` | counter | requests that continued a session |
| ``vllm:kv_policy_session_parked_hits_total`` | counter | of these, without a copy |
| ``vllm:kv_policy_session_misses_total`` | counter | requests without a session |
| ``vllm:kv_policy_session_restored_tokens_total`` | counter | prompt tokens restored |
| ``vllm:kv_policy_session_recomputed_tokens_total`` | counter | shared but computed |
| ``vllm:kv_policy_session_evictions_total`` | counter | dropped for room or age |
| ``vllm:kv_policy_session_refused_total`` | counter | not saved, memory was full |
| ``vllm:kv_policy_session_failures_total`` | counter | sessions lost to an error |
| ``vllm:kv_policy_session_store_hits_total`` | counter | hits found in session_url |
| ``vllm:kv_policy_session_store_failures_total`` | counter | session_url failed |
| ``vllm:kv_policy_session_rewinds_total`` | counter | hits before a compaction |
| ``vllm:kv_policy_session_cut_off_total`` | counter | branches lost, memory was full |
| ``vllm:kv_policy_clusterings_found_total`` | counter | clusterings read from files |
| ``vllm:kv_policy_clusterings_saved_total`` | counter | clusterings written |
| ``vllm:kv_policy_clusterings_refused_total`` | counter | clusterings not written |
| ``vllm:kv_policy_clusterings_failures_total`` | counter | their store failed |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_kvplugins.vllm_adapter.scheduler import clustering_metrics

_SUMS = (
    "blocks_freed",
    "compressions",
    "selected_tokens",
    "fetched_tokens",
    "failed_indices",
    "session_hits",
    "session_parked_hits",
    "session_misses",
    "session_restored_tokens",
    "session_recomputed_tokens",
    "session_evictions",
    "session_refused",
    "session_failures",
    "session_store_hits",
    "session_store_failures",
    "session_rewinds",
    "session_cut_off",
)
_LATEST = (
    "resident_tokens",
    "logical_tokens",
    "host_bytes",
    "host_reserved_bytes",
    "held_requests",
    "sessions",
    "session_bytes",
    "session_unwritten_bytes",
    "session_disk_bytes",
)
# By rank, because several workers report it in one step.
_DEVICE = "device_table_bytes"
_SECONDS = "compression_seconds"
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass
class PolicyStats(KVConnectorStats):
    """Statistics since the last call; ``data`` has plain numbers and lists."""

    @classmethod
    def from_worker(
        cls,
        seconds: list[float],
        traffic: dict[str, int],
        device_bytes: dict[str, int],
    ) -> PolicyStats | None:
        data: dict[str, Any] = {_SECONDS: seconds} if seconds else {}
        data |= {_DEVICE: device_bytes} if device_bytes else {}
        data |= {name: count for name, count in traffic.items() if count}
        return cls(data=data) if data else None

    @classmethod
    def from_scheduler(cls, **numbers: int) -> PolicyStats:
        return cls(data=dict(numbers))

    def reset(self) -> None:
        self.data.clear()

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> PolicyStats:
        for key in _SUMS:
            if key in other.data:
                self.data[key] = self.data.get(key, 0) + other.data[key]
        for key in _LATEST:
            if key in other.data:
                self.data[key] = other.data[key]
        if _DEVICE in other.data:
            self.data[_DEVICE] = self.data.get(_DEVICE, {}) | other.data[_DEVICE]
        if _SECONDS in other.data:
            self.data[_SECONDS] = self.data.get(_SECONDS, []) + other.data[_SECONDS]
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds = self.data.get(_SECONDS, [])
        numbers: dict[str, int | float] = {
            f"kv_policy_{key}": self.data.get(key, 0) for key in (*_SUMS, *_LATEST)
        }
        numbers[f"kv_policy_{_DEVICE}"] = sum(self.data.get(_DEVICE, {}).values())
        numbers["kv_policy_compression_seconds"] = round(sum(seconds), 4)
        return numbers


class PolicyPromMetrics(KVConnectorPromMetrics):
    """One set of metrics per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._gauge("resident_tokens", "Token slots that requests hold, per KV head.")
        self._gauge(
            "budget_ratio", "Token slots that requests hold, divided by their tokens."
        )
        self._counter("blocks_freed", "Blocks freed by compaction.")
        self._counter("compressions", "Compactions that have run.")
        self._counter(
            "selected_tokens", "Token slots that retrieval selected for attention."
        )
        self._counter(
            "fetched_tokens", "Selected tokens that were read from host memory."
        )
        self._counter(
            "failed_indices", "Indices or span factors that could not be built."
        )
        self._gauge(
            _DEVICE, "Device memory outside the pool of blocks, over all workers."
        )
        self._gauge(
            "host_bytes",
            "Host memory that requests reserve and sessions use, each byte once.",
        )
        self._gauge(
            "host_reserved_bytes",
            "Host memory that requests and sessions reserve in the host tier.",
        )
        self._gauge("held_requests", "Requests waiting for host memory.")
        self._gauge("sessions", "Sessions that can be continued.")
        self._gauge("session_bytes", "Host memory that sessions use.")
        self._gauge(
            "session_unwritten_bytes",
            "Of session_bytes, those whose files are not written yet.",
        )
        self._gauge("session_disk_bytes", "Disk space that session files use.")
        self._counter("session_hits", "Requests that continued a session.")
        self._counter(
            "session_parked_hits",
            "Session hits whose blocks were still on the device; nothing was copied.",
        )
        self._counter("session_misses", "Requests that started without a session.")
        self._counter(
            "session_restored_tokens", "Prompt tokens restored from sessions."
        )
        self._counter(
            "session_recomputed_tokens",
            "Prompt tokens that a session shares but that were computed again.",
        )
        self._counter("session_evictions", "Sessions dropped for room or age.")
        self._counter(
            "session_refused", "Sessions that were not saved because memory was full."
        )
        self._counter("session_failures", "Sessions lost to an error.")
        self._counter(
            "session_store_hits",
            "Hits of sessions that were found in session_url, usually saved by another "
            "replica.",
        )
        self._counter(
            "session_store_failures",
            "Listings, look-ups and reads of session_url that failed or were late.",
        )
        self._counter(
            "session_rewinds",
            "Requests that continued a session before its last compaction.",
        )
        self._counter(
            "session_cut_off",
            "Sessions that lost their last tokens to a request that branched off, "
            "because host memory was full.",
        )
        self._histogram(_SECONDS, "Seconds that the compaction of one request takes.")
        self._count_clusterings()

    def _count_clusterings(self) -> None:
        """Clusterings belong to no engine; this process counts them for its first."""
        self._counter(
            "clusterings_found",
            "Clusterings of conversations found in session_dir or session_url, usually "
            "after a restart or on another replica.",
        )
        self._counter("clusterings_saved", "Clusterings that were written.")
        self._counter(
            "clusterings_refused",
            "Clusterings that were not written: many waited, or one was too large.",
        )
        self._counter(
            "clusterings_failures",
            "Look-ups, writes and deletions of clusterings that failed or were late.",
        )
        first = min(self.per_engine_labelvalues)
        names = ("found", "saved", "refused", "failures")
        clustering_metrics.attach(
            {name: getattr(self, f"clusterings_{name}")[first] for name in names}
        )

    def _add(self, name: str, metric: Any) -> None:
        bound = {
            engine: metric.labels(*values)
            for engine, values in self.per_engine_labelvalues.items()
        }
        setattr(self, name, bound)

    def _gauge(self, name: str, text: str) -> None:
        metric = self._gauge_cls(
            name=f"vllm:kv_policy_{name}",
            documentation=text,
            multiprocess_mode="mostrecent",
            labelnames=self._labelnames,
        )
        self._add(name, metric)

    def _counter(self, name: str, text: str) -> None:
        metric = self._counter_cls(
            name=f"vllm:kv_policy_{name}",
            documentation=text,
            labelnames=self._labelnames,
        )
        self._add(name, metric)

    def _histogram(self, name: str, text: str) -> None:
        metric = self._histogram_cls(
            name=f"vllm:kv_policy_{name}",
            documentation=text,
            buckets=_BUCKETS,
            labelnames=self._labelnames,
        )
        self._add(name, metric)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data = transfer_stats_data
        for key in _SUMS:
            getattr(self, key)[engine_idx].inc(data.get(key, 0))
        if "resident_tokens" in data:
            resident, logical = data["resident_tokens"], data["logical_tokens"]
            self.resident_tokens[engine_idx].set(resident)
            self.budget_ratio[engine_idx].set(resident / logical if logical else 1.0)
            for key in _LATEST:
                if key not in ("resident_tokens", "logical_tokens"):
                    getattr(self, key)[engine_idx].set(data[key])
        if _DEVICE in data:
            self.device_table_bytes[engine_idx].set(sum(data[_DEVICE].values()))
        for seconds in data.get(_SECONDS, []):
            self.compression_seconds[engine_idx].observe(seconds)
