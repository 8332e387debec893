"""Requests whose tokens lie in the host tier, and how these get there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.ops import dispatch as ops
from vllm_kvplugins.residency.heap import Heap
from vllm_kvplugins.residency.indexing import OffloadedLayer
from vllm_kvplugins.residency.requests import PageList


@dataclass(slots=True, eq=False)
class Offloaded:
    """A request that has tokens in the host tier.

    Attributes:
        seat: its row in the hot zones of every layer.
        tokens: how many are on the host; the same in all layers.
        pages: int64 [num_kv_heads, n] per layer, its pages of the host tier.
        hot: hot slots per KV head, per layer; empty before the first compaction.
        served: they are being filled for the next step.
    """

    seat: int
    tokens: int = 0
    pages: dict[int, torch.Tensor] = field(default_factory=dict)
    layers: dict[int, OffloadedLayer] = field(default_factory=dict)
    hot: dict[int, int] = field(default_factory=dict)
    served: bool = False


@dataclass(slots=True)
class Batch:
    """Requests of a step with equally many new tokens.

    Attributes:
        seats: int64 [requests]; also as numbers.
        query: int64 [requests * new tokens], rows among the step's queries.
        chosen: what the last anchor layer selected.
        served: its hot slots were filled during the step before.
        ahead: what the next layer fetches, under way on another thread.
    """

    states: list[Offloaded]
    seats: torch.Tensor
    seat_numbers: tuple[int, ...]
    query: torch.Tensor
    served: bool = False
    chosen: torch.Tensor | None = None
    ahead: Future[torch.Tensor] | None = None


@dataclass(slots=True)
class Traffic:
    """Counts over all layers and KV heads.

    Attributes:
        selected: tokens that queries asked for.
        fetched: of these, copied from the host because they were not resident.
        failed: indices that raised; their layers are scanned from then on.
    """

    selected: int = 0
    fetched: int = 0
    failed: int = 0


def read_tokens(
    heap: Heap, layer: int, owned: PageList, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer of a request, in order of position.

    Args:
        owned: the request's pages.
        start, stop: positions; all of them must be there.

    Returns:
        Two [num_kv_heads, stop - start, head_dim].
    """
    heads, size = heap.num_kv_heads, heap.layout.block_size
    rows = slice(layer * heads, (layer + 1) * heads)
    positions = owned.positions[rows]
    used = torch.arange(positions.shape[1]) < owned.owned[rows, None] * size
    row, place = ((positions >= start) & (positions < stop) & used).nonzero(
        as_tuple=True
    )
    assert row.numel() == heads * (stop - start), "tokens to offload are not there"
    place = place.view(heads, -1)
    place = place.gather(1, positions.gather(1, place).argsort(1))
    page = owned.pages[rows].gather(1, place // size)
    keys, values = ops.gather_tokens(
        heap.pages, page.flatten(), (place % size).flatten(), heap.layout
    )
    return keys.view(heads, stop - start, -1), values.view(heads, stop - start, -1)
