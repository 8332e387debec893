"""vLLM's worker for CPUs with a policy."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvplugins.vllm_adapter.worker.worker import PolicyWorker


class KVPolicyCPUWorker(PolicyWorker, CPUWorker):
    """CPU worker under a policy."""
