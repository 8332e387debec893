"""What an engine's KV cache will hold, as far as its configuration tells.

vLLM measures the pool in its workers, after it has loaded the model. ``auto`` chooses a
policy before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvplugins.engine.retrieval.host_tier import default_limit_bytes
from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.free_memory import available_bytes
from vllm_kvplugins.model_config import weights_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Memory:
    """An amount in bytes, over all ranks of an engine.

    Attributes:
        source: where it comes from; says whether it is an estimate.
    """

    num_bytes: int
    source: str


def pool(vllm_config: VllmConfig, block_bytes: int) -> Memory:
    """The KV cache of one engine.

    Args:
        block_bytes: of one block, over all ranks.

    Raises:
        KVPolicyError: KVP054, the size of the weights is unknown.
    """
    cache, ranks = vllm_config.cache_config, vllm_config.parallel_config.world_size
    if blocks := cache.num_gpu_blocks_override:
        return Memory(blocks * block_bytes, f"{blocks} blocks, as set")
    if (given := cache.kv_cache_memory_bytes) is not None:
        return Memory(given * ranks, "as set")
    device = _device_bytes()
    weights = weights_bytes(vllm_config.model_config.model)
    if weights is None:
        raise KVPolicyError(
            coded(
                "KVP054",
                f"the weights of {vllm_config.model_config.model} are not on this "
                "machine yet, so the memory next to them is unknown; set "
                "--kv-cache-memory-bytes, or download the model first",
            )
        )
    share = cache.gpu_memory_utilization
    left = max(int(device * share) * ranks - weights, 0)
    return Memory(left, f"estimated: {share:.0%} of the device without the weights")


def host(pool_bytes: int, given: int | None, model: str) -> Memory:
    """Host memory that a policy may use.

    Args:
        pool_bytes: of the KV cache, which on a CPU takes from the same memory.
        given: the user's limit.
        model: folder or ID, for the size of its weights.
    """
    from vllm.platforms import current_platform

    if given is not None:
        return Memory(given, "as set")
    limit = default_limit_bytes()
    if not current_platform.is_cpu():
        return Memory(limit, "half of what is free")
    free = available_bytes() - pool_bytes - (weights_bytes(model) or 0)
    if free >= limit:
        return Memory(limit, "half of what is free")
    return Memory(max(free, 0), "what the KV cache and the weights leave free")


def _device_bytes() -> int:
    """All memory of one device, on a CPU of one memory node, as vLLM counts it."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())
