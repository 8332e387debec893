"""Our KV connector: vLLM's interface for per-step hooks, sessions and metrics.

vLLM creates one in the scheduler and one in each worker. The connector of the scheduler
reads admission decisions (see ``admission``) and sends session commands to the workers
with each step. The connectors of the workers end each step and return acknowledgements.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.sessions.commands import Load, SessionAck, SessionCommands
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.scheduler.admission_controller import (
    AdmissionController,
)
from vllm_kvplugins.vllm_adapter.scheduler.metrics import PolicyPromMetrics, PolicyStats
from vllm_kvplugins.vllm_adapter.scheduler.scheduler import residency_manager
from vllm_kvplugins.vllm_adapter.scheduler.sessions import (
    NO_SESSIONS,
    SchedulerSessions,
)

if TYPE_CHECKING:
    import torch

    from vllm_kvplugins.engine.runtime import PolicyRuntime
    from vllm_kvplugins.sessions.store import SessionStore
    from vllm_kvplugins.vllm_adapter.scheduler.block_manager import (
        ResidencyBlockManager,
    )


# Measuring device memory visits all requests, so not every step does it.
_MEASURE_EVERY_S = 0.25


@dataclass
class SessionCommandMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, with each step."""

    commands: SessionCommands


@dataclass
class SessionAckMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, with each step's output."""

    acks: list[SessionAck]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SessionAckMetadata:
        assert isinstance(other, SessionAckMetadata)
        return SessionAckMetadata(self.acks + other.acks)


