"""Test settings for every registered policy, including future ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_kvplugins.budgets import HeadSplit
from vllm_kvplugins.budgets.head_profile import (
    HeadProfile,
    RepeatedDocument,
    write_head_profile,
)
from vllm_kvplugins.model_config import read_model_config
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

# for prompts of some tens of tokens and budgets of a few pages of four tokens
# A policy of each kind: it looks at the last queries, at all queries, at keys, asks
# twice, keeps turns, keeps episodes, and smooths votes. The others differ in scores.
EACH_KIND = ("snapkv", "h2o", "keydiff", "kvzip", "flowkv", "epicache", "protokv")

TINY = {
    "window": 3,
    "sinks": 2,
    "recent": 1,
    "chunk_size": 4,
    "hash_bits": 1,
    "future": 16,
}


def drop(policy: KVCachePolicy) -> bool:
    """Tokens that are not resident are lost."""
    return policy.host_storage is None


def retrieve(policy: KVCachePolicy) -> bool:
    """Tokens that are not resident are fetched from host memory."""
    return policy.retrieval is not None


def only_fetch(policy: KVCachePolicy) -> bool:
    """Queries attend to tokens, and to nothing that stands for others."""
    return policy.retrieval is not None and policy.retrieval.chunk_means is None


def keep_spans(policy: KVCachePolicy) -> bool:
    """Tokens that are not resident are reconstructed from spans."""
    return policy.spans is not None


def policies_that(do: Callable[[KVCachePolicy], bool]) -> tuple[str, ...]:
    """Names of the policies that treat tokens that are not resident in this way."""
    return tuple(n for n in available_policies() if do(get_policy_class(n)()))


def configure(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The policy's configuration with those of the settings that it supports."""
    fields = get_policy_class(name).model_fields
    chosen = {"name": name} | {k: v for k, v in settings.items() if k in fields}
    if not folds(name):
        chosen.pop("decode_budget", None)
    if needs_profile(name):
        chosen.setdefault("allocator", "cross-layer")
    if wants_history(name):
        # histories grow, so that a share of them is not a fixed budget
        base = {"sinks": 2, "recent": 1}
        chosen |= {"budget": 8, "prefill_block": 8, "base_config": base}
        chosen["longest_patched_prompt"] = 64
    return chosen


@functools.cache
def wants_history(name: str) -> bool:
    """Whether a policy compresses only the history of a conversation."""
    turns = get_policy_class(name)().turns
    return turns is not None and turns.history_only


@functools.cache
def has_turns(name: str) -> bool:
    """Whether a policy reads where turns of a conversation end."""
    return get_policy_class(name)().turns is not None


def shares_pages(name: str) -> bool:
    """Whether the policy has a setting ``allocator``."""
    return "allocator" in get_policy_class(name).model_fields


@functools.cache
def needs_profile(name: str) -> bool:
    """Whether the policy's default allocator needs a profile of the model."""
    allocator = get_policy_class(name)().page_allocator()
    return allocator.name == HeadSplit.name


@functools.cache
def folds(name: str) -> bool:
    """Whether a policy compacts during decoding; some refuse ``decode_budget``."""
    cls = get_policy_class(name)
    if "decode_budget" not in cls.model_fields:
        return False
    return not cls.model_validate({"decode_budget": 4096}).problems()


def write_weights(path: Path, layers: int, kv_heads: int) -> dict[str, str]:
    """The allocator ``file`` with head budgets that differ tenfold and more."""
    weights = [
        [1.0 + 10 * (head + 1) * (layer % 2) + layer for head in range(kv_heads)]
        for layer in range(layers)
    ]
    path.write_text(json.dumps({"head_weights": weights}))
    return {"name": "file", "path": str(path)}


def write_heads(path: Path, model: Path) -> dict[str, str]:
    """The allocator ``head-split`` with a profile of a model; last heads come first."""
    fingerprint = read_model_config(str(model), "float32").fingerprint()
    layers, heads = fingerprint.num_layers, fingerprint.num_kv_heads
    read = RepeatedDocument(name="a.txt", tokens=100, sha256="0" * 64)
    profile = HeadProfile(
        plugin="0",
        model=model.name,
        fingerprint=fingerprint,
        dtype="float32",
        documents=(read,),
        scores=tuple(
            tuple((layer * heads + head) / (layers * heads) for head in range(heads))
            for layer in range(layers)
        ),
    )
    write_head_profile(profile, path)
    return {"name": "head-split", "profile": str(path)}
