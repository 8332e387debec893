"""Test settings for every registered policy, including future ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.registry import available_policies, get_policy_class

# budgets that prompts of a few hundred tokens exceed
SMALL_BUDGETS = {
    "budget": 96,
    "window": 16,
    "decode_budget": 64,
    "fold_blocks": 1,
    "chunk_size": 16,
}


def drop(policy: KVCachePolicy) -> bool:
    """Tokens that are not resident are gone."""
    return policy.host_storage is None


def retrieve(policy: KVCachePolicy) -> bool:
    """Tokens that are not resident are fetched from host memory."""
    return policy.retrieval is not None


def keep_spans(policy: KVCachePolicy) -> bool:
    """Tokens that are not resident are reconstructed from spans."""
    return policy.spans is not None


def policies_that(do: Callable[[KVCachePolicy], bool]) -> tuple[str, ...]:
    """Names of the policies that do this with tokens that are not resident."""
    return tuple(n for n in available_policies() if do(get_policy_class(n)()))


def configure(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """A policy with those of the wanted settings that it has."""
    fields = get_policy_class(name).model_fields
    found = {"name": name} | {k: v for k, v in wanted.items() if k in fields}
    if not folds(name):
        found.pop("decode_budget", None)
    if wants_history(name):
        # histories grow, so that a share of them is no budget
        base = {"sinks": 2, "recent": 1}
        found |= {"budget": 8, "prefill_block": 8, "base_config": base}
        found["longest_patched_prompt"] = 64
    return found


@functools.cache
def wants_history(name: str) -> bool:
    """Whether a policy compresses only what a request calls its history."""
    turns = get_policy_class(name)().turns
    return turns is not None and turns.history_only


def shares_pages(name: str) -> bool:
    """Whether a policy has an allocator to choose."""
    return "allocator" in get_policy_class(name).model_fields


@functools.cache
def folds(name: str) -> bool:
    """Whether a policy compacts while generating; some refuse ``decode_budget``."""
    cls = get_policy_class(name)
    if "decode_budget" not in cls.model_fields:
        return False
    return not cls.model_validate({"decode_budget": 4096}).problems()


def write_weights(path: Path, layers: int, kv_heads: int) -> dict[str, str]:
    """The allocator ``file``; its heads differ by a factor of 10 and more."""
    weights = [
        [1.0 + 10 * (head + 1) * (layer % 2) + layer for head in range(kv_heads)]
        for layer in range(layers)
    ]
    path.write_text(json.dumps({"head_weights": weights}))
    return {"name": "file", "path": str(path)}
