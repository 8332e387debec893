"""Requests whose tokens lie in the host tier, and what a step fetches for them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm_kvplugins.engine.retrieval.indexing import OffloadedLayer
from vllm_kvplugins.ops.device import AsyncHostCopy


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

    slot_index: int
    tokens: int = 0
    pages: dict[int, torch.Tensor] = field(default_factory=dict)
    layers: dict[int, OffloadedLayer] = field(default_factory=dict)
    hot: dict[int, int] = field(default_factory=dict)
    served: bool = False


@dataclass(slots=True)
class Batch:
    """Requests of a step with equally many new tokens.

    Attributes:
        seats: int64 [requests], on the host; also as numbers.
        query: int64 [requests * new tokens], rows among the step's queries, on their
            device.
        chosen: what the last anchor layer selected.
        served: its hot slots were filled during the step before.
        ahead: what the next layer fetches, under way on another thread.
        later: see :meth:`for_next_step`.
    """

    states: list[Offloaded]
    slot_indices: torch.Tensor
    slot_numbers: tuple[int, ...]
    query: torch.Tensor
    served: bool = False
    chosen: torch.Tensor | None = None
    ahead: Future[Fetched] | None = None
    later: Batch | None = None

    def for_next_step(self) -> Batch:
        """The same requests for another thread: what is chosen there for the step to
        come is not what this step's layers are filled with."""
        if self.later is None:
            self.later = Batch(
                self.states, self.slot_indices, self.slot_numbers, self.query
            )
        return self.later

    def asked(self, queries: torch.Tensor, num_kv_heads: int) -> AsyncHostCopy:
        """A copy of these requests' queries, on its way to the host.

        Args:
            queries: [step tokens, num_q_heads, head_dim].

        Returns:
            [requests, num_kv_heads, group * new tokens, head_dim].
        """
        requests = len(self.states)
        own = queries.index_select(0, self.query)
        if own.shape[0] == requests:
            return AsyncHostCopy(own.view(requests, num_kv_heads, -1, own.shape[2]))
        group = own.shape[1] // num_kv_heads
        own = own.view(requests, -1, num_kv_heads, group, own.shape[2])
        return AsyncHostCopy(own.permute(0, 2, 3, 1, 4).flatten(2, 3))


class Fetched(NamedTuple):
    """What one layer of a batch was given.

    Attributes:
        copied: int64 [requests], tokens.
        done: on a GPU, when they are there, if another stream brings them.
    """

    copied: torch.Tensor
    done: torch.cuda.Event | None = None

    def join(self) -> torch.Tensor:
        """Let the current stream go on behind it; returns what was copied."""
        if self.done is not None:
            self.done.wait()
        return self.copied
