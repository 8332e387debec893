"""Between host and GPU: what goes there is not waited for, what comes is when it is
needed. On a CPU all of this costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


def on_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 tensor of numbers that the host knows; see :func:`moved`."""
    return moved(torch.tensor(numbers, dtype=torch.int64), device)


def moved(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on another device.

    Cost: on CUDA one copy in the stream's order, for which the host does not wait, as
        it would with memory that is not pinned.
    """
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def staging(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host, not set, that a copy to a device need not wait for."""
    pinned = device.type == "cuda"
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)


class AsyncHostCopy:
    """A tensor on its way to the host.

    Args:
        tensor: of any device; on a CPU it has arrived, and is not copied.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._here, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._here = staging(
                *tensor.shape, dtype=tensor.dtype, device=tensor.device
            )
            self._here.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._here

    @property
    def event(self) -> torch.cuda.Event | None:
        """When it is there, in the order of the stream that was current."""
        return self._event


class SideStream:
    """Where another thread hands work to a GPU, beside the model's; nothing on CPUs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Hand work over that begins behind an event."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def event(self) -> torch.cuda.Event | None:
        """When all that has been handed over is done."""
        return None if self._stream is None else self._stream.record_event()


class Reads:
    """Work of a GPU that reads memory of the host, where the host must not write until
    it is over.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # of work on one stream the last is over last
        self._last: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def note(self) -> None:
        """The current stream has just been handed such work."""
        stream = torch.cuda.current_stream(self._device)
        self._last[stream] = stream.record_event()

    def so_far(self) -> list[torch.cuda.Event]:
        """Events, behind all of which everything noted so far is over."""
        return [event for event in list(self._last.values()) if not event.query()]

    def wait(self) -> None:
        """Wait until nothing reads any more."""
        for event in self.so_far():
            event.synchronize()
