"""Exact attention of prompt tokens to a cache whose tokens are in host memory.

Generated tokens attend to what their queries select. The tokens of a prompt attend to
all earlier tokens, wherever these are, so that nothing is lost while a prompt is read
block by block or when a session continues::

    resident   [ sinks | hot slots | window, later tokens | the chunk itself ]
    host                 [ all tokens between sinks and window ]
    attended   [ sinks | all host tokens, in tiles  | window | chunk, causally ]

Hot slots hold copies of host tokens, so they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_kvplugins.engine.heap import Heap
from vllm_kvplugins.engine.requests import Row
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.engine.retrieval.offloaded import Offloaded
from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.ops.device import moved
from vllm_kvplugins.ops.layout import PagedKV
from vllm_kvplugins.ops.tiled_attention import TiledAttention

# Host tokens that lie next to the queries at once.
_TILE_TOKENS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PromptRow:
    """A row of a step that computes tokens of a prompt.

    Attributes:
        index: its index among the step's rows.
        state: its tokens in host memory; at least one.
    """

    index: int
    row: Row
    state: Offloaded

    @property
    def queries(self) -> slice:
        """Its tokens among the step's."""
        first = self.row.first_query
        return slice(first, first + self.row.new_tokens)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        resident: tuple[torch.Tensor, torch.Tensor],
        tier: HostTier,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of the row's tokens in one layer.

        Args:
            queries: [new tokens, num_q_heads, head_dim], of the row.
            resident: keys and values that are not in host memory, see
                :func:`resident_tokens`.
            scale: softmax scale, times that of fp8 keys.
            sinks: the layer's learned sinks, if any.

        Returns:
            Same shape as ``queries``, to be multiplied by the scale of fp8 values.
        """
        keys, values = (rows.to(queries.dtype) for rows in resident)
        new, heads = self.row.new_tokens, len(keys)
        attention = TiledAttention(queries, heads, scale, sinks)
        table, tokens = self.state.table(layer), self.state.tokens
        for first in range(0, tokens, _TILE_TOKENS):
            tile = range(first, min(first + _TILE_TOKENS, tokens))
            attention.add(
                *(
                    moved(rows.to(queries.dtype), queries.device)
                    for rows in tier.read(table, tile)
                )
            )
        attention.add(keys[:, :-new], values[:, :-new])
        attention.add(keys[:, -new:], values[:, -new:], causal=True)
        return attention.result()


def prompt_rows(
    rows: Sequence[Row], states: Sequence[Offloaded | None]
) -> list[PromptRow]:
    """The rows that compute prompt tokens and have tokens in host memory."""
    return [
        PromptRow(index, row, state)
        for index, (row, state) in enumerate(zip(rows, states, strict=True))
        if state is not None
        and state.tokens
        and row.computed_tokens < row.prompt_tokens
    ]


def resident_tokens(
    heap: Heap,
    kv: PagedKV,
    pages: torch.Tensor,
    length: int,
    hot_places: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a request's resident tokens, without those in hot slots.

    Args:
        kv: pages of one layer, or of all.
        pages: int32 [num_kv_heads, max pages], ids of the request's pages in ``kv``.
        length: number of tokens in these pages, per KV head.
        hot_places: int64 [num_kv_heads, count], on the host; see ``HotSlots.place``.

    Returns:
        Two [num_kv_heads, n, head_dim], in the order of the pages: the newest tokens
        come last. Fp8 elements are float32, without their scale.
    """
    heads, size = len(pages), kv.layout.block_size
    stays = torch.ones(heads, length, dtype=torch.bool)
    stays.scatter_(1, hot_places, False)
    place = stays.nonzero()[:, 1].view(heads, -1).to(pages.device)
    page = pages.long().gather(1, place // size)
    keys, values = ops.gather_tokens(kv, page.flatten(), (place % size).flatten())
    keys, values = heap.unscaled(keys), heap.unscaled(values)
    return keys.view(*place.shape, -1), values.view(*place.shape, -1)
