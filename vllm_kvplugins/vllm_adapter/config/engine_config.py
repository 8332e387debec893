"""Reads the policy, the model and the shape of the KV cache from a ``VllmConfig``."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvplugins.config import CONFIG_KEY, parse_policy
from vllm_kvplugins.model_config import (
    FULL,
    SLIDING,
    ConfigOnlyModel,
    ModelFingerprint,
    layer_types,
)
from vllm_kvplugins.plan.geometry import Geometry
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.vllm_adapter.config import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


# Key in the settings of our connector, which reach all processes. Measured values must
# not be in additional_config: vLLM hashes it to find compiled graphs, so each start
# would compile again.
_MEASURED = "kv_policy_measured"


def request_of(vllm_config: VllmConfig) -> dict[str, Any] | str | None:
    """The policy's settings, including values that were measured at start-up.

    Returns:
        An argument for ``parse_policy``; None without a policy.
    """
    config = vllm_config.additional_config
    request: dict[str, Any] | str | None = (
        config.get(CONFIG_KEY) if isinstance(config, dict) else None
    )
    transfer = vllm_config.kv_transfer_config
    if not isinstance(request, dict) or transfer is None:
        return request
    measured: dict[str, int] = transfer.kv_connector_extra_config.get(_MEASURED, {})
    return request | measured


def remember_measured(vllm_config: VllmConfig, measured: Mapping[str, int]) -> None:
    """Store values that one process measured, so that ``request_of`` returns them.

    Args:
        measured: sizes in bytes, by setting, which the user left open.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "with a policy, our connector is configured"
    transfer.kv_connector_extra_config[_MEASURED] = dict(measured)


def policy_of(vllm_config: VllmConfig) -> KVCachePolicy | None:
    """The policy of a configuration; None if it has none.

    Parses equal settings only once, because the front end calls this for every request
    and some policies read files when they are parsed. Policies are immutable.

    Cost: serializes the settings, some microseconds; the first call parses them.
    """
    request = request_of(vllm_config)
    if request is None:
        return None
    return _parsed(json.dumps(request, sort_keys=True, default=str))


@functools.lru_cache(maxsize=64)
def _parsed(request: str) -> KVCachePolicy:
    return parse_policy(json.loads(request))


def fingerprint_of(vllm_config: VllmConfig) -> ModelFingerprint:
    """Fingerprint of the whole model, over all ranks."""
    model = vllm_config.model_config
    config = model.hf_config.to_dict()
    return ConfigOnlyModel(model.model, str(model.dtype), config).fingerprint()


def is_on_several_nodes(args: EngineArgs) -> bool:
    """Whether processes on other machines resolve the same arguments as this one."""
    local = args.data_parallel_size_local
    return args.nnodes > 1 or (local is not None and local < args.data_parallel_size)


def layer_types_of(vllm_config: VllmConfig) -> tuple[str, ...]:
    """Type of each cache of the model, see :func:`layer_types`."""
    model = vllm_config.model_config
    num_layers: int = model.get_num_layers(vllm_config.parallel_config)
    if vllm_config.cache_config.sliding_window is not None:
        # vLLM gives every layer this window.
        return (SLIDING,) * num_layers
    return layer_types(model.hf_text_config, num_layers)


def has_other_layers(vllm_config: VllmConfig) -> bool:
    """Whether the model has layers that the policy leaves to vLLM."""
    return any(kind != FULL for kind in layer_types_of(vllm_config))


def geometry_of(vllm_config: VllmConfig) -> Geometry:
    """Shape of the KV cache that the policy manages, on one rank.

    The policy manages the layers with full attention. Needs no loaded model, so that
    all processes compute the same; the worker checks it against the loaded layers.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_layers = layer_types_of(vllm_config).count(FULL)
    element_bytes = compat.kv_element_bytes(vllm_config)
    per_layer = 2 * model.get_total_num_kv_heads() * model.get_head_size()
    return Geometry(
        block_size=vllm_config.cache_config.block_size,
        num_layers=num_layers,
        num_kv_heads=model.get_num_kv_heads(parallel),
        kv_bytes_per_token=num_layers * per_layer * element_bytes,
        head_dim=model.get_head_size(),
        element_bytes=element_bytes,
    )
