"""The list of policies: one line each, and those of other packages."""

from __future__ import annotations

import difflib
import functools
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from vllm_kvplugins.errors import KVPolicyError

if TYPE_CHECKING:
    from vllm_kvplugins.policies.base import KVCachePolicy

# Where other packages list theirs, as "name = module:Class".
ENTRY_POINTS = "vllm_kvplugins.policies"

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


@functools.cache
def _of_other_packages() -> dict[str, str]:
    """Policies of installed packages; a name of ours stays ours."""
    found = entry_points(group=ENTRY_POINTS)
    return {entry.name: entry.value for entry in found if entry.name not in _POLICIES}


def _all() -> dict[str, str]:
    return _of_other_packages() | _POLICIES


def available_policies() -> tuple[str, ...]:
    """Names that ``--kv-policy`` accepts, in alphabetical order."""
    return tuple(sorted(_all()))


def outside_policies() -> dict[str, str]:
    """Those of other packages: name to ``"module:Class"``, not loaded yet."""
    return dict(sorted(_of_other_packages().items()))


def register_policy(name: str, path: str) -> None:
    """Add a policy in this process alone, before the engine starts.

    For scripts and tests. A package lists its policies in its metadata, in the entry
    points ``vllm_kvplugins.policies``, from which every process has them.

    Args:
        name: what the user writes after ``--kv-policy``.
        path: ``"package.module:Class"``; imported in every vLLM process, so it
            must be importable and registered there too.

    Raises:
        KVPolicyError: the name is taken by another class, or the path is not
            of the form ``module:Class``.
    """
    if path.count(":") != 1:
        raise KVPolicyError(f"policy path must be 'module:Class', got {path!r}")
    taken = _all().get(name, path)
    if taken != path:
        raise KVPolicyError(f"policy name {name!r} is taken by {taken}")
    _POLICIES[name] = path


def get_policy_class(name: str) -> type[KVCachePolicy]:
    """The class behind a policy name.

    Raises:
        KVPolicyError: no such policy (the message names the nearest one), or it
            cannot be loaded, or is no policy of this name.
    """
    path = _all().get(name)
    if path is None:
        near = difflib.get_close_matches(str(name), available_policies(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KVPolicyError(
            f"unknown KV policy {name!r}.{hint} "
            f"Available: {', '.join(available_policies())}. One of your own must be in "
            f"an installed package that lists it in its entry points "
            f"{ENTRY_POINTS!r} (docs/adding-a-policy.md)."
        )
    module, _, attribute = path.partition(":")
    try:
        cls = getattr(import_module(module), attribute)
    except Exception as error:  # whatever another package does when it is imported
        raise KVPolicyError(
            f"policy {name!r} cannot be loaded from {path!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _checked(name, path, cls)


def problem_of(name: str) -> str | None:
    """Why the policy of this name cannot be used; None: it can."""
    try:
        get_policy_class(name)
    except KVPolicyError as error:
        return str(error)
    return None


def _checked(name: str, path: str, cls: object) -> type[KVCachePolicy]:
    # the contract is what it has, not which class it is
    if not (isinstance(cls, type) and hasattr(cls, "plan") and hasattr(cls, "name")):
        raise KVPolicyError(
            f"policy {name!r}: {path!r} is no class that derives from KVCachePolicy"
        )
    found = cast("type[KVCachePolicy]", cls)
    if found.name != name:
        raise KVPolicyError(
            f"policy {name!r}: the class {path!r} calls itself {found.name!r}; its "
            "`name` must be the one under which it is listed"
        )
    return found
