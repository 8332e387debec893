"""The indices of offloaded tokens, built in parallel to the model.

A helper thread builds an index while later layers compute (IceCache, figure 5b); the
compiled code releases the interpreter lock meanwhile. The engine does not wait for a
lazy index: until it is built, its tokens are scanned.
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
        tokens: number of tokens appended or being appended.
        pending: its last append, if it may still be running.
        meanwhile: the scan to use until then, if the index is lazy.
    """

    index: KeyIndex
    meanwhile: KeyIndex | None = None
    tokens: int = 0
    pending: Future[None] | None = None


class Indexer:
    """Appends to indices and selects from them; replaces an index that fails by a scan.

    Args:
        policy: the policy that creates the indices.
        on_failure: called when an index has failed.
    """

    def __init__(self, policy: Retriever, on_failure: Callable[[], None]) -> None:
        self._policy = policy
        self._on_failure = on_failure
        # One thread, so that appends to an index keep their order.
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
        """Start to append the keys of the next tokens.

        Args:
            layer: the layer of a request.
            keys: [num_kv_heads, n, head_dim].
            first: index of the first of these tokens.
            read: reads the same keys later, so that ``keys`` need not be kept until
                then. That memory must not change while the index is in use; an index
                that is no longer used may read other keys.
        """
        layer.tokens = first + keys.shape[1]
        if read is None:
            layer.pending = self._thread.submit(layer.index.append, keys, first)
        else:
            layer.pending = self._thread.submit(_append, layer.index, read, first)
        if layer.meanwhile is None:
            return
        try:
            layer.meanwhile.append(keys, first)
        except (RuntimeError, ValueError) as error:
            self._scan_instead(layer, error)

    def wait(self, layer: OffloadedLayer) -> None:
        """Wait until an index has all its tokens, unless it is lazy."""
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
        """Select from the indices of several requests; see ``Retriever.select``."""
        indices = [self._ready(layer) for layer in layers]
        try:
            return self._policy.select(indices, queries, keys, scale, count)
        except (RuntimeError, ValueError) as error:
            if len(layers) == 1:
                self._scan_instead(layers[0], error)
                return layers[0].index.select(queries[0], keys, scale, count)[None]
        # One index failed: select one by one, so that the others keep their indices.
        chosen = [
            self.select([layer], queries[i : i + 1], keys.of(i), scale, count)
            for i, layer in enumerate(layers)
        ]
        return torch.cat(chosen)

    def _ready(self, layer: OffloadedLayer) -> KeyIndex:
        if layer.pending is None:
            return layer.index
        if layer.meanwhile is not None and not layer.pending.done():
            return layer.meanwhile
        self._collect(layer)
        return layer.index

    def _collect(self, layer: OffloadedLayer) -> None:
        """Wait for the pending append; replace the index if it failed."""
        if layer.pending is None:
            return
        try:
            layer.pending.result()
        except (RuntimeError, ValueError) as error:
            self._scan_instead(layer, error)
        layer.pending = None

    def _scan_instead(self, layer: OffloadedLayer, error: Exception) -> None:
        """Replace a failed index by a scan, so that the server keeps running."""
        self._on_failure()
        logger.warning(
            "KV policy: an index failed; all its keys are scanned instead: %s", error
        )
        layer.index, layer.meanwhile = ExactScan(layer.tokens), None
        layer.pending = None


def _append(index: KeyIndex, read: Callable[[], torch.Tensor], first: int) -> None:
    index.append(read(), first)
