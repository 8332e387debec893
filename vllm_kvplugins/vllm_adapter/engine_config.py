"""What a configuration of vLLM says of policy, model and the shape of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvplugins.config import CONFIG_KEY, parse_policy
from vllm_kvplugins.model_config import ConfigOnlyModel, ModelFingerprint
from vllm_kvplugins.policies.base import Geometry, KVCachePolicy
from vllm_kvplugins.vllm_adapter import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def policy_of(vllm_config: VllmConfig) -> KVCachePolicy | None:
    """The policy that a configuration asks for, if any."""
    config = vllm_config.additional_config
    request = config.get(CONFIG_KEY) if isinstance(config, dict) else None
    return None if request is None else parse_policy(request)


def fingerprint_of(vllm_config: VllmConfig) -> ModelFingerprint:
    """Of the whole model, over all ranks."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    return ConfigOnlyModel(model.model, str(model.dtype), config).fingerprint()


def geometry_of(vllm_config: VllmConfig) -> Geometry:
    """Shape of the KV cache on one rank."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_layers = model.get_num_layers(parallel)
    element_bytes = compat.kv_element_bytes(vllm_config)
    per_layer = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    return Geometry(
        block_size=vllm_config.cache_config.block_size,
        num_layers=num_layers,
        num_kv_heads=model.get_num_kv_heads(parallel),
        kv_bytes_per_token=num_layers * per_layer * element_bytes,
    )
