"""Runs file operations in the background."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from vllm_kvplugins.ops.threads import end_openmp_threads


class FileThread:
    """Daemon threads with a queue of jobs; one by default, which keeps their order.

    Unlike a ``ThreadPoolExecutor``, a cancelled job leaves the queue at once and frees
    what it refers to, and a job that never ends does not keep the process alive. A job
    ends the OpenMP threads that it started.

    Args:
        name: name of the threads.
        num_threads: how many jobs run at once; a thread starts with each of the first
            jobs.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: list[Future[Any]] = []
        self._closed = False
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Run a job after all earlier ones have started."""
        future: Future[Any] = Future()
        with self._changed:
            assert not self._closed, "closed"
            self._jobs.append((future, job))
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(
                    target=self._run, name=self._name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def cancel(self, future: Future[Any]) -> bool:
        """Remove a job from the queue, and wake the threads that wait for it.

        Returns:
            False if it has started or ended.
        """
        with self._changed:
            for queued in self._jobs:
                if queued[0] is future:
                    self._jobs.remove(queued)
                    future.cancel()
                    # Future.cancel() alone does not end concurrent.futures.wait().
                    return not future.set_running_or_notify_cancel()
        return False

    def close(self, timeout_s: float) -> bool:
        """Wait until all jobs have ended; accepts no jobs afterwards.

        Returns:
            False if some have not ended in time.
        """
        with self._changed:
            self._closed = True
            waiting = [future for future, _ in self._jobs] + self._running
            self._changed.notify_all()
        return not wait(waiting, timeout=timeout_s).not_done

    def _run(self) -> None:
        while self._next_job():
            pass

    def _next_job(self) -> bool:
        """Run one job; False if there will be no more."""
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            if not self._jobs:
                return False
            future, job = self._jobs.popleft()
            self._running.append(future)
        # Only cancel() cancels, and only what is in the queue.
        future.set_running_or_notify_cancel()
        try:
            result = job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        end_openmp_threads()
        with self._changed:
            self._running.remove(future)
        return True

    @property
    def num_running(self) -> int:
        """Number of jobs that have started and not ended."""
        return len(self._running)
