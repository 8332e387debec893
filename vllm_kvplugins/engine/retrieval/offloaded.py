"""Requests with tokens in the host tier, and what a step fetches for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm_kvplugins.engine.retrieval.indexing import OffloadedLayer
from vllm_kvplugins.engine.retrieval.row_order import RowOrder
from vllm_kvplugins.index.device_codes import CodeSpace
from vllm_kvplugins.ops.device import AsyncHostCopy


@dataclass(frozen=True, slots=True)
class MeanRun:
    """Entries for the means of a request's chunks.

    Attributes:
        first: the first entry, in every layer that offloads.
        room: entries of each KV head, one head after the other; 0: there are none.
    """

    first: int = 0
    room: int = 0


@dataclass(slots=True, eq=False)
class Offloaded:
    """A request that has tokens in the host tier.

    Attributes:
        slot_index: its row in the hot slots.
        first_layer: the first layer that offloads; all later ones do.
        pages: int64 [layers, num_kv_heads, n], its pages of the host tier.
        tokens: number of tokens on the host; the same in all layers.
        layers: its index per layer that selects; empty if the device selects.
        spaces: the space of its codes per layer that selects, if the device selects.
        orders: per layer whose tokens are not in the order of arrival, their order.
        hot: hot slots per KV head, per layer; empty before the first compaction.
        prefetched: its hot slots are being filled for the next step.
        means: the means of its chunks, while it runs.
        host_means: keys and values of these means, [layers, num_kv_heads, chunks,
            head_dim], while its session waits.
    """

    slot_index: int
    first_layer: int
    pages: torch.Tensor
    tokens: int = 0
    layers: dict[int, OffloadedLayer] = field(default_factory=dict)
    spaces: dict[int, CodeSpace] = field(default_factory=dict)
    orders: dict[int, RowOrder] = field(default_factory=dict)
    hot: dict[int, int] = field(default_factory=dict)
    prefetched: bool = False
    means: MeanRun = MeanRun()
    host_means: list[torch.Tensor] = field(default_factory=list)

    def table(self, layer: int) -> torch.Tensor:
        """int64 [num_kv_heads, n], its host pages of a layer."""
        return self.pages[layer - self.first_layer]

    def tables(self, layers: range) -> torch.Tensor:
        """int64 [layers * num_kv_heads, n], its host pages of some layers."""
        first, stop = layers.start - self.first_layer, layers.stop - self.first_layer
        return self.pages[first:stop].flatten(0, 1)


@dataclass(slots=True, eq=False)
class OnDevice:
    """What a device needs to select for a batch.

    Attributes:
        slot_indices, lengths: int64 [requests], rows of hot slots, and host tokens.
        counts: int64 [layers, requests], hot slots.
        num_tokens: the largest of the lengths.
        widths: the largest of the counts, per layer.
        votes: float32 [requests, num_kv_heads, n], for the tokens of the last layer
            that selected.
    """

    slot_indices: torch.Tensor
    lengths: torch.Tensor
    counts: torch.Tensor
    num_tokens: int
    widths: list[int]
    votes: torch.Tensor | None = None


@dataclass(slots=True)
class Batch:
    """Requests of a step with the same number of new tokens.

    Attributes:
        request_ids: their ids, in the order of ``states``.
        slot_indices: int64 [requests], on the host.
        slot_numbers: the same as Python ints.
        query: int64 [requests * selecting queries], rows of the step's queries, on
            their device.
        prefetched: the previous step filled its hot slots.
        selected: the tokens that the last anchor layer selected.
        next_layer: the fetch for the next layer, pending on another thread.
        next_step: see :meth:`for_next_step`.
        on_device: set if the device selects.
    """

    request_ids: tuple[str, ...]
    states: list[Offloaded]
    slot_indices: torch.Tensor
    slot_numbers: tuple[int, ...]
    query: torch.Tensor
    prefetched: bool = False
    selected: torch.Tensor | None = None
    next_layer: Future[Fetched] | None = None
    next_step: Batch | None = None
    on_device: OnDevice | None = None

    def for_next_step(self) -> Batch:
        """A batch of the same requests for the helper thread, whose selection for the
        next step must not replace this step's."""
        if self.next_step is None:
            self.next_step = Batch(
                self.request_ids,
                self.states,
                self.slot_indices,
                self.slot_numbers,
                self.query,
            )
        return self.next_step

    def copy_queries(self, queries: torch.Tensor, num_kv_heads: int) -> AsyncHostCopy:
        """Start to copy the selecting queries to the host; see ``selecting``."""
        return AsyncHostCopy(self.selecting(queries, num_kv_heads))

    def selecting(self, queries: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """The selecting queries of these requests, a copy.

        Args:
            queries: [step tokens, num_q_heads, head_dim].

        Returns:
            [requests, num_kv_heads, group * new tokens, head_dim].
        """
        requests = len(self.states)
        own = queries.index_select(0, self.query)
        if own.shape[0] == requests:
            return own.view(requests, num_kv_heads, -1, own.shape[2])
        group = own.shape[1] // num_kv_heads
        own = own.view(requests, -1, num_kv_heads, group, own.shape[2])
        return own.permute(0, 2, 3, 1, 4).flatten(2, 3)


class Fetched(NamedTuple):
    """Result of one fetch of a layer for a batch.

    Attributes:
        copied: int64 [requests], number of copied tokens.
        done: the event after the copies, if another stream of a GPU made them.
    """

    copied: torch.Tensor
    done: torch.cuda.Event | None = None

    def join(self) -> torch.Tensor:
        """Make the current stream wait for the copies; return ``copied``."""
        if self.done is not None:
            self.done.wait()
        return self.copied
