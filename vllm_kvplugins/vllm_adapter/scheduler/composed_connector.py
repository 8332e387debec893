"""Our KV connector together with the user's.

vLLM's MultiConnector calls both. It cannot express who loads: it takes the first
connector that has tokens, and here the longer prefix wins::

    prefix cache   the tokens in the engine's own blocks
    user's         the prefix cache's, and what it loads after them
    session        all of its tokens, compressed; wins where both are equally long

The user's connector comes first, so that it has saved the blocks of a step before a
compaction rewrites some of them (``wait_for_save``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from vllm.logger import init_logger

from vllm_kvplugins.log_throttle import LogThrottle
from vllm_kvplugins.vllm_adapter.scheduler.connector import (
    KVPolicyConnector,
    SessionCommandMetadata,
)
from vllm_kvplugins.vllm_adapter.scheduler.exact_prefix import exact_prefix_class

if TYPE_CHECKING:
    from vllm_kvplugins.engine.runtime import PolicyRuntime
    from vllm_kvplugins.sessions.commands import Load
    from vllm_kvplugins.sessions.store import SessionStore
    from vllm_kvplugins.vllm_adapter.config.host_memory import HostReservations
    from vllm_kvplugins.vllm_adapter.scheduler.admission_controller import (
        AdmissionController,
    )
    from vllm_kvplugins.vllm_adapter.scheduler.sessions import SchedulerSessions

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")

_THEIRS, _OURS = 0, 1  # order of the connectors
_NAME = KVPolicyConnector.__name__


class ComposedConnector(MultiConnector):
    """The user's connector, which sees exact prefixes, and ours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Tokens that the user's connector will load, by request.
        self._offers: dict[str, int] = {}
        # Requests that wait for an asynchronous load.
        self._arriving: set[str] = set()
        self._failed: WeakSet[Any] = WeakSet()
        # Whether the worker ends a step. Nothing is loaded or saved any more.
        self._ends_step = False
        self._throttle = LogThrottle()

    @classmethod
    def _get_connector_classes_and_configs(
        cls, vllm_config: Any
    ) -> list[tuple[Any, Any]]:
        ((theirs, config),) = super()._get_connector_classes_and_configs(vllm_config)
        return [(exact_prefix_class(theirs), config), (KVPolicyConnector, vllm_config)]

    # -- what the scheduler and the worker call on our connector -----------------------

    @property
    def _ours(self) -> KVPolicyConnector:
        ours = self._connectors[_OURS]
        assert isinstance(ours, KVPolicyConnector)
        return ours

    @property
    def admission(self) -> AdmissionController:
        """Decides how requests start."""
        return self._ours.admission

    @property
    def sessions(self) -> SchedulerSessions | None:
        """None if sessions are off."""
        return self._ours.sessions

    @property
    def host(self) -> HostReservations | None:
        """Reservations of host memory."""
        return self._ours.host

    def seconds_to_expiry(self) -> float | None:
        """Seconds until a session expires; None: none will."""
        return self._ours.seconds_to_expiry()

    def bind_worker(self, runtime: PolicyRuntime, store: SessionStore | None) -> None:
        """Connect our connector to its worker."""
        self._ours.bind_worker(runtime, store)

    def failed_loads(self, worker_meta: Any) -> list[Load]:
        """Loads of sessions that failed on some rank."""
        return self._ours.failed_loads(worker_meta and worker_meta.metadata[_OURS])

    # -- a step in the worker --------------------------------------------------------

    def wait_for_save(self) -> None:
        """End a step: save its blocks, and then compact.

        A policy may run tokens of its own through the model before it compacts. Its
        layers ask ``has_connector_metadata`` whether they load and save.
        """
        self._connectors[_THEIRS].wait_for_save()
        self._ends_step = True
        try:
            self._ours.wait_for_save()
        finally:
            self._ends_step = False

    def has_connector_metadata(self) -> bool:
        """Whether layers load and save, as they do in the forward passes of a step."""
        return not self._ends_step and bool(super().has_connector_metadata())

    # -- a request starts ----------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the longer of the user's connector and a session."""
        request_id = request.request_id
        self._offers.pop(request_id, None)
        self._arriving.discard(request_id)
        self._requests_to_connector[request_id] = _OURS
        offered, is_async = 0, False
        if self.admission.may_load(request) and request not in self._failed:
            theirs = self._connectors[_THEIRS]
            found, is_async = theirs.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            if found is None:
                return None, False
            offered = found
        end = num_computed_tokens + offered
        counted = self.admission.load(request, num_computed_tokens, end)
        if not counted:
            return self._ours.get_num_new_matched_tokens(request, num_computed_tokens)
        self._requests_to_connector[request_id] = _THEIRS
        self._offers[request_id] = offered
        if is_async:
            self._arriving.add(request_id)
        return counted - num_computed_tokens, is_async

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Start a request, which has its blocks.

        The user's connector loads all that it offered, so that it need not know that
        the policy computes the last of these tokens again.
        """
        request_id = request.request_id
        theirs = self._connectors[_THEIRS]
        if request_id in self._arriving and not num_external_tokens:
            # vLLM's second call, after an asynchronous load.
            self._arriving.discard(request_id)
            theirs.update_state_after_alloc(request, blocks, 0)
            return
        offered = self._offers.pop(request_id, 0)
        theirs.update_state_after_alloc(request, blocks, offered)
        self._ours.update_state_after_alloc(
            request, blocks, 0 if offered else num_external_tokens
        )

    def loads_failed(self, requests: Any) -> None:
        """The user's connector could not load these requests; do not ask it again."""
        for request in requests:
            self._failed.add(request)
            text = self._throttle.format(
                "a KV connector failed to load tokens; they are computed"
            )
            if text:
                logger.warning("request %s: %s", request.request_id, text)

    # -- a request ends --------------------------------------------------------------

    def request_finished(
        self, request: Any, blocks: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request.request_id)
        result: tuple[bool, dict[str, Any] | None]
        result = super().request_finished(request, blocks)
        return result

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._forget(request.request_id)
        result: tuple[bool, dict[str, Any] | None]
        result = super().request_finished_all_groups(request, block_ids)
        return result

    def _forget(self, request_id: str) -> None:
        self._offers.pop(request_id, None)
        self._arriving.discard(request_id)

    # -- statistics --------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Rebuild statistics that were sent between processes.

        vLLM finds classes by registered name. Ours has none, and neither has a
        connector with a module path, whose statistics are left out.
        """
        stats = MultiKVConnectorStats()
        for name, each in (data or {}).items():
            if isinstance(each, KVConnectorStats):
                stats[name] = each
            elif name == _NAME:
                stats[name] = KVPolicyConnector.build_kv_connector_stats(each)
            else:
                with contextlib.suppress(ValueError):
                    rebuilt = super().build_kv_connector_stats({name: each})
                    stats.data.update(rebuilt.data)
        return stats

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> KVConnectorPromMetrics:
        return _KnownMetrics(super().build_prom_metrics(*args, **kwargs))


class _KnownMetrics(KVConnectorPromMetrics):
    """Metrics of the connectors that have some.

    Args:
        metrics: vLLM's, which fail on statistics of a connector without metrics.
    """

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        known = {
            name: each
            for name, each in transfer_stats_data.items()
            if name in self._metrics._prom_metrics
        }
        self._metrics.observe(known, engine_idx)


def our_metadata(metadata: Any) -> SessionCommandMetadata | None:
    """The metadata of our connector in that of a step."""
    if isinstance(metadata, MultiKVConnectorMetadata):
        metadata = metadata.metadata[_OURS]
    assert metadata is None or isinstance(metadata, SessionCommandMetadata)
    return metadata
