"""Base of the compiled indexes, and queries of several indexes in one call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from vllm_kvplugins.errors import coded
from vllm_kvplugins.index import scan
from vllm_kvplugins.index.base import KeyIndex, Pages, TopKeys
from vllm_kvplugins.index.keys import Keys
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for

_CPU = torch.device("cpu")


class CompiledIndex(KeyIndex):
    """An index that the extension holds, behind a handle: one tree per KV head.

    Besides the contract of :class:`KeyIndex` it finds the best keys and pages of each
    query. A *slot* is a token number. A *place* is ``page * page_size + slot in page``,
    where the index stores the key; a key never moves.
    """

    # Limit of a query that states none; 0 is no limit.
    default_visits = 0
    visit_ratio = 1.0

    def __init__(
        self, kind: int, num_heads: int, head_dim: int, page_size: int, *settings: Any
    ) -> None:
        self._handle: int | None = None
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.page_size = page_size
        self._handle = call_compiled(
            "index_create", kind, num_heads, head_dim, page_size, *settings
        )
        # Not __del__: torch may be gone before it runs when the interpreter ends.
        self._destroy = weakref.finalize(
            self, call_compiled, "index_destroy", self._handle
        )

    def close(self) -> None:
        """Free the index, as garbage collection also does; may be called twice."""
        if self._handle is not None:
            self._handle = None
            self._destroy()

    def build(self, keys: Keys, count: int | None = None) -> None:
        """Insert the first ``count`` keys into an empty index; see :meth:`insert`."""
        if self.num_keys:
            raise ValueError(
                f"build() needs an empty index, this one has {self.num_keys} keys; "
                "use insert() to add to it"
            )
        self.insert(keys, count)

    def insert(self, keys: Keys, count: int | None = None) -> None:
        """Add the first ``count`` keys of a description to every head.

        Args:
            keys: the new keys, in the order of their slots, also with ``by_page``.
            count: number of keys; None adds all keys of the description.

        Raises:
            ValueError: an argument does not fit, or a key is not finite or has a norm
                above 1e18. Nothing is added then.
        """
        count = keys.capacity if count is None else count
        call_compiled("index_append", self.handle, keys.data, keys.table, count)

    def append(self, keys: torch.Tensor, first: int) -> None:
        """See :meth:`KeyIndex.append`; the index knows ``first`` itself."""
        self.insert(Keys.dense(keys))

    def select(
        self, queries: torch.Tensor, keys: Keys, scale: float, count: int
    ) -> torch.Tensor:
        """See :meth:`KeyIndex.select` and :func:`select_compiled`."""
        return select_compiled([self], queries, keys, scale, count)

    def query_topk(
        self, queries: torch.Tensor, keys: Keys, k: int, max_visits: int | None = None
    ) -> TopKeys:
        """:func:`query_topk` of one request, without the leading dimension.

        Args:
            queries: [heads, group, head_dim].
        """
        return query_topk([self], queries, keys, k, max_visits)

    def query_pages(
        self,
        queries: torch.Tensor,
        keys: Keys,
        k: int,
        max_pages: int,
        max_visits: int | None = None,
    ) -> Pages:
        """:func:`query_pages` of one request, without the leading dimension.

        Args:
            queries: [heads, group, head_dim].
        """
        return query_pages([self], queries, keys, k, max_pages, max_visits)

    def places(self, first: int = 0) -> torch.Tensor:
        """int64 [heads, num_keys - first]: places of slots ``first`` and later."""
        return call_compiled("index_places", self.handle, first)

    def order(self, first: int) -> torch.Tensor:
        """See :meth:`PageIndex.order`; no rows unless the index has such pages."""
        return call_compiled("index_order", self.handle, first)

    def check_integrity(self, keys: Keys) -> None:
        """Raise AssertionError if the structure of the index is damaged.

        Cost: that of building, in double precision.
        """
        fault = call_compiled(
            "index_check", self.handle, keys.data, keys.table, keys.by_page
        )
        if fault:
            raise AssertionError(f"index is damaged: {fault}")

    @property
    def handle(self) -> int:
        """The number by which compiled ops refer to this index."""
        if self._handle is None:
            raise ValueError("this index has been closed")
        return self._handle

    @property
    def num_keys(self) -> int:
        """Keys per head."""
        return self._stats()[0]

    @property
    def num_pages(self) -> list[int]:
        """Pages of each head."""
        return self._stats()[2:]

    @property
    def memory_bytes(self) -> int:
        """Bytes that the index holds, without the keys."""
        return self._stats()[1]

    def _stats(self) -> list[int]:
        results: list[int] = call_compiled("index_stats", self.handle).tolist()
        return results


def query_topk(
    indexes: Sequence[CompiledIndex],
    queries: torch.Tensor,
    keys: Keys,
    k: int,
    max_visits: int | None = None,
) -> TopKeys:
    """The best keys of every query, for several requests in one call.

    IceCache algorithm 4. Does not modify the indexes; queries of one index may run
    at the same time in several threads.

    Args:
        indexes: one per request, of the same heads and head_dim.
        queries: float32 or bfloat16 [requests, heads, group, head_dim], or of one
            request without the first dimension, which the result then lacks, too; the
            queries of a group share a KV head (grouped-query attention).
        keys: the memory of all requests' indexed keys.
        k: keys per query.
        max_visits: approximate number of keys scored per query; 0 is no limit. None:
            the setting of the first index.

    Returns:
        :class:`TopKeys` with a leading dimension for requests.

    Raises:
        ValueError: a shape, dtype or number does not fit, or a query is not finite.

    Cost: see the classes; no Python work per request or head.
    """
    if any(_torch_keys(index) is not None for index in indexes):
        results = _torch_topk(indexes, _with_requests(queries), keys, k)
        return results if queries.dim() == 4 else TopKeys(*(x[0] for x in results))
    return TopKeys(*_ask("index_topk", indexes, queries, keys, k, max_visits))


def query_pages(
    indexes: Sequence[CompiledIndex],
    queries: torch.Tensor,
    keys: Keys,
    k: int,
    max_pages: int,
    max_visits: int | None = None,
) -> Pages:
    """The pages that hold the best keys, for several requests in one call.

    IceCache algorithm 3; the queries of a KV head share the union of their pages
    (section 4.2), in the order of rank, cut off at ``max_pages``.

    Args:
        indexes, queries, keys, k, max_visits: as for :func:`query_topk`.
        max_pages: largest number of pages per KV head.

    Returns:
        :class:`Pages` with a leading dimension for requests.

    Raises:
        ValueError: as :func:`query_topk`.

    Cost: that of :func:`query_topk`.
    """
    if any(_torch_keys(index) is not None for index in indexes):
        slots = _torch_topk(indexes, _with_requests(queries), keys, k).slots
        results = [
            scan.pages(slots[r], index.places(), index.page_size, max_pages)
            for r, index in enumerate(indexes)
        ]
        if queries.dim() == 3:
            return Pages(*results[0])
        return Pages(*(torch.stack(part) for part in zip(*results, strict=True)))
    return Pages(*_ask("index_pages", indexes, queries, keys, k, max_visits, max_pages))


def select_compiled(
    indexes: Sequence[CompiledIndex],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """The keys that all queries of a KV head together attend to most, in one call.

    Every query scores keys as its index does (a ``DCIIndex`` about ``max_visits`` of
    them, a ``BruteForceIndex`` all) and distributes one vote over them by its softmax.
    The votes of a group add up. Differs from IceCache, section 4.2, which joins the
    best keys of each query without weights. Sinks and window would scale all votes of
    a query alike, so they can be left out.

    Args:
        indexes: one per request, of the same heads and head_dim; trees and scans may
            be mixed. The trees must have the same settings.
        queries: float32 or bfloat16 [requests, heads, group, head_dim], or of one
            request without the first dimension, which the result then lacks, too.
        keys: the memory of all requests' indexed keys.
        scale: softmax scale.
        count: keys per KV head.

    Returns:
        int64 [requests, heads, count], distinct, best first, the lower slot first
        among equals; -1 where fewer keys were scored.

    Raises:
        ValueError: a shape, dtype or number does not fit; a query is not finite.

    Cost: that of :func:`query_topk`, and one exponential per key scored; per request
    and head no Python work except a list of handles.
    """
    if not indexes:
        raise ValueError("kvp.index_select: there must be at least one index")
    if any(getattr(index, "_torch_keys", None) is not None for index in indexes):
        counts = [index.num_keys for index in indexes]
        chosen = scan.scan_in_torch(counts, _with_requests(queries), keys, scale, count)
        return chosen if queries.dim() == 4 else chosen[0]
    return call_compiled(
        "index_select",
        _as_tensor(tuple(index.handle for index in indexes)),
        queries.contiguous(),
        keys.data,
        keys.table,
        keys.by_page,
        max(index.default_visits for index in indexes),
        min(index.visit_ratio for index in indexes),
        scale,
        count,
    )


def select_pages_compiled(
    indexes: Sequence[CompiledIndex],
    queries: torch.Tensor,
    keys: Keys,
    scale: float,
    count: int,
) -> torch.Tensor:
    """The pages that all queries of a KV head together attend to most, in one call.

    Every query distributes one vote over the keys that it scores, by its softmax. A
    page has the votes of its keys.

    Args:
        indexes: one per request, of the same heads and head_dim; no trees.
        queries, scale: see :func:`select_compiled`.
        keys: the memory of all requests' indexed keys, in the order of pages.
        count: pages per KV head.

    Returns:
        int64 [requests, heads, count], without the dimension of requests if queries
        lack it; see :meth:`PageIndex.select_pages`.

    Raises:
        ValueError: as :func:`select_compiled`.

    Cost: that of :func:`select_compiled`.
    """
    return call_compiled(
        "index_select_pages",
        _as_tensor(tuple(index.handle for index in indexes)),
        queries.contiguous(),
        keys.data,
        keys.table,
        max(index.default_visits for index in indexes),
        scale,
        count,
    )


@functools.lru_cache(maxsize=4096)
def _as_tensor(handles: tuple[int, ...]) -> torch.Tensor:
    """int64 [n]; cached, because the same requests select step after step."""
    return torch.tensor(handles)


def _ask(
    op: str,
    indexes: Sequence[CompiledIndex],
    queries: torch.Tensor,
    keys: Keys,
    k: int,
    max_visits: int | None,
    *more: int,
) -> Any:
    if not indexes:
        raise ValueError(f"kvp.{op}: there must be at least one index")
    first = indexes[0]
    visits = first.default_visits if max_visits is None else max_visits
    return call_compiled(
        op,
        _as_tensor(tuple(index.handle for index in indexes)),
        queries.contiguous(),
        keys.data,
        keys.table,
        keys.by_page,
        k,
        visits,
        first.visit_ratio,
        *more,
    )


def _with_requests(queries: torch.Tensor) -> torch.Tensor:
    return queries if queries.dim() == 4 else queries[None]


def _torch_keys(index: CompiledIndex) -> int | None:
    return getattr(index, "_torch_keys", None)


def _torch_topk(
    indexes: Sequence[CompiledIndex], queries: torch.Tensor, keys: Keys, k: int
) -> TopKeys:
    if k < 1:
        raise ValueError(f"kvp.index_topk: k must be positive, got {k}")
    if not bool(queries.isfinite().all()):
        raise ValueError("kvp.index_topk: an element of queries is not finite")
    gathered = keys.gather()
    results = [
        scan.topk(queries[r, None], gathered[r, None, :, : index.num_keys], k)
        for r, index in enumerate(indexes)
    ]
    return TopKeys(*(torch.cat(part) for part in zip(*results, strict=True)))


def extension_problem() -> str:
    """Why the compiled index cannot be used; empty if it can."""
    return compiled_for(_CPU)[1]


def require_extension(feature: str) -> None:
    """Raise RuntimeError with the remedy if the compiled index cannot be used."""
    problem = extension_problem()
    if problem:
        raise RuntimeError(
            coded(
                "KVP403",
                f"{feature} needs the compiled extension ({problem}). Build it in the "
                "source tree with a C++ compiler and CMake (pip install "
                "--no-build-isolation .), or use BruteForceIndex, which also runs in "
                "torch",
            )
        )
