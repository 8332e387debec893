"""Settings for whatever policies the registry holds, now or later."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from vllm_kvplugins.policies.base import Retention
from vllm_kvplugins.policies.registry import available_policies, get_policy_class

# budgets that prompts of a few hundred tokens exceed
SMALL_BUDGETS = {
    "budget": 96,
    "window": 16,
    "decode_budget": 64,
    "fold_blocks": 1,
    "chunk_size": 16,
}


def policies_that(retention: Retention) -> tuple[str, ...]:
    """Names of the policies that do this with what is not resident."""
    names = available_policies()
    return tuple(n for n in names if get_policy_class(n).retention is retention)


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
    return get_policy_class(name)().wants_history


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
