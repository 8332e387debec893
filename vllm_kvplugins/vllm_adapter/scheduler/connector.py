"""Our KV connector: the supported seam for per-step hooks, sessions and metrics.

vLLM calls it at the end of every forward pass, where compactions run; it says which
tokens of a prompt a session restores, carries orders to the workers and reports back,
and statistics to Prometheus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.sessions.commands import Load, SessionAcks, SessionCommands
from vllm_kvplugins.vllm_adapter.config.engine_config import request_of
from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
from vllm_kvplugins.vllm_adapter.scheduler.metrics import PolicyPromMetrics, PolicyStats
from vllm_kvplugins.vllm_adapter.scheduler.scheduler import residency_manager
from vllm_kvplugins.vllm_adapter.scheduler.sessions import (
    NO_SESSIONS,
    SchedulerSessions,
)
from vllm_kvplugins.vllm_adapter.startup import activation

if TYPE_CHECKING:
    import torch

    from vllm_kvplugins.engine.runtime import PolicyRuntime
    from vllm_kvplugins.sessions.store import SessionStore
    from vllm_kvplugins.vllm_adapter.scheduler.block_manager import (
        ResidencyBlockManager,
    )


@dataclass
class SessionCommandMetadata(KVConnectorMetadata):
    """From the scheduler to every worker, with each step."""

    orders: SessionCommands


@dataclass
class SessionAckMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, with each step's output."""

    reports: list[SessionAcks]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SessionAckMetadata:
        assert isinstance(other, SessionAckMetadata)
        return SessionAckMetadata(self.reports + other.reports)


class KVPolicyConnector(KVConnectorBase_V1, SupportsHMA):
    """One instance in the scheduler, one in each worker; see ``role``."""

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._runtime: PolicyRuntime | None = None
        self._kv_cache_manager: Any = None
        self._manager: ResidencyBlockManager | None = None
        self._reported = (0, 0)
        self._host: HostReservations | None = None
        self._vault: SessionStore | None = None
        self.sessions: SchedulerSessions | None = None
        if role == KVConnectorRole.WORKER:
            self._runtime = activation.runtime()
            self._vault = activation.vault()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- worker ---------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Sessions were restored before the step was prepared; see the worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """All layers have attended: run the compactions of this step, unless they
        wait until its tokens have left."""
        assert self._runtime is not None
        if self._runtime.policy.spans is None:
            self._runtime.end_step()

    def build_connector_worker_meta(self) -> SessionAckMetadata | None:
        """What came of the scheduler's orders."""
        reports = self._vault.take_reports() if self._vault is not None else []
        return SessionAckMetadata(reports) if reports else None

    def shutdown(self) -> None:
        """Wait for files that are being written."""
        if self._vault is not None:
            self._vault.close()

    # -- scheduler --------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._kv_cache_manager = kv_cache_manager
        self._manager = residency_manager(kv_cache_manager)
        spec = self._manager.kv_cache_spec
        self._host = HostReservations(spec.policy, spec.geometry)
        if parse_sessions(request_of(self._vllm_config)).sessions:
            self.sessions = SchedulerSessions(
                self._vllm_config, self._manager, self._host
            )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What a session restores; None: ask again, the host tier has no room yet,
        or the session is on its way."""
        assert self._host is not None
        assert self._manager is not None
        keeper = self.sessions.keeper if self.sessions else None
        while not self._host.fits(request):
            # requests come before sessions, which can be computed anew
            if keeper is None or not keeper.drop_oldest():
                return None, False
        match = self._manager.start_of(request)
        if match is None:
            return 0, False
        assert self.sessions is not None
        if not match.ready:
            self.sessions.keeper.fetch(match, request.request_id)
            return None, False
        return match.tokens, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """The request starts."""
        assert self._host is not None
        assert self._manager is not None
        self._host.reserve(request)
        if self.sessions is not None:
            self.sessions.start(request, self._manager.start_of(request))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        sessions = self.sessions
        return SessionCommandMetadata(
            sessions.keeper.take_orders() if sessions else SessionCommands()
        )

    def reset_cache(self) -> bool:
        """Sessions of other weights must not be continued."""
        if self.sessions is not None:
            self.sessions.keeper.clear()
        return True

    def update_connector_output(self, connector_output: Any) -> None:
        """Hear the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        if meta is not None and self.sessions is not None:
            self.sessions.keeper.hear(meta.reports)

    def failed_loads(self, connector_output: Any) -> list[Load]:
        """Sessions that could not be loaded on some rank, and for whom."""
        meta = connector_output and connector_output.kv_connector_worker_meta
        return [report.load for report in meta.reports if report.load] if meta else []

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._host is not None
        self._host.release(request)
        if self.sessions is not None:
            self.sessions.end(request)
        return False, None

    # -- metrics ----------------------------------------------------------------

    def get_kv_connector_stats(self) -> PolicyStats | None:
        """What happened since the last call on this side."""
        if self._runtime is not None:
            return PolicyStats.from_worker(
                self._runtime.take_compression_seconds(), self._take_traffic()
            )
        if self._manager is None:
            return None
        freed, compactions = self._manager.freed_blocks, self._manager.compactions
        before, self._reported = self._reported, (freed, compactions)
        pool = self._kv_cache_manager.block_pool
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # 1: null block
        logical = sum(map(len, self._manager.req_to_blocks.values()))
        return PolicyStats.from_scheduler(
            blocks_freed=freed - before[0],
            compressions=compactions - before[1],
            resident_tokens=held * self._manager.block_size,
            logical_tokens=logical * self._manager.block_size,
            host_reserved_bytes=self._host.reserved_bytes if self._host else 0,
            held_requests=len(self._host.held) if self._host else 0,
            **(self.sessions.take_numbers() if self.sessions else NO_SESSIONS),
        )

    def _take_traffic(self) -> dict[str, int]:
        """Tokens selected and fetched since the last call."""
        runtime = self._runtime
        holder = (runtime.retrieval or runtime.zooming) if runtime else None
        if holder is None:
            return {}
        taken = holder.take_traffic()
        return {
            "selected_tokens": taken.selected,
            "fetched_tokens": taken.fetched,
            "failed_indices": taken.failed,
        }

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> PolicyStats:
        return PolicyStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> PolicyPromMetrics:
        return PolicyPromMetrics(*args, **kwargs)
