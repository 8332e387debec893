"""vLLM's worker for GPUs with a policy."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_kvplugins.vllm_adapter.worker import host_threads
from vllm_kvplugins.vllm_adapter.worker.worker import PolicyWorker


class KVPolicyGPUWorker(PolicyWorker, Worker):
    """GPU worker under a policy."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        threads = torch.get_num_threads()
        super().load_model(*args, **kwargs)
        policy = self.kv_policy.runtime.policy
        host_threads.restore(policy, self.parallel_config, threads)
