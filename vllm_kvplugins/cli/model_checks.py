"""Start-up checks of the engine that need ``config.json`` alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from vllm_kvplugins.errors import coded

if TYPE_CHECKING:
    from vllm_kvplugins.model_config import ConfigOnlyModel
    from vllm_kvplugins.policies.base import KVCachePolicy


def model_problems(model: ConfigOnlyModel) -> list[str]:
    """Why no policy can run with a model."""
    from vllm_kvplugins.vllm_adapter.config import validation

    return [*validation.model_problems(model), *model.layer_problems()]


def cache_problems(dtype: str, block_size: int) -> list[str]:
    """Why no policy can run with a KV cache.

    Args:
        dtype: of keys and values.
        block_size: tokens per block.
    """
    from vllm_kvplugins.vllm_adapter.config import validation

    cache = SimpleNamespace(cache_dtype=dtype, block_size=block_size)
    reasons = list(validation.cache_problems(cache))
    if dtype == "auto":
        reasons.append(
            coded("KVP603", "--dtype auto depends on the machine; give a dtype")
        )
    elif dtype.startswith("fp8") and not reasons:
        reasons.append(
            coded(
                "KVP603",
                f"--dtype {dtype} is not computed; keys and values take half the bytes "
                "of bfloat16: give bfloat16 and halve what the pool holds",
            )
        )
    return reasons


def policy_problems(policy: KVCachePolicy, model: ConfigOnlyModel) -> list[str]:
    """Why one policy cannot run with a model that others can run with."""
    from vllm_kvplugins.vllm_adapter.config import validation

    return [
        *validation.dtype_problems(policy, model),
        *validation.softcap_problems(policy, model),
        *validation.hybrid_problems(model.layer_types, policy, model),
    ]


def shape_problems(policy: KVCachePolicy, model: ConfigOnlyModel) -> list[str]:
    """Why the settings of a policy do not fit the shape of a model.

    Raises:
        KVPolicyError: see ``ConfigOnlyModel.cache_shape``.
    """
    from vllm_kvplugins.model_config import FULL

    shape, allocator = model.cache_shape(), policy.page_allocator()
    return [
        *allocator.problems(model.layer_types.count(FULL), shape.num_kv_heads),
        *allocator.model_problems(model.fingerprint),
        *policy.model_problems(model.fingerprint),
    ]
