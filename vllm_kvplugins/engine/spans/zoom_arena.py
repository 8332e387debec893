"""Memory of the entries of spans: means, and tokens of spans that are zoomed."""

from __future__ import annotations

import torch

from vllm_kvplugins.engine.entries import EntryArena
from vllm_kvplugins.ops.zoom import ZoomEntries


class ZoomArena(EntryArena):
    """An arena of which the host also has the biases, and the span that owns each
    entry.

    Attributes:
        layers: the entries of each layer, views.
    """

    @torch.inference_mode(False)
    def _allocate(self, capacity: int) -> None:
        super()._allocate(capacity)
        shape = self.bias.shape
        self._owner = torch.full(shape, -1)
        self._host_bias: torch.Tensor | None = None
        if self._device.type != "cpu":
            self._host_bias = torch.full(shape, -torch.inf)
        # Kept, because making the views takes longer than a step's work on them.
        self.layers = [self._layer(layer) for layer in range(self._num_layers)]

    def _layer(self, layer: int) -> ZoomEntries:
        keys, values, bias = self.keys[layer], self.values[layer], self.bias[layer]
        if self._host_bias is None:
            return ZoomEntries(keys, values, bias, self._owner[layer])
        return ZoomEntries(
            keys, values, self._host_bias[layer], self._owner[layer], bias
        )

    @property
    def _tensors(self) -> list[torch.Tensor]:
        tensors = [*super()._tensors, self._owner]
        return tensors if self._host_bias is None else [*tensors, self._host_bias]

    @property
    def _marks(self) -> list[tuple[torch.Tensor, float, str]]:
        marks = [*super()._marks, (self._owner, -1, "owned")]
        if self._host_bias is not None:
            marks.append((self._host_bias, -torch.inf, "has a bias"))
        return marks
