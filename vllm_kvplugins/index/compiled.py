"""What the compiled indexes share, and queries over several of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from vllm_kvplugins.errors import coded
from vllm_kvplugins.index import reference
from vllm_kvplugins.index.base import Pages, TopKeys
from vllm_kvplugins.index.keys import Keys
from vllm_kvplugins.ops.dispatch import call_compiled
from vllm_kvplugins.ops.extension import compiled_for

_CPU = torch.device("cpu")


class CompiledIndex:
    """An index that lives in the extension, behind a handle."""

    # Of a query without one of its own; 0 is no limit.
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
        # Not __del__: when the interpreter ends, torch may be gone before it.
        self._destroy = weakref.finalize(
            self, call_compiled, "index_destroy", self._handle
        )

    def close(self) -> None:
        """See :meth:`KeyIndex.close`; a second call does nothing."""
        if self._handle is not None:
            self._handle = None
            self._destroy()

    def build(self, keys: Keys, count: int | None = None) -> None:
        """See :meth:`KeyIndex.build`."""
        if self.num_keys:
            raise ValueError(
                f"build() needs an empty index, this one has {self.num_keys} keys; "
                "use insert() to add to it"
            )
        self.insert(keys, count)

    def insert(self, keys: Keys, count: int | None = None) -> None:
        """See :meth:`KeyIndex.insert`.

        Args:
            keys: the new keys, from slot 0 of the description on; in the order of
                their slots, whatever ``by_page`` says.
            count: how many of them; all that the description has if None.

        Raises:
            ValueError: something does not fit, or a key is not finite or has a
                norm above 1e18. Nothing was added then.
        """
        count = keys.capacity if count is None else count
        call_compiled("index_append", self.handle, keys.data, keys.table, count)

    def query_topk(
        self, queries: torch.Tensor, keys: Keys, k: int, max_visits: int | None = None
    ) -> TopKeys:
        """See :func:`query_topk`, here for one request: no leading dimension.

        Args:
            queries: [heads, group, head_dim].
        """
        found = query_topk([self], queries.unsqueeze(0), keys, k, max_visits)
        return TopKeys(*(tensor[0] for tensor in found))

    def query_pages(
        self,
        queries: torch.Tensor,
        keys: Keys,
        k: int,
        max_pages: int,
        max_visits: int | None = None,
    ) -> Pages:
        """See :func:`query_pages`, here for one request: no leading dimension.

        Args:
            queries: [heads, group, head_dim].
        """
        found = query_pages(
            [self], queries.unsqueeze(0), keys, k, max_pages, max_visits
        )
        return Pages(*(tensor[0] for tensor in found))

    def places(self, first: int = 0) -> torch.Tensor:
        """See :meth:`KeyIndex.places`."""
        return call_compiled("index_places", self.handle, first)

    def check_integrity(self, keys: Keys) -> None:
        """See :meth:`KeyIndex.check_integrity`.

        Cost: that of building, in double precision.
        """
        fault = call_compiled(
            "index_check", self.handle, keys.data, keys.table, keys.by_page
        )
        if fault:
            raise AssertionError(f"index is damaged: {fault}")

    @property
    def handle(self) -> int:
        """What the compiled ops know it by."""
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
        """Bytes that the index holds; keys are not among them."""
        return self._stats()[1]

    def _stats(self) -> list[int]:
        found: list[int] = call_compiled("index_stats", self.handle).tolist()
        return found


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
        queries: float32 or bfloat16 [requests, heads, group, head_dim]; the
            queries of a group share a KV head (grouped-query attention).
        keys: where the indexed keys of all requests lie.
        k: keys per query.
        max_visits: keys looked at per query, about; 0 is no limit. None: what the
            first index was made with.

    Returns:
        :class:`TopKeys` with a leading dimension for requests.

    Raises:
        ValueError: a shape, dtype or number does not fit; a query is not finite.

    Cost: see the classes; no Python work per request or head.
    """
    if any(_torch_keys(index) is not None for index in indexes):
        return _torch_topk(indexes, queries, keys, k)
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
        max_pages: pages per KV head at most.

    Returns:
        :class:`Pages` with a leading dimension for requests.

    Raises:
        ValueError: as :func:`query_topk`.

    Cost: that of :func:`query_topk`.
    """
    if any(_torch_keys(index) is not None for index in indexes):
        slots = _torch_topk(indexes, queries, keys, k).slots
        found = [
            reference.pages(slots[r], index.places(), index.page_size, max_pages)
            for r, index in enumerate(indexes)
        ]
        return Pages(*(torch.stack(part) for part in zip(*found, strict=True)))
    return Pages(*_ask("index_pages", indexes, queries, keys, k, max_visits, max_pages))


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
    handles = torch.tensor([index.handle for index in indexes])
    return call_compiled(
        op,
        handles,
        queries.contiguous(),
        keys.data,
        keys.table,
        keys.by_page,
        k,
        visits,
        first.visit_ratio,
        *more,
    )


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
    found = [
        reference.topk(queries[r, None], gathered[r, None, :, : index.num_keys], k)
        for r, index in enumerate(indexes)
    ]
    return TopKeys(*(torch.cat(part) for part in zip(*found, strict=True)))


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
                f"{feature} needs the compiled extension ({problem}). Install with a "
                "C++ compiler and CMake: KVP_BUILD=require pip install "
                "--no-build-isolation -e . Or use BruteForceIndex, which also runs in "
                "torch.",
            )
        )
