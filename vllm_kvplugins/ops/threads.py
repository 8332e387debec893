"""Threads of our own, beside the one that runs the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def helper(name: str) -> ThreadPoolExecutor:
    """One thread that does what it is handed in order, on as many cores as torch's ops.

    OpenMP keeps the number of threads for each thread that starts some, and a new one
    begins with OMP_NUM_THREADS or all cores, whatever was set since. Asking torch in it
    takes over what was set; the compiled ops ask OpenMP only.

    Args:
        name: seen in tools that list threads.
    """
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=torch.get_num_threads
    )
