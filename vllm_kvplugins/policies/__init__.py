"""KV-cache policies: one file each, found through the registry.

Nothing in this package imports vLLM or needs a GPU.
"""

from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView
from vllm_kvplugins.policies.capabilities import (
    EpisodeRouting,
    Observation,
    Probe,
    ProbeOccasion,
    Probing,
    Trigger,
    Turns,
)
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.kinds import PolicyKind, kind_of
from vllm_kvplugins.policies.registry import available_policies, get_policy_class
from vllm_kvplugins.policies.wrapper import Wrapper

__all__ = [
    "Compressor",
    "EpisodeRouting",
    "Geometry",
    "KVCachePolicy",
    "LayerView",
    "Lengths",
    "Observation",
    "PolicyKind",
    "Probe",
    "ProbeOccasion",
    "Probing",
    "Trigger",
    "Turns",
    "Wrapper",
    "available_policies",
    "get_policy_class",
    "kind_of",
]
