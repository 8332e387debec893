"""Admission to the host tier: requests wait until what they may offload fits."""

from __future__ import annotations

from typing import Any

from vllm_kvplugins.policies.base import Geometry, KVCachePolicy, Retention
from vllm_kvplugins.residency.host_tier import default_limit_bytes

_MIB = 1 << 20


def limited(request: dict[str, Any], policy: KVCachePolicy) -> dict[str, Any]:
    """The policy's settings with a limit, so that all processes know the same."""
    if policy.retention is Retention.DROP or policy.host_memory_bytes:
        return request
    return request | {"host_memory": default_limit_bytes()}


class HostReservations:
    """Host memory that running requests may come to need, on the scheduler's side.

    A request reserves its worst case, prompt and longest answer, when it is first
    scheduled, and gives it back when it ends. So the host tier never overflows,
    and a request never stops half-way for want of memory.
    """

    def __init__(self, policy: KVCachePolicy, geometry: Geometry) -> None:
        self._policy = policy
        self._geometry = geometry
        self._reserved: dict[str, int] = {}
        # of sessions, whose tokens stay on the host between requests
        self._held: dict[str, int] = {}
        # requests that wait now, and have been told so
        self.held: set[str] = set()

    def fits(self, request: Any) -> bool:
        """Whether a request can be scheduled now. Changes nothing but ``held``."""
        limit = self._policy.host_memory_bytes
        if limit is None or request.request_id in self._reserved:
            return True
        # Alone a request always runs; the front end refuses what never fits.
        alone = not self._reserved and not self._held
        fits = alone or self.reserved_bytes + self._need(request) <= limit
        if fits:
            self.held.discard(request.request_id)
        else:
            self.held.add(request.request_id)
        return fits

    def reserve(self, request: Any) -> None:
        """A request was scheduled for the first time, or again."""
        if self._policy.host_memory_bytes is not None:
            self._reserved.setdefault(request.request_id, self._need(request))

    def release(self, request: Any) -> None:
        """A request has ended, scheduled or not."""
        self._reserved.pop(request.request_id, None)
        self.held.discard(request.request_id)

    def hold(self, session_id: str, num_bytes: int) -> None:
        """A session keeps so much on the host."""
        self._held[session_id] = num_bytes

    def let_go(self, session_id: str) -> None:
        """A session has gone, or is a request again."""
        self._held.pop(session_id, None)

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values()) + sum(self._held.values())

    def _need(self, request: Any) -> int:
        tokens = request.num_prompt_tokens + request.max_tokens
        return self._policy.host_bytes(tokens, self._geometry)


def too_long(policy: KVCachePolicy, geometry: Geometry, tokens: int) -> str | None:
    """Why a request of so many tokens can never run, if so."""
    limit = policy.host_memory_bytes
    need = policy.host_bytes(tokens, geometry)
    if limit is None or need <= limit:
        return None
    return (
        f"prompt and answer of up to {tokens} tokens may need {need / _MIB:.1f} MiB of "
        f"host memory, and KV policy {policy.name!r} has {limit / _MIB:.1f} MiB; lower "
        "max_tokens, or raise host_memory in --kv-policy-config"
    )
