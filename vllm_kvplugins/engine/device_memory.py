"""Device memory that a policy uses outside vLLM's pool of blocks.

vLLM sizes its pool and does not know of it: page lists and positions of retained
regions, the page table of CUDA graphs, kept queries, observations, and what step
extensions hold (means and zoomed tokens of spans).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from vllm_kvplugins.engine.requests import RequestState


def bytes_of_requests(states: Iterable[RequestState], device: torch.device) -> int:
    """Bytes of positions, kept queries and observations of requests.

    Args:
        states: of live requests.
        device: tensors on other devices do not count.

    Cost: O(requests), plus the tensors that a policy's ``observe`` keeps.
    """
    num_bytes = 0
    for state in states:
        if state.resident is not None:
            num_bytes += tensor_bytes(state.resident.positions, device)
        if state.window is not None:
            num_bytes += state.window.num_bytes
        if state.unobserved is not None:
            num_bytes += state.unobserved.num_bytes
        if state.observed:
            # Layers can share one observation.
            unique = {id(each): each for each in state.observed.values()}
            num_bytes += sum(tensor_bytes(each, device) for each in unique.values())
    return num_bytes


def tensor_bytes(value: Any, device: torch.device) -> int:
    """Bytes of the tensors in a value that are on a device.

    Args:
        value: a tensor, or a mapping, sequence or dataclass of them; others have no
            tensors.
    """
    if isinstance(value, torch.Tensor):
        return int(value.nbytes) if value.device == device else 0
    if isinstance(value, Mapping):
        return sum(tensor_bytes(each, device) for each in value.values())
    if isinstance(value, (tuple, list)):
        return sum(tensor_bytes(each, device) for each in value)
    if is_dataclass(value):
        names = [each.name for each in fields(value)]
        return sum(tensor_bytes(getattr(value, name), device) for name in names)
    return 0
