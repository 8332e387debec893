"""Threads for the host search of a retrieval policy in a GPU worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import startup_omp_num_threads

from vllm_kvplugins.policies.base import KVCachePolicy

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

# vLLM configures only the loggers below its own name.
logger = init_logger("vllm.kv_policy")


def restore(policy: KVCachePolicy, parallel: ParallelConfig, threads: int) -> None:
    """Undo vLLM's limit of one CPU thread for policies that search on the host.

    vLLM sets one thread in GPU workers because its own host code needs no more. If the
    user exported OMP_NUM_THREADS, vLLM keeps that number, and so does this function.

    Call it before anything is compiled: guards of compiled graphs contain the number.

    Args:
        threads: torch's number of threads in this process before the model was loaded.
    """
    current = torch.get_num_threads()
    # vLLM has already divided the cores among the ranks, unless the engine runs in the
    # user's own process.
    ranks = parallel.local_world_size * max(1, parallel.data_parallel_size_local)
    share = min(threads, startup_omp_num_threads(ranks))
    if policy.host_storage is None or share <= current:
        return
    torch.set_num_threads(share)
    logger.info(
        "KV policy %s searches on the host with %d threads instead of %d; set "
        "OMP_NUM_THREADS to change the number",
        policy.name,
        share,
        current,
    )
