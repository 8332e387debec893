"""Which profile the layers' budgets follow, settled once for all processes."""

from __future__ import annotations

import logging
from typing import Any

from vllm_kvplugins.budgets.base import LoadFingerprint
from vllm_kvplugins.policies.base import KVCachePolicy

logger = logging.getLogger("vllm.kv_policy")


def settled(
    request: dict[str, Any], policy: KVCachePolicy, model: LoadFingerprint
) -> dict[str, Any]:
    """The policy's settings with what its allocator left open, so that all processes
    know the same."""
    allocator = policy.page_allocator()
    found, said = allocator.settled(model)
    if said is not None:
        logger.info("KV policy %s: %s", policy.name, said)
    if found == allocator:
        return request
    options = {"name": found.name, **found.model_dump(mode="json")}
    return policy.with_allocator(request, options)
