"""Helper threads that run parallel to the model's thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def helper(name: str) -> ThreadPoolExecutor:
    """One thread that runs tasks in order, with as many OpenMP threads as torch uses.

    OpenMP keeps its thread count per calling thread: a new thread starts with
    OMP_NUM_THREADS or all cores, not with the current setting. Calling torch in the new
    thread applies the setting; the compiled ops ask OpenMP only.

    Args:
        name: prefix of the thread's name.
    """
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.get_num_threads
    )
