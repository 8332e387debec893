"""vLLM's worker for GPUs with a policy."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from vllm_kvplugins.vllm_adapter.worker import PolicyWorker


class KVPolicyGPUWorker(PolicyWorker, Worker):
    """GPU worker under a policy."""
