"""What a policy gets to see: one request's slots, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import PageList
from vllm_kvplugins.ops.extension import compiled_for
from vllm_kvplugins.ops.page_votes import page_votes
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.scoring.rotary import Rotary


def pages_answer(device: torch.device) -> bool:
    """Whether votes are read from pages there, instead of a copy of the keys: on a GPU
    with our kernels. On a CPU that is slower (docs/cuda.md)."""
    return device.type == "cuda" and compiled_for(device)[0]


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

        query_positions = torch.arange(
            tokens - queries.shape[1], tokens, device=pages.device
        )
        votes = self.votes(
            layer, pages, positions, queries, query_positions, order=order
        )
        if order is not None:
            positions = positions.gather(1, order)
        return LayerView(
            layer=layer,
            keys=shown(heap.keys(pages)),
            positions=positions,
            valid=positions >= 0 if bool((positions < 0).any()) else None,
            queries=queries,
            query_positions=query_positions,
            scale=self.scales[layer],
            rotary=self.rotary,
            observed=observed,
            budget_tokens=budget_tokens,
            load_values=lambda: shown(heap.values(pages)),
            page_votes=votes,
        )

    def votes(
        self,
        layer: int,
        pages: torch.Tensor,
        positions: torch.Tensor,
        queries: torch.Tensor,
        query_positions: torch.Tensor,
        own_keys: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
    ) -> Callable[[bool], torch.Tensor] | None:
        """``LayerView.page_votes`` of some pages; None where they are not asked.

        Args:
            positions: int64 [kv_heads, slots], as they lie.
            own_keys: of a probe; its slots, which come last, get 0.
        """
        if not pages_answer(self.heap.pages.device):
            return None
        heap = self.heap

        def asked(most: bool) -> torch.Tensor:
            found = page_votes(
                heap.pages,
                pages,
                positions,
                queries,
                query_positions,
                heap.layout,
                self.scales[layer],
                most,
                own_keys,
            )
            if own_keys is not None:
                found = F.pad(found, (0, own_keys.shape[1]))
            if order is None:
                return found
            return found.gather(2, order.unsqueeze(1).expand_as(found))

        return asked
