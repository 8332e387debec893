"""The indices of offloaded tokens, built in parallel to the model.

A helper thread builds an index while later layers compute (IceCache, figure 5b), and
while later blocks of a prompt are read; the compiled code releases the interpreter lock
meanwhile. The first selection waits for an index, unless it is lazy: until it is built,
its tokens are scanned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import cast

import torch

from vllm_kvplugins.index import ExactScan, KeyIndex, Keys, PageIndex
from vllm_kvplugins.ops.threads import Helper
from vllm_kvplugins.policies.retrieval import Retriever

# vLLM configures only the loggers below its own name.
logger = logging.getLogger("vllm.kv_policy")


@dataclass(slots=True)
class OffloadedLayer:
    """The index of one layer of a request.

    Attributes:
        tokens: number of tokens appended or being appended; fewer than are on the host
            if a session was continued earlier than its end.
        pending: its appends that may still be running, oldest first.
        meanwhile: the scan to use until then, if the index is lazy.
    """

    index: KeyIndex
    meanwhile: KeyIndex | None = None
    tokens: int = 0
    pending: list[Future[None]] = field(default_factory=list)


class Indexer:
    """Appends to indices and selects from them; replaces an index that fails by a scan.

    Args:
        policy: the policy that creates the indices.
        on_failure: called when an index has failed.
    """

    def __init__(self, policy: Retriever, on_failure: Callable[[], None]) -> None:
        self._policy = policy
        self._pages = policy.page_selection
        self._on_failure = on_failure
        # One thread, so that appends to an index keep their order.
        self._thread = Helper("kvp-index")

    def new_layer(self, num_kv_heads: int, head_dim: int) -> OffloadedLayer:
        """An empty index."""
        index = self._policy.new_index(num_kv_heads, head_dim)
        if not self._policy.builds_lazily:
            return OffloadedLayer(index)
        return OffloadedLayer(index, self._policy.scan(num_kv_heads, head_dim))

    def keep_first(self, layer: OffloadedLayer, tokens: int) -> bool:
        """Let an index forget all but the first tokens, or some more of them.

        Whoever inserts or selects next appends what is missing again. Waits for pending
        appends, which read memory of the session.

        Returns:
            False if it cannot, and has not changed.
        """
        if layer.meanwhile is not None:
            done = all(append.done() for append in layer.pending)
            return done and layer.tokens <= tokens
        self._collect(layer)
        if layer.tokens <= tokens:
            return True
        kept = layer.index.keep_first(tokens)
        layer.tokens = kept or layer.tokens
        return kept > 0

    def insert(
        self,
        layer: OffloadedLayer,
        tokens: range,
        read: Callable[[], torch.Tensor],
    ) -> None:
        """Start to append the keys of the next tokens.

        Args:
            layer: the layer of a request.
            tokens: their indices, from ``layer.tokens`` on.
            read: returns their keys, [num_kv_heads, n, head_dim], on another thread.
                The memory that it reads must not change while the index is in use; an
                index that is no longer used may read other keys.
        """
        assert tokens.start == layer.tokens, "tokens of an index are missing"
        layer.tokens = tokens.stop
        appended = self._thread.submit(_append, layer.index, read, tokens.start)
        layer.pending.append(appended)
        if layer.meanwhile is None:
            return
        try:
            layer.meanwhile.append(read(), tokens.start)
        except (RuntimeError, ValueError) as error:
            self._scan_instead(layer, error)

    def select(
        self,
        layers: Sequence[OffloadedLayer],
        queries: torch.Tensor,
        keys: Keys,
        scale: float,
        count: int,
    ) -> torch.Tensor:
        """Select from the indices of several requests; see ``Retriever.select``.

        A policy that fetches whole pages selects pages, see ``PageSelection.select``;
        ``count`` counts pages then, and ``keys`` are in their order.
        """
        indices = [self._ready(layer) for layer in layers]
        try:
            if self._pages is not None:
                paged = cast(list[PageIndex], indices)
                return self._pages.select(paged, queries, keys, scale, count)
            return self._policy.select(indices, queries, keys, scale, count)
        except (RuntimeError, ValueError) as error:
            if len(layers) == 1:
                scan = self._scan_instead(layers[0], error)
                choose = scan.select if self._pages is None else scan.select_pages
                return choose(queries[0], keys, scale, count)[None]
        # One index failed: select one by one, so that the others keep their indices.
        chosen = [
            self.select([layer], queries[i : i + 1], keys.of(i), scale, count)
            for i, layer in enumerate(layers)
        ]
        return torch.cat(chosen)

    def order(self, layer: OffloadedLayer, first: int) -> torch.Tensor | None:
        """See ``PageIndex.order``; None if the index is lazy and not built yet."""
        index = self._ready(layer)
        if index is not layer.index:
            return None
        try:
            return cast(PageIndex, index).order(first)
        except (RuntimeError, ValueError) as error:
            return self._scan_instead(layer, error).order(first)

    def _ready(self, layer: OffloadedLayer) -> KeyIndex:
        if layer.meanwhile is not None and not all(
            append.done() for append in layer.pending
        ):
            return layer.meanwhile
        self._collect(layer)
        return layer.index

    def _collect(self, layer: OffloadedLayer) -> None:
        """Wait for the pending appends; replace the index if one of them failed."""
        pending, layer.pending = layer.pending, []
        try:
            for append in pending:
                append.result()
        except (RuntimeError, ValueError) as error:
            self._scan_instead(layer, error)

    def _scan_instead(self, layer: OffloadedLayer, error: Exception) -> ExactScan:
        """Replace a failed index by a scan, so that the server keeps running."""
        self._on_failure()
        logger.warning(
            "KV policy: an index failed; all its keys are scanned instead: %s", error
        )
        layer.index = scan = ExactScan(layer.tokens)
        layer.meanwhile, layer.pending = None, []
        return scan


def _append(index: KeyIndex, read: Callable[[], torch.Tensor], first: int) -> None:
    index.append(read(), first)
