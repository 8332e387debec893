"""Everything that one worker shares with its attention layers and its connector.

vLLM builds the parts of a worker in this order (0.32 and 0.33, both model runners)::

    worker.__init__            WorkerContext.create: runtime, backend
                               vLLM's own __init__ sets the rank: open_sessions
    init_device                the model runner exists: ``runner``
    load_model                 bind_layers: each layer's impl gets the context
    metadata builders          register_heap_binding, from the layers' context
    (graph measuring)          a small cache, thrown away; then new builders
    initialize_from_config     the worker hands its runtime to its KV connector
    first step                 ensure_heap: the caches exist now

No module holds a context. vLLM passes a metadata builder only the configuration and the
names of its layers, so builders read the context from these layers
(:func:`context_of_layers`). vLLM offers no way from the connector to the worker, so the
worker calls the connector (``KVPolicyConnector.bind_worker``). Two engines in one
process therefore share nothing but vLLM's own registries: the attention backend and
the process-wide connector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.config import parse_sessions
from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.runtime import PolicyRuntime
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.sessions.store import SessionStore
from vllm_kvplugins.sessions.transfer import Transfer
from vllm_kvplugins.vllm_adapter.config import compat, kernel_choice
from vllm_kvplugins.vllm_adapter.config.engine_config import (
    geometry_of,
    policy_of,
    request_of,
)
from vllm_kvplugins.vllm_adapter.scheduler import session_config
from vllm_kvplugins.vllm_adapter.worker.surprisal import LogitsSurprisal

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Attribute of a layer's impl.
_ATTRIBUTE = "kv_policy_context"


@dataclass(slots=True)
class WorkerContext:
    """State of one worker.

    Attributes:
        runtime: follows requests and compacts them.
        session_store: the worker's sessions; None if sessions are off.
        draft_layers: names of the layers of a drafter, in the order of their caches.
        draft_heap: makes the heap of these layers, once their caches exist; None
            before their metadata builder exists.
    """

    runtime: PolicyRuntime
    session_store: SessionStore | None = None
    draft_layers: tuple[str, ...] = ()
    draft_heap: Callable[[], Heap] | None = field(default=None, repr=False)
    _runner: compat.RunnerV1 | compat.RunnerV2 | None = None
    _surprisal: LogitsSurprisal | None = None
    _bind_heap: Callable[[], None] | None = field(default=None, repr=False)

    @classmethod
    def create(cls, vllm_config: VllmConfig) -> WorkerContext:
        """The context of a new worker; makes its process build layers on our backend.

        Raises:
            KVPolicyError: the configuration has no policy.
        """
        policy, request = policy_of(vllm_config), request_of(vllm_config)
        if policy is None:
            raise KVPolicyError(
                coded(
                    "KVP009",
                    "the worker of vllm_kvplugins was started without a KV policy; use "
                    "--kv-policy instead of --worker-cls",
                )
            )
        assert isinstance(request, dict), "finish_config has not run"
        kernel_choice.register(request)
        compat.forget_previous_engine()
        sessions = bool(parse_sessions(request).sessions)
        return cls(PolicyRuntime(policy, geometry_of(vllm_config), sessions))

    def open_sessions(self, vllm_config: VllmConfig) -> None:
        """Open the worker's session store, if sessions are on.

        Call when the configuration has the worker's rank: each rank has its own files.
        """
        settings = parse_sessions(request_of(vllm_config))
        if not settings.sessions:
            return
        self.session_store = SessionStore(
            Transfer(self.runtime, settings.session_dtype),
            session_config.session_files(vllm_config),
            vllm_config.parallel_config.rank,
            # One connection to an object store is slower than a disk.
            num_readers=1 if settings.session_url is None else 4,
            num_writers=1 if settings.session_url is None else 2,
        )

    @property
    def runner(self) -> compat.RunnerV1 | compat.RunnerV2:
        """The adapter around the worker's model runner."""
        assert self._runner is not None, "the model runner does not exist yet"
        return self._runner

    @runner.setter
    def runner(self, adapter: compat.RunnerV1 | compat.RunnerV2) -> None:
        self._runner = adapter

    def bind_layers(self, layers: Iterable[Any]) -> None:
        """Make the context reachable from attention layers."""
        for layer in layers:
            if hasattr(layer, "impl"):
                setattr(layer.impl, _ATTRIBUTE, self)

    def register_heap_binding(self, bind_heap: Callable[[], None]) -> None:
        """Register the callback that binds the heap; drop the current binding.

        vLLM builds a small cache to measure CUDA graphs, throws it away, and builds
        its metadata builders again for the real one.
        """
        self.runtime.unbind_heap()
        self._close_surprisal()
        self._bind_heap = bind_heap

    def ensure_heap(self) -> None:
        """Bind the heap, unless it is bound. Call it when the caches exist."""
        if self.runtime.heap is None:
            assert self._bind_heap is not None, "there is no attention backend yet"
            self._bind_heap()

    def new_surprisal_model(self, model: Any) -> LogitsSurprisal:
        """Hook into a model; the hook stays until the heap binding is dropped."""
        self._close_surprisal()
        self._surprisal = LogitsSurprisal(model)
        return self._surprisal

    def _close_surprisal(self) -> None:
        if self._surprisal is not None:
            self._surprisal.close()
        self._surprisal = None


def context_of_layers(layers: Iterable[Any]) -> WorkerContext:
    """The context that ``bind_layers`` gave to these layers."""
    for layer in layers:
        context = getattr(getattr(layer, "impl", None), _ATTRIBUTE, None)
        if context is not None:
            assert isinstance(context, WorkerContext)
            return context
    raise AssertionError("no layer has a worker context; load_model has not run")


def restore_stock_backend() -> None:
    """Let this process build the layers of its next engine on the stock backend.

    Does nothing if no worker of ours was built here.
    """
    if kernel_choice.is_registered():
        kernel_choice.unregister()
        compat.forget_previous_engine()
