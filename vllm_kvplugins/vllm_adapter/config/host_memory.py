"""The host tier: whether a GPU can read it, and which requests fit in it."""

from __future__ import annotations

from typing import Any

import torch

from vllm_kvplugins.engine.retrieval.host_tier import default_limit_bytes
from vllm_kvplugins.engine.retrieval.pinned import CHUNK_BYTES, PinnedArena
from vllm_kvplugins.errors import coded
from vllm_kvplugins.ops.host_fetch import direct_problem
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy

_MIB = 1 << 20


def measured(policy: KVCachePolicy) -> dict[str, int]:
    """The default host-memory limit, measured once so that all processes agree."""
    storage = policy.host_storage
    if storage is None or storage.host_memory_bytes:
        return {}
    return {"host_memory": default_limit_bytes()}


def _is_read_directly(policy: KVCachePolicy) -> bool:
    """Whether a GPU reads host memory itself."""
    retrieval = policy.retrieval
    return retrieval is not None and (
        retrieval.host_fetch == "direct" or retrieval.device_selection is not None
    )


def _reason_to_read(policy: KVCachePolicy) -> tuple[str, str]:
    """The setting that lets a GPU read host memory, and what to set instead."""
    assert policy.retrieval is not None
    selection = policy.retrieval.device_selection
    if selection is not None:
        return selection.setting, selection.instead
    return "host_fetch 'direct'", "host_fetch 'staged'"


def fetch_problems(policy: KVCachePolicy) -> list[str]:
    """Reasons why ``host_fetch`` cannot work, as far as the front end can tell."""
    from vllm.platforms import current_platform

    if not _is_read_directly(policy):
        return []
    if current_platform.is_cpu():
        if policy.retrieval is None or policy.retrieval.host_fetch != "direct":
            return []  # a CPU that selects for itself reads its own memory
        return [
            coded(
                "KVP033",
                "host_fetch 'direct' needs a GPU that reads host memory; on a CPU use "
                "'staged'",
            )
        ]
    problem = direct_problem(torch.device("cuda"))
    if problem is None:
        return []
    reads, instead = _reason_to_read(policy)
    return [
        coded(
            "KVP033",
            f"{reads} needs this package's CUDA kernels ({problem}); build them "
            "(KVP_CUDA=ON pip install --no-build-isolation . in the source tree) or "
            f"set {instead}",
        )
    ]


def pinning_problems(policy: KVCachePolicy, device: torch.device) -> list[str]:
    """Reasons why this process cannot pin host memory, if the policy needs it.

    Pins one chunk to find out: the limits differ between machines.
    """
    if not _is_read_directly(policy) or device.type == "cpu":
        return []
    reads, instead = _reason_to_read(policy)
    try:
        PinnedArena(CHUNK_BYTES, device).close()
    except RuntimeError as error:
        return [
            coded(
                "KVP033",
                f"{reads} needs pinned host memory: {error}; free some memory, allow "
                f"this process to lock it (ulimit -l) or set {instead}",
            )
        ]
    return []


def reserved_device_bytes(policy: KVCachePolicy, geometry: Geometry) -> int:
    """Device memory outside vLLM's pool that this rank sets aside at start-up."""
    if policy.retrieval is None:
        return 0
    total = policy.retrieval.reserved_device_bytes(geometry)
    return int(total * geometry.rank_share)


class HostReservations:
    """Reservations of host memory, on the scheduler's side.

    A request reserves its worst case, prompt plus longest answer, when it is first
    scheduled, and releases it when it ends. The host tier therefore never overflows,
    and no request stops half-way.
    """

    def __init__(self, policy: KVCachePolicy, geometry: Geometry) -> None:
        self._storage = policy.host_storage
        self._geometry = geometry
        self._reserved: dict[str, int] = {}
        # Sessions keep their tokens on the host between requests.
        self._session_bytes: dict[str, int] = {}
        # IDs of the requests that wait for host memory now.
        self.waiting: set[str] = set()

    def fits(self, request: Any, taken: str | None = None) -> bool:
        """Whether a request can be scheduled now. Changes only ``waiting``.

        Args:
            taken: ID of the session that moves into the request, if any.
        """
        limit = self._limit
        if limit is None or request.request_id in self._reserved:
            return True
        # Alone a request always runs; the front end refuses what never fits.
        alone = not self._reserved and not set(self._session_bytes) - {taken}
        others = self.reserved_bytes
        if taken is not None:
            others -= self._session_bytes.get(taken, 0)
        fits = alone or others + self._need(request) <= limit
        if fits:
            self.waiting.discard(request.request_id)
        else:
            self.waiting.add(request.request_id)
        return fits

    def reserve(self, request: Any) -> None:
        """A request was scheduled for the first time, or again."""
        if self._limit is not None:
            self._reserved.setdefault(request.request_id, self._need(request))

    def release(self, request: Any) -> None:
        """A request has ended, scheduled or not."""
        self._reserved.pop(request.request_id, None)
        self.waiting.discard(request.request_id)

    def reserved_by(self, request: Any) -> int:
        """Bytes that a request has reserved."""
        return self._reserved.get(request.request_id, 0)

    def hold_session(self, session_id: str, num_bytes: int) -> None:
        """A session keeps ``num_bytes`` of host memory."""
        self._session_bytes[session_id] = num_bytes

    def release_session(self, session_id: str) -> None:
        """A session was dropped, or a request continues it."""
        self._session_bytes.pop(session_id, None)

    @property
    def request_bytes(self) -> int:
        """Bytes that live requests have reserved."""
        return sum(self._reserved.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes that requests have reserved, and those of sessions in the host tier."""
        return self.request_bytes + sum(self._session_bytes.values())

    @property
    def _limit(self) -> int | None:
        return self._storage.host_memory_bytes if self._storage else None

    def _need(self, request: Any) -> int:
        assert self._storage is not None
        tokens = request.num_prompt_tokens + request.max_tokens
        return self._storage.host_bytes(tokens, self._geometry)


def host_limit_problem(
    policy: KVCachePolicy, geometry: Geometry, tokens: int
) -> str | None:
    """Why a request of ``tokens`` tokens never fits in host memory; None if it fits."""
    storage = policy.host_storage
    if storage is None:
        return None
    limit, need = storage.host_memory_bytes, storage.host_bytes(tokens, geometry)
    if limit is None or need <= limit:
        return None
    return coded(
        "KVP501",
        f"prompt and answer of up to {tokens} tokens may need {need / _MIB:.1f} MiB of "
        f"host memory, and KV policy {policy.name!r} has {limit / _MIB:.1f} MiB; lower "
        "max_tokens, or raise host_memory in --kv-policy-config",
    )
