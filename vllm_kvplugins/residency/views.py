"""What a policy gets to see: one request's slots, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.requests import PageList
from vllm_kvplugins.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Views:
    """Makes the views of one worker's cache.

    Attributes:
        scales: softmax scale per layer.
        rotary: the model's RoPE, if policies can undo it.
    """

    heap: Heap
    scales: Sequence[float]
    rotary: Rotary | None

    def rows(self, layer: int) -> slice:
        """The layer's rows among all (layer, KV head) pairs."""
        heads = self.heap.num_kv_heads
        return slice(layer * heads, (layer + 1) * heads)

    def positions(self, layer: int, owned: PageList, tokens: int) -> torch.Tensor:
        """int64 [kv_heads, longest], -1 where a row has no token."""
        rows, size = self.rows(layer), self.heap.layout.block_size
        lengths = owned.owned[rows] * size - (-tokens % size)
        longest = int(lengths.max())
        place = torch.arange(longest, device=lengths.device)
        positions = owned.positions[rows, :longest].long()
        return positions.masked_fill(place >= lengths[:, None], -1)

    def view(
        self,
        layer: int,
        owned: PageList,
        tokens: int,
        queries: torch.Tensor,
        observed: Any,
        budget_tokens: int = 0,
        order: torch.Tensor | None = None,
    ) -> LayerView:
        """One layer of a request whose newest token has position tokens - 1.

        Args:
            queries: [num_q_heads, num_queries, head_dim] of its newest tokens.
            order: int64 [kv_heads, slots], sequence in which to show the slots;
                None = as they lie.
        """
        heap = self.heap
        positions = self.positions(layer, owned, tokens)
        slots = positions.shape[1]
        used = -(-slots // heap.layout.block_size)
        pages = owned.pages[self.rows(layer), :used]

        def shown(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor[:, :slots]
            if order is None:
                return tensor
            return tensor.gather(1, order[..., None].expand_as(tensor))

        if order is not None:
            positions = positions.gather(1, order)
        return LayerView(
            layer=layer,
            keys=shown(heap.keys(pages)),
            positions=positions,
            valid=positions >= 0 if bool((positions < 0).any()) else None,
            queries=queries,
            query_positions=torch.arange(
                tokens - queries.shape[1], tokens, device=pages.device
            ),
            scale=self.scales[layer],
            rotary=self.rotary,
            observed=observed,
            budget_tokens=budget_tokens,
            load_values=lambda: shown(heap.values(pages)),
        )
