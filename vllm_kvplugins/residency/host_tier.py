"""The host tier: keys and values that are not resident, in plain host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class HostLayer:
    """Offloaded tokens of one request and layer, in order of position.

    Attributes:
        keys: [num_kv_heads, capacity, head_dim], after RoPE, cache dtype.
        values: same shape.
        tokens: how many entries count.
    """

    keys: torch.Tensor
    values: torch.Tensor
    tokens: int = 0

    @staticmethod
    def empty(num_kv_heads: int, head_dim: int, like: torch.Tensor) -> HostLayer:
        nothing = torch.empty(num_kv_heads, 0, head_dim, dtype=like.dtype)
        return HostLayer(nothing, nothing.clone())

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take in [num_kv_heads, n, head_dim] of the next positions."""
        stop = self.tokens + keys.shape[1]
        if stop > self.keys.shape[1]:
            # a quarter of slack: generating appends a block at a time
            room = stop if not self.tokens else stop + stop // 4
            self.keys = _grown(self.keys, self.tokens, room)
            self.values = _grown(self.values, self.tokens, room)
        self.keys[:, self.tokens : stop] = keys
        self.values[:, self.tokens : stop] = values
        self.tokens = stop

    @property
    def present_keys(self) -> torch.Tensor:
        """[num_kv_heads, tokens, head_dim], a view."""
        return self.keys[:, : self.tokens]

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()


def _grown(tensor: torch.Tensor, used: int, room: int) -> torch.Tensor:
    grown = tensor.new_empty(tensor.shape[0], room, tensor.shape[2])
    grown[:, :used] = tensor[:, :used]
    return grown
