"""The systems that a comparison can serve with: stock vLLM, policies, alternatives.

A system is a mapping, as ``--policies`` gives it. ``{}`` is stock vLLM; ``name`` is
``stock``, an alternative of vLLM below, or a policy of ours. ``pool_tokens`` overrides
the size of the pool, to compare systems at equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from _serving_rows import STOCK, Pool

System = Mapping[str, Any]
GIB = 1 << 30
_ELEMENT_BYTES = {"float32": 4, "float": 4}  # others have 2


@dataclass(frozen=True, slots=True)
class Alternative:
    """A way of vLLM's own to save device memory.

    Attributes:
        about: what it does, for the report.
        arguments: of ``vllm serve``; {gib} is the size of the host memory.
        environment: of the server, in the same form.
        host: whether it takes ``gib`` of host memory.
        element_bytes: bytes of a number in the cache; 0: as without it.
        module: a package that it needs; "" = none.
    """

    about: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    host: bool = False
    element_bytes: int = 0
    module: str = ""


ALTERNATIVES = {
    "offload": Alternative(
        "prefix caching with vLLM's own offloading to host memory",
        ("--kv-offloading-backend", "native", "--kv-offloading-size", "{gib}"),
        host=True,
    ),
    "lmcache": Alternative(
        "prefix caching with LMCache in host memory",
        # Not --kv-offloading-backend lmcache: that needs a server of LMCache's own.
        (
            "--kv-transfer-config",
            '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',
        ),
        (("LMCACHE_LOCAL_CPU", "True"), ("LMCACHE_MAX_LOCAL_CPU_SIZE", "{gib}")),
        host=True,
        module="lmcache",
    ),
    "fp8": Alternative(
        "keys and values of 8 bits", ("--kv-cache-dtype", "fp8"), element_bytes=1
    ),
}


def alternative_of(system: System) -> Alternative | None:
    """The alternative that a system names; None for stock vLLM and policies."""
    return ALTERNATIVES.get(str(system.get("name")))


def policy_settings(system: System) -> dict[str, Any]:
    """A system's policy with its settings; empty for stock vLLM and alternatives."""
    if not system or system.get("name") == STOCK or alternative_of(system):
        return {}
    return {key: value for key, value in system.items() if key != "pool_tokens"}


def problem_of(system: System) -> str:
    """What is wrong with the settings of stock vLLM or an alternative; "" = nothing."""
    alternative = alternative_of(system)
    if system and system.get("name") != STOCK and alternative is None:
        return ""
    known = {"name", "pool_tokens"} | (
        {"gib"} if alternative and alternative.host else set()
    )
    unknown = sorted(set(system) - known)
    name = system.get("name", STOCK)
    if unknown:
        return (
            f"{name} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    for key in known - {"name"}:
        value = system.get(key, 1)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            return f"{name}: {key} must be a positive number, not {value!r}"
    return ""


def missing_of(system: System) -> str:
    """Why a system cannot run here, as known before it starts; "" = it may run."""
    alternative = alternative_of(system)
    if alternative and alternative.module and find_spec(alternative.module) is None:
        return f"the package {alternative.module} is not installed"
    return ""


def element_bytes(system: System, pool: Pool) -> int:
    """Bytes of one number in the cache of a system."""
    alternative = alternative_of(system)
    plain = _ELEMENT_BYTES.get(pool.dtype, 2)
    return (alternative and alternative.element_bytes) or plain


def pool_of(system: System, pool: Pool) -> Pool:
    """The pool of a system: as many bytes as the others', unless it names a size."""
    tokens = system.get("pool_tokens")
    if tokens is None:
        scale = element_bytes({}, pool) // element_bytes(system, pool)
        tokens = pool.pool_tokens * scale
    return replace(pool, pool_tokens=int(tokens))


def host_bytes(system: System) -> int:
    """Host memory that an alternative reserves at start-up."""
    alternative = alternative_of(system)
    return int(system.get("gib", 1) * GIB) if alternative and alternative.host else 0


def server_arguments(system: System, pool: Pool, seed: int) -> list[str]:
    """Arguments of ``vllm serve`` for a system."""
    arguments = pool_of(system, pool).arguments(seed)
    alternative, policy = alternative_of(system), policy_settings(system)
    if alternative:
        size = str(system.get("gib", 1))
        arguments += [each.replace("{gib}", size) for each in alternative.arguments]
    if policy:
        arguments += ["--kv-policy", str(policy.pop("name"))]
        arguments += ["--kv-policy-config", json.dumps(policy)] if policy else []
    return arguments


def server_environment(system: System) -> dict[str, str]:
    """Environment variables of a system's server."""
    alternative, size = alternative_of(system), str(system.get("gib", 1))
    pairs = alternative.environment if alternative else ()
    return {name: value.replace("{gib}", size) for name, value in pairs}
