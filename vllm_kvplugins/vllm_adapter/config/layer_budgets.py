"""Resolves the allocator of page budgets once, for all processes."""

from __future__ import annotations

import logging
from typing import Any

from vllm_kvplugins.budgets.base import LoadFingerprint
from vllm_kvplugins.errors import codes_in
from vllm_kvplugins.policies.base import KVCachePolicy

logger = logging.getLogger("vllm.kv_policy")


def resolve_allocator(
    request: dict[str, Any],
    policy: KVCachePolicy,
    load_fingerprint: LoadFingerprint,
    one_machine: bool = True,
) -> dict[str, Any]:
    """Set what the policy's allocator leaves open, such as the model's profile.

    Args:
        request: the policy's settings, with its name.
        load_fingerprint: describes the model; called only if the allocator needs it.
        one_machine: False if the engine runs on several nodes.

    Returns:
        The settings; unchanged if the allocator leaves nothing open.
    """
    allocator = policy.page_allocator()
    resolved, notes = allocator.resolve(load_fingerprint, one_machine)
    for note in notes:
        level = logging.WARNING if codes_in(note) else logging.INFO
        logger.log(level, "KV policy %s: %s", policy.name, note)
    if resolved == allocator:
        return request
    options = {"name": resolved.name, **resolved.model_dump(mode="json")}
    return policy.with_allocator(request, options)
