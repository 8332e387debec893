"""On how many cores a GPU's worker searches what its policy keeps on the host."""

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
    """Take back that vLLM serves with one thread, which has nothing to do on the host;
    policies that search there have. What a user exported vLLM leaves, and so do we.

    Call it before anything is compiled: guards of compiled graphs hold the number.

    Args:
        threads: torch's before the model was loaded, in this process.
    """
    now = torch.get_num_threads()
    # a share of the cores already, unless the engine runs in the user's own process
    ranks = parallel.local_world_size * max(1, parallel.data_parallel_size_local)
    share = min(threads, startup_omp_num_threads(ranks))
    if policy.host_storage is None or share <= now:
        return
    torch.set_num_threads(share)
    logger.info(
        "KV policy %s searches on the host: %d threads again, not %d; set "
        "OMP_NUM_THREADS for another number",
        policy.name,
        share,
        now,
    )
