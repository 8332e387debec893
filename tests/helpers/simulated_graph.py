"""A simulated CUDA graph: a replay repeats the operations recorded at capture.

As with a real graph, Python values are those of the capture, tensors use the same
memory, and no Python code of the captured function runs. Operations that a capture
refuses (reading values on the host) are refused. Kernels that are not torch operations
are captured through :func:`launch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_READ_BY_THE_HOST = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
_capturing: list[SimulatedGraph] = []


class SimulatedGraph(TorchDispatchMode):
    """Use as a context to capture, then :meth:`replay`."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []

    def __enter__(self) -> SimulatedGraph:
        _capturing.append(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        _capturing.pop()
        super().__exit__(*raised)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _READ_BY_THE_HOST:
            raise RuntimeError(f"{func} while a graph is captured")
        kwargs = kwargs or {}
        output = func(*args, **kwargs)

        def again() -> None:
            for old, new in zip(
                tree_leaves(output), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                # a view, or an in-place write: its memory is up to date
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._steps.append(again)
        return output

    def replay(self) -> None:
        """Repeat the captured operations."""
        assert self._steps, "nothing was captured"
        for step in self._steps:
            step()

    def record(self, step: Callable[[], None]) -> None:
        """One captured kernel launch."""
        self._steps.append(step)


def capturing() -> bool:
    """Whether a graph is being captured."""
    return bool(_capturing)


def launch(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Launch the kernel; in a capture, record it as one operation that writes to given
    tensors.
    """

    def launched(*args: Any, **kwargs: Any) -> Any:
        if not _capturing:
            return kernel(*args, **kwargs)

        def step() -> None:
            with _disable_current_modes():
                kernel(*args, **kwargs)

        step()
        _capturing[-1].record(step)
        return None

    return launched


class Launched:
    """A stand-in for a Triton kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return launch(self._kernel[grid])
