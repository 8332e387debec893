"""The registry: one line per policy of this package, plus those of other packages."""

from __future__ import annotations

import difflib
import functools
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from vllm_kvplugins.choice import AUTO
from vllm_kvplugins.errors import KVPolicyError, coded

if TYPE_CHECKING:
    from vllm_kvplugins.policies.base import KVCachePolicy

# The entry-point group in which other packages list policies, "name = module:Class".
ENTRY_POINTS = "vllm_kvplugins.policies"

# Name on the command line -> "module:Class". The module is imported on first use.
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
    "lagkv": "vllm_kvplugins.policies.lagkv:LagKV",
    "criticalkv": "vllm_kvplugins.policies.criticalkv:CriticalKV",
    "r-kv": "vllm_kvplugins.policies.r_kv:RKV",
    "triattention": "vllm_kvplugins.policies.triattention:TriAttention",
    "duo-attention": "vllm_kvplugins.policies.duo_attention:DuoAttention",
    "exact-topk": "vllm_kvplugins.policies.exact_topk:ExactTopK",
    "quest": "vllm_kvplugins.policies.quest:Quest",
    "arkvale": "vllm_kvplugins.policies.arkvale:ArkVale",
    "pqcache": "vllm_kvplugins.policies.pqcache:PQCache",
    "clusterkv": "vllm_kvplugins.policies.clusterkv:ClusterKV",
    "omnikv": "vllm_kvplugins.policies.omnikv:OmniKV",
    "icecache": "vllm_kvplugins.policies.icecache:IceCache",
    "icecache-means": "vllm_kvplugins.policies.icecache_means:IceCacheMeans",
    "flowkv": "vllm_kvplugins.policies.flowkv:FlowKV",
    "epicache": "vllm_kvplugins.policies.epicache:EpiCache",
    "sekv": "vllm_kvplugins.policies.sekv:SeKV",
    "kvzip": "vllm_kvplugins.policies.kvzip:KVzip",
    "infinipot": "vllm_kvplugins.policies.infinipot:InfiniPot",
}


@functools.cache
def _outside() -> dict[str, str]:
    """Policies of installed packages. Names of this package take precedence."""
    entries = entry_points(group=ENTRY_POINTS)
    taken = {*_POLICIES, AUTO}
    return {entry.name: entry.value for entry in entries if entry.name not in taken}


def _all() -> dict[str, str]:
    return _outside() | _POLICIES


def available_policies() -> tuple[str, ...]:
    """Names that ``--kv-policy`` accepts, in alphabetical order."""
    return tuple(sorted(_all()))


def outside_policies() -> dict[str, str]:
    """Policies of other packages: name to ``"module:Class"``, not yet imported."""
    return dict(sorted(_outside().items()))


def register_policy(name: str, path: str) -> None:
    """Add a policy in this process only, before the engine starts.

    For scripts and tests. A package should list its policies under the entry point
    ``vllm_kvplugins.policies``, where every process finds them.

    Args:
        name: what the user writes after ``--kv-policy``.
        path: ``"package.module:Class"``. Every vLLM process imports it, so it must be
            importable and registered there too.

    Raises:
        KVPolicyError: KVP101, the path is not of the form ``module:Class``; KVP102,
            another class has the name.
    """
    if path.count(":") != 1:
        raise KVPolicyError(
            coded("KVP101", f"policy path must be 'module:Class', got {path!r}")
        )
    taken = "--kv-policy" if name == AUTO else _all().get(name, path)
    if taken != path:
        raise KVPolicyError(
            coded(
                "KVP102",
                f"policy name {name!r} belongs to {taken}; choose another name",
            )
        )
    _POLICIES[name] = path


def get_policy_class(name: str) -> type[KVCachePolicy]:
    """The class of a policy.

    Raises:
        KVPolicyError: KVP052, the name stands for a policy; KVP100, no policy has this
            name (the message suggests one); KVP103, it cannot be imported; KVP104 to
            KVP107, it is not a policy of this name and this version of the contract.
    """
    if name == AUTO:
        raise KVPolicyError(
            coded(
                "KVP052",
                f"{name!r} is no policy: an engine chooses one for it when it starts; "
                "name the policy that its log or `kvplugins recommend` shows",
            )
        )
    path = _all().get(name)
    if path is None:
        near = difflib.get_close_matches(str(name), available_policies(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise KVPolicyError(
            coded(
                "KVP100",
                f"unknown KV policy {name!r}.{hint} Available: "
                f"{', '.join(available_policies())}. To use your own policy, install a "
                f"package that lists it under the entry point {ENTRY_POINTS!r} "
                "(docs/adding-a-policy.md).",
            )
        )
    module, _, attribute = path.partition(":")
    try:
        cls = getattr(import_module(module), attribute)
    except KVPolicyError as error:  # the class does not fit the contract
        raise KVPolicyError(f"policy {name!r} of {path!r}: {error}") from error
    except Exception as error:  # importing another package may raise anything
        raise KVPolicyError(
            coded(
                "KVP103",
                f"policy {name!r} cannot be loaded from {path!r}: "
                f"{type(error).__name__}: {error}",
            )
        ) from error
    return _checked(name, path, cls)


def problem_of(name: str) -> str | None:
    """Why the policy of this name cannot be used; None if it can."""
    try:
        get_policy_class(name)
    except KVPolicyError as error:
        return str(error)
    return None


def _checked(name: str, path: str, cls: object) -> type[KVCachePolicy]:
    # by what the class has, so that a policy need not derive from a certain base class
    if not (isinstance(cls, type) and hasattr(cls, "plan") and hasattr(cls, "name")):
        raise KVPolicyError(
            coded(
                "KVP104",
                f"policy {name!r}: {path!r} is not a class that derives from "
                "KVCachePolicy",
            )
        )
    policy_class = cast("type[KVCachePolicy]", cls)
    if policy_class.name != name:
        raise KVPolicyError(
            coded(
                "KVP105",
                f"policy {name!r}: the `name` of the class {path!r} is "
                f"{policy_class.name!r}; it must equal the name in the entry point",
            )
        )
    return policy_class
