"""KV-cache policies: one file each, found through the registry.

Nothing in this package imports vLLM or needs a GPU.
"""

from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.policies.base import (
    KVCachePolicy,
    LayerView,
    Probe,
    ProbeOccasion,
    Retention,
    Trigger,
)
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.registry import available_policies, get_policy_class

__all__ = [
    "Compressor",
    "Geometry",
    "KVCachePolicy",
    "LayerView",
    "Lengths",
    "Probe",
    "ProbeOccasion",
    "Retention",
    "Trigger",
    "available_policies",
    "get_policy_class",
]
