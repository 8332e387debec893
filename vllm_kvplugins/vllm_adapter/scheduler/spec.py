"""The KV cache spec of an attention layer under a policy.

Importing this module registers the spec with its block manager, also in processes that
only unpickle the spec.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from vllm_kvplugins.vllm_adapter.scheduler.block_manager import ResidencyBlockManager

if TYPE_CHECKING:
    from vllm_kvplugins.plan.geometry import Geometry
    from vllm_kvplugins.policies.base import KVCachePolicy


@dataclass(frozen=True, kw_only=True)
class ResidencySpec(FullAttentionSpec):
    """Full attention with blocks that the plan of a policy can free.

    Attributes:
        geometry: of the layers that the policy manages.
        draft_geometry: of the layers of a drafter; None: it has none.
    """

    policy: KVCachePolicy
    geometry: Geometry
    draft_geometry: Geometry | None = None

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Smallest pool with which vLLM starts: memory for one request of full length.

        A policy that bounds prompts needs less than ``--max-model-len`` tokens. Request
        validation rejects requests whose answers do not fit into the pool.
        """
        whole: int = super().max_memory_usage_bytes(vllm_config)
        longest = vllm_config.model_config.max_model_len
        blocks = self.policy.max_prompt_blocks(longest, self.geometry)
        return whole if blocks is None else min(whole, blocks * self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[Any]) -> ResidencySpec:
        assert all(spec == specs[0] for spec in specs), "layers disagree on their spec"
        merged: ResidencySpec = copy.deepcopy(specs[0])
        return merged


def is_managed(spec: Any) -> bool:
    """Whether a policy manages a layer with this spec: plain full attention.

    Subclasses (MLA, learned sinks as tokens, ...) have other managers. A window or
    chunk in the spec means that vLLM stores a windowed layer like a full one.
    """
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
    )


def with_policy(
    spec: FullAttentionSpec,
    policy: KVCachePolicy,
    geometry: Geometry,
    draft_geometry: Geometry | None = None,
) -> ResidencySpec:
    """The spec of the same layer under a policy; see :class:`ResidencySpec`."""
    converted: ResidencySpec = replace_as(
        spec,
        ResidencySpec,
        policy=policy,
        geometry=geometry,
        draft_geometry=draft_geometry,
    )
    return converted


# The registry adds vLLM's specs only while it is empty. Without this call, it would
# contain only ours.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(
    ResidencySpec, ResidencyBlockManager, uniform_type_base_spec=FullAttentionSpec
)
