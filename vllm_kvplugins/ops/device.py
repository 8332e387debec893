"""Copies between host and GPU that the host does not wait for until it needs them.

On a CPU all of this is free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """An int64 tensor on ``device``; see :func:`moved`."""
    return moved(torch.tensor(numbers, dtype=torch.int64), device)


def moved(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device.

    Cost: on CUDA one copy in stream order, from pinned memory so that the host does not
        wait for it.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def staging(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised host memory; pinned if ``device`` is a GPU."""
    pinned = device.type == "cuda"
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class AsyncHostCopy:
    """A copy of a tensor to the host that is under way.

    Args:
        tensor: on any device; a CPU tensor is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = staging(
                *tensor.shape, dtype=tensor.dtype, device=tensor.device
            )
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> torch.Tensor:
        """Wait for the copy; returns the tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def poll(self) -> torch.Tensor | None:
        """The tensor on the host if it has arrived, else None. Does not wait."""
        if self._event is None or self._event.query():
            return self._host
        return None

    @property
    def event(self) -> torch.cuda.Event | None:
        """The event after the copy, on the stream that was current; None on a CPU."""
        return self._event


class SideStream:
    """A CUDA stream for another thread, parallel to the model's; none on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Queue work on the side stream that starts after an event."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def event(self) -> torch.cuda.Event | None:
        """An event after all work queued so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()


class Reads:
    """Pending GPU work that reads host memory, which the host must not write to.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Work on one stream finishes in order, so the last event is enough.
        self._last: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def note(self) -> None:
        """Record that the current stream has just queued reads."""
        stream = torch.cuda.current_stream(self._device)
        self._last[stream] = stream.record_event()

    def so_far(self) -> list[torch.cuda.Event]:
        """Events after all reads noted so far; finished ones are left out."""
        return [event for event in list(self._last.values()) if not event.query()]

    def wait(self) -> None:
        """Wait until all reads are over."""
        for event in self.so_far():
            event.synchronize()
