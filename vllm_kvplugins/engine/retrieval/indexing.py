"""The indices of offloaded tokens: built beside the computation, and replaceable.

An index is built on a thread of its own while later layers compute (IceCache fig.
5b). The compiled code holds no interpreter lock meanwhile. A lazy one is not waited
for: until it is there, its tokens are scanned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from vllm_kvplugins.index import ExactScan, KeyIndex, Keys
from vllm_kvplugins.ops.threads import helper
from vllm_kvplugins.policies.retrieval import Retriever

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")


@dataclass(slots=True)
class OffloadedLayer:
    """The index of one layer of a request.

    Attributes:
        tokens: how many have been handed to it.
        under_way: its last addition, if that may not be over.
        meanwhile: what to ask until then, if it is lazy.
    """

    index: KeyIndex
    meanwhile: KeyIndex | None = None
    tokens: int = 0
    under_way: Future[None] | None = None


class Indexer:
    """Adds to indices and asks them; where one fails, its tokens are scanned.

    Args:
        failed: called when an index has failed.
    """

    def __init__(self, policy: Retriever, failed: Callable[[], None]) -> None:
        self._policy = policy
        self._failed = failed
        # one thread: additions to an index keep their order
        self._thread = helper("kvp-index")

    def new_layer(self, num_kv_heads: int, head_dim: int) -> OffloadedLayer:
        """An empty index."""
        index = self._policy.new_index(num_kv_heads, head_dim)
        if not self._policy.builds_lazily:
            return OffloadedLayer(index)
        return OffloadedLayer(index, self._policy.scan(num_kv_heads, head_dim))

    def insert(
        self,
        layer: OffloadedLayer,
        keys: torch.Tensor,
        first: int,
        read: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        """Start to add [num_kv_heads, n, head_dim] of the next tokens.

        Args:
            first: number of the first one.
            read: reads the same keys when it is their turn, so that ``keys`` need not
                be kept until then. Nobody may write there while the index is asked;
                one that nobody asks any more may find another's keys.
        """
        layer.tokens = first + keys.shape[1]
        if read is None:
            layer.under_way = self._thread.submit(layer.index.append, keys, first)
        else:
            layer.under_way = self._thread.submit(_append, layer.index, read, first)
        if layer.meanwhile is None:
            return
        try:
            layer.meanwhile.append(keys, first)
        except (RuntimeError, ValueError) as error:
            self._scan_instead(layer, error)

    def settle(self, layer: OffloadedLayer) -> None:
        """Wait until an index that is not lazy has all that it was given."""
        if layer.meanwhile is None:
            self._collect(layer)

    def select(
        self,
        layers: Sequence[OffloadedLayer],
        queries: torch.Tensor,
        keys: Keys,
        scale: float,
        count: int,
    ) -> torch.Tensor:
        """Ask the indices of several requests; see ``Retriever.select``."""
        indices = [self._ready(layer) for layer in layers]
        try:
            return self._policy.select(indices, queries, keys, scale, count)
        except (RuntimeError, ValueError) as error:
            if len(layers) == 1:
                self._scan_instead(layers[0], error)
                return layers[0].index.select(queries[0], keys, scale, count)[None]
        # One of them failed: ask one by one, so that the others keep theirs.
        chosen = [
            self.select([layer], queries[i : i + 1], keys.of(i), scale, count)
            for i, layer in enumerate(layers)
        ]
        return torch.cat(chosen)

    def _ready(self, layer: OffloadedLayer) -> KeyIndex:
        if layer.under_way is None:
            return layer.index
        if layer.meanwhile is not None and not layer.under_way.done():
            return layer.meanwhile
        self._collect(layer)
        return layer.index

    def _collect(self, layer: OffloadedLayer) -> None:
        """The addition under way is over; learn whether it went well."""
        if layer.under_way is None:
            return
        try:
            layer.under_way.result()
        except (RuntimeError, ValueError) as error:
            self._scan_instead(layer, error)
        layer.under_way = None

    def _scan_instead(self, layer: OffloadedLayer, error: Exception) -> None:
        """One request's index must not end the server: scan its keys instead."""
        self._failed()
        logger.warning("an index failed, its keys are scanned instead: %s", error)
        layer.index, layer.meanwhile = ExactScan(layer.tokens), None
        layer.under_way = None


def _append(index: KeyIndex, read: Callable[[], torch.Tensor], first: int) -> None:
    index.append(read(), first)