class KVPolicyConnector(KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler, one in each worker; see ``role``.

    Attributes:
        admission: decides how requests start; set in the scheduler when vLLM binds its
            KV cache manager.
        host: reservations of host memory; None in workers.
        sessions: None if sessions are off, and in workers.
    """

    admission: AdmissionController

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._runtime: PolicyRuntime | None = None
        self._store: SessionStore | None = None
        self._kv_cache_manager: Any = None
        self._manager: ResidencyBlockManager | None = None
        self.host: HostReservations | None = None
        self.sessions: SchedulerSessions | None = None
        self._reported = (0, 0)  # freed blocks, compactions
        self._measured_s = float("-inf")

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- worker ---------------------------------------------------------------

    def bind_worker(self, runtime: PolicyRuntime, store: SessionStore | None) -> None:
        """Connect to a worker, which calls this after vLLM creates the connector."""
        self._runtime, self._store = runtime, store

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: the worker has restored sessions before this step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: sessions are saved when requests end."""

    def wait_for_save(self) -> None:
        """Run the compactions of this step, after the attention of all layers.

        Policies with spans run them before the next step instead.
        """
        assert self._runtime is not None
        if self._runtime.policy.spans is None:
            self._runtime.end_step()

    def build_connector_worker_meta(self) -> SessionAckMetadata | None:
        """Outcomes of the scheduler's commands."""
        acks = self._store.take_acks() if self._store is not None else []
        return SessionAckMetadata(acks) if acks else None

    def shutdown(self) -> None:
        """Wait until all session files are written."""
        if self._store is not None:
            self._store.close()
        if self.sessions is not None:
            self.sessions.close()

    # -- scheduler --------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._kv_cache_manager = kv_cache_manager
        self._manager = manager = residency_manager(kv_cache_manager)
        spec = manager.kv_cache_spec
        self.host = HostReservations(spec.policy, spec.geometry)
        if parse_sessions(request_of(self._vllm_config)).sessions:
            self.sessions = SchedulerSessions(self._vllm_config, manager, self.host)
        self.admission = AdmissionController(manager, self.host, self.sessions)

    def on_new_request(self, request: Any) -> None:
        """Look a request's session up in a store of several replicas, if there is one.

        The request has been queued; it is admitted in a later step.
        """
        if self.sessions is not None:
            self.sessions.look_up(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that a session restores; None: try again in a later step."""
        assert self._manager is not None
        return self._manager.starts.of(request).external_tokens, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Start a request, which has its blocks."""
        self.admission.start(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Finish a request. vLLM frees its blocks; those of a session stay held."""
        self.admission.finish(request)
        return False, None

    def request_finished(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where another connector does not support several KV cache groups."""
        return self.request_finished_all_groups(request, (block_ids,))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        commands = SessionCommands()
        if self.sessions is not None:
            if not scheduler_output.total_num_scheduled_tokens:
                self.sessions.wait_for_store()
            self.sessions.update_from_store()
            self.sessions.directory.expire()
            commands = self.sessions.directory.take_commands()
        return SessionCommandMetadata(commands)

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests should run a step.

        Sessions may have expired, or ended requests are being saved.
        """
        return self.sessions is not None and self.sessions.needs_step

    def seconds_to_expiry(self) -> float | None:
        """Seconds until a session expires; None: none will."""
        return self.sessions.directory.seconds_to_expiry() if self.sessions else None

    def update_connector_output(self, connector_output: Any) -> None:
        """Process the workers' acknowledgements."""
        meta = connector_output.kv_connector_worker_meta
        if meta is not None and self.sessions is not None:
            self.sessions.process(meta.acks)

    def failed_loads(self, worker_meta: Any) -> list[Load]:
        """Loads of sessions that failed on some rank.

        Args:
            worker_meta: the workers' metadata of one step, or None.
        """
        return [ack.load for ack in worker_meta.acks if ack.load] if worker_meta else []

    def reset_cache(self) -> bool:
        """Drop all sessions, because vLLM may load other weights next."""
        if self.sessions is not None:
            self.sessions.reset()
        return True

    # -- metrics ----------------------------------------------------------------

    def get_kv_connector_stats(self) -> PolicyStats | None:
        """Statistics of this process since the last call."""
        if self._runtime is not None:
            return PolicyStats.from_worker(
                self._runtime.take_compression_seconds(),
                self._take_traffic(),
                self._device_table_bytes(self._runtime),
            )
        if self._manager is None:
            return None
        freed, compactions = self._manager.freed_blocks, self._manager.compactions
        before, self._reported = self._reported, (freed, compactions)
        pool = self._kv_cache_manager.block_pool
        # The null block is never handed out.
        used_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        used_blocks -= self._num_other_blocks()
        logical = sum(map(len, self._manager.req_to_blocks.values()))
        sessions = self.sessions.take_metrics() if self.sessions else NO_SESSIONS
        return PolicyStats.from_scheduler(
            blocks_freed=freed - before[0],
            compressions=compactions - before[1],
            resident_tokens=used_blocks * self._manager.block_size,
            logical_tokens=logical * self._manager.block_size,
            host_reserved_bytes=self.host.reserved_bytes if self.host else 0,
            # The host tier's sessions are in both of the other host metrics.
            host_bytes=sessions["session_bytes"]
            + (self.host.request_bytes if self.host else 0),
            held_requests=len(self.host.waiting) if self.host else 0,
            **sessions,
        )

    def _device_table_bytes(self, runtime: PolicyRuntime) -> dict[str, int]:
        """Device memory outside the pool, by rank; empty in most steps."""
        now = time.monotonic()
        idle = not runtime.num_requests
        if not idle and now - self._measured_s < _MEASURE_EVERY_S:
            return {}
        self._measured_s = now
        rank = self._vllm_config.parallel_config.rank
        return {str(rank): runtime.device_table_bytes}

    def _num_other_blocks(self) -> int:
        """Number of blocks that hold layers without a policy, of a hybrid model.

        Cost: O(blocks in the windows of all requests); for a recurrent state, which may
        have gaps, O(blocks of all requests).
        """
        coordinator = self._kv_cache_manager.coordinator
        held: set[int] = set()
        for manager in coordinator.single_type_managers:
            if manager is self._manager:
                continue
            is_state = isinstance(manager.kv_cache_spec, MambaSpec)
            for blocks in manager.req_to_blocks.values():
                # Null blocks lie before the window.
                in_window = itertools.takewhile(
                    lambda block: not block.is_null, reversed(blocks)
                )
                held.update(
                    block.block_id
                    for block in (blocks if is_state else in_window)
                    if not block.is_null
                )
        return len(held)

    def _take_traffic(self) -> dict[str, int]:
        """Tokens selected and fetched since the last call; empty without retrieval."""
        traffic = self._runtime.take_traffic() if self._runtime is not None else None
        if traffic is None:
            return {}
        return {
            "selected_tokens": traffic.selected,
            "fetched_tokens": traffic.fetched,
            "failed_indices": traffic.failed,
        }

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> PolicyStats:
        return PolicyStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PolicyPromMetrics:
        return PolicyPromMetrics(*args, **kwargs)
