"""The list of policies: one line each."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING

from vllm_kvplugins.errors import KVPolicyError

if TYPE_CHECKING:
    from vllm_kvplugins.policies.base import KVCachePolicy

# name on the command line -> "module:class"; modules are imported on first use.
_POLICIES: dict[str, str] = {
    "expected-attention": (
        "vllm_kvplugins.policies.expected_attention:ExpectedAttention"
    ),
    "h2o": "vllm_kvplugins.policies.h2o:H2O",
    "full": "vllm_kvplugins.policies.full:FullKV",
    "streaming-llm": "vllm_kvplugins.policies.streaming_llm:StreamingLLM",
    "snapkv": "vllm_kvplugins.policies.snapkv:SnapKV",
    "random": "vllm_kvplugins.policies.random:Random",
    "knorm": "vllm_kvplugins.policies.knorm:Knorm",
    "keydiff": "vllm_kvplugins.policies.keydiff:KeyDiff",
    "tova": "vllm_kvplugins.policies.tova:TOVA",
    "chunkkv": "vllm_kvplugins.policies.chunkkv:ChunkKV",
    "pyramidkv": "vllm_kvplugins.policies.pyramidkv:PyramidKV",
    "protokv": "vllm_kvplugins.policies.protokv:ProtoKV",
    "exact-topk": "vllm_kvplugins.policies.exact_topk:ExactTopK",
    "quest": "vllm_kvplugins.policies.quest:Quest",
    "arkvale": "vllm_kvplugins.policies.arkvale:ArkVale",
    "pqcache": "vllm_kvplugins.policies.pqcache:PQCache",
    "icecache": "vllm_kvplugins.policies.icecache:IceCache",
    "flowkv": "vllm_kvplugins.policies.flowkv:FlowKV",
    "epicache": "vllm_kvplugins.policies.epicache:EpiCache",
    "sekv": "vllm_kvplugins.policies.sekv:SeKV",
    "kvzip": "vllm_kvplugins.policies.kvzip:KVzip",
    "infinipot": "vllm_kvplugins.policies.infinipot:InfiniPot",
}


def available_policies() -> tuple[str, ...]:
    """Names that ``--kv-policy`` accepts, in alphabetical order."""
    return tuple(sorted(_POLICIES))


def register_policy(name: str, path: str) -> None:
    """Add a policy from outside this package, before the engine starts.

    Args:
        name: what the user writes after ``--kv-policy``.
        path: ``"package.module:Class"``; imported in every vLLM process, so it
            must be importable there (call this from a ``vllm.general_plugins``
            entry point of your own).

    Raises:
        KVPolicyError: the name is taken by another class, or the path is not
            of the form ``module:Class``.
    """
    if path.count(":") != 1:
        raise KVPolicyError(f"policy path must be 'module:Class', got {path!r}")
    if _POLICIES.get(name, path) != path:
        raise KVPolicyError(f"policy name {name!r} is taken by {_POLICIES[name]}")
    _POLICIES[name] = path


def get_policy_class(name: str) -> type[KVCachePolicy]:
    """The class behind a policy name.

    Raises:
        KVPolicyError: no such policy; the message names the nearest ones.
    """
    if name not in _POLICIES:
        near = difflib.get_close_matches(str(name), _POLICIES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KVPolicyError(
            f"unknown KV policy {name!r}.{hint} "
            f"Available: {', '.join(available_policies())}."
        )
    module, _, attribute = _POLICIES[name].partition(":")
    cls: type[KVCachePolicy] = getattr(import_module(module), attribute)
    return cls
