"""Small things to a GPU without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

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
