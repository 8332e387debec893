"""vLLM's worker for GPUs with a policy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvplugins.errors import KVPolicyError, coded
from vllm_kvplugins.vllm_adapter.config import host_memory
from vllm_kvplugins.vllm_adapter.worker import host_threads
from vllm_kvplugins.vllm_adapter.worker.worker import PolicyWorker

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")


class KVPolicyGPUWorker(PolicyWorker, Worker):
    """GPU worker under a policy."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        threads = torch.get_num_threads()
        super().load_model(*args, **kwargs)
        policy = self.kv_policy.runtime.policy
        host_threads.restore(policy, self.parallel_config, threads)

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's pool, without those that the policy allocates next to it.

        A pool whose size the user gave (--kv-cache-memory-bytes) keeps it.
        """
        available = int(super().determine_available_memory())
        runtime = self.kv_policy.runtime
        own = host_memory.reserved_device_bytes(runtime.policy, runtime.geometry)
        if not own or self.cache_config.kv_cache_memory_bytes:
            return available
        logger.info(
            "KV policy %s keeps codes or means of keys in %d MiB of device memory, "
            "which the KV cache of vLLM gets less; lower host_memory to change this",
            runtime.policy.name,
            own >> 20,
        )
        if own >= available:
            raise KVPolicyError(
                coded(
                    "KVP145",
                    f"codes and means of all tokens that fit in host_memory need "
                    f"{own >> 20} MiB of device memory, and {available >> 20} MiB are "
                    "left; set a smaller host_memory in --kv-policy-config",
                )
            )
        return available - own
