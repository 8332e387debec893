"""Helper threads that run parallel to the model's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

from vllm_kvplugins.ops.extension import load_extension

_P = ParamSpec("_P")
_T = TypeVar("_T")


def end_openmp_threads() -> None:
    """End the OpenMP threads that the calling thread's parallel loops have started.

    If they stayed, OpenMP would count more threads than cores, let idle threads sleep
    at once, and so delay every parallel loop of the model (csrc/threads.cpp). Does
    nothing without the extension.

    Cost: starting and ending threads takes about 0.1 ms.
    """
    if not load_extension().reason:
        torch.ops.kvp.end_threads()


class Helper(ThreadPoolExecutor):
    """One thread that runs tasks in order, with as many OpenMP threads as torch uses.

    OpenMP keeps its thread count per calling thread: a new thread starts with
    OMP_NUM_THREADS or all cores, not with the current setting. Calling torch in the new
    thread applies the setting; the compiled ops ask OpenMP only.

    A task ends the OpenMP threads that it started (:func:`end_openmp_threads`).

    Args:
        name: prefix of the thread's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, name, initializer=torch.get_num_threads)

    def submit(
        self, task: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> Future[_T]:
        """Run ``task(*args, **kwargs)`` after all earlier tasks."""
        return super().submit(_run, partial(task, *args, **kwargs))


def _run(task: Callable[[], _T]) -> _T:
    try:
        return task()
    finally:
        end_openmp_threads()
