"""The host tier: pages of keys and values that are not resident, in host memory."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from vllm_kvplugins.engine.heap import Heap, unscaled
from vllm_kvplugins.engine.retrieval.pinned import PinnedArena
from vllm_kvplugins.engine.retrieval.row_order import RowOrder
from vllm_kvplugins.free_memory import available_bytes
from vllm_kvplugins.index import Keys
from vllm_kvplugins.ops.device import Reads
from vllm_kvplugins.ops.hot_set import HostPages
from vllm_kvplugins.ops.large_buffer import large_buffer
from vllm_kvplugins.ops.quantized_rows import QuantizedRows

if TYPE_CHECKING:
    from vllm_kvplugins.policies.retrieval import Retriever


class HostTier:
    """One arena of pages for all requests, layers and KV heads of a worker.

    A page holds keys and values of ``page_tokens`` tokens of one KV head. The arena
    is reserved at start-up, but memory is committed only as pages are first written.
    Freed pages are reused first. Without a reader, the kernel is asked for huge pages.

    Full pages may have several owners, which share the first tokens of a conversation.
    Nobody writes to a page that is shared.

    Tokens lie in the order of arrival, unless a :class:`RowOrder` says otherwise.

    Rows may be quantized: ``write`` quantizes, and ``fill_hot``, ``read_keys`` and the
    indices dequantize. Nothing else reads the rows.

    The rows of an fp8 cache are copies of its elements, without a scale: the caller
    multiplies by the scale of the layer what it computes with them.

    A GPU that reads pages itself does so asynchronously. Pages released meanwhile stay
    quarantined until those reads are done, so that no one overwrites them.

    Args:
        limit_bytes: limit of the memory of all pages together.
        page_tokens: tokens per page.
        head_dim: elements per key and per value.
        dtype: the cache's; uint8 for fp8 elements.
        quantized: the format of quantized rows; None: rows have the cache's dtype.
        fp8: the dtype of fp8 elements; None: they are plain.
        reader: a GPU that reads pages itself; pages are then pinned before ``take``
            returns them. It cannot read quantized rows.
        always: the reader has no other way to get tokens, so all pages are pinned now.

    Raises:
        RuntimeError: the reader cannot read host memory, or pinning fails.
    """

    def __init__(
        self,
        limit_bytes: int,
        page_tokens: int,
        head_dim: int,
        dtype: torch.dtype,
        reader: torch.device | None = None,
        quantized: QuantizedRows | None = None,
        fp8: torch.dtype | None = None,
        always: bool = False,
    ) -> None:
        coded_rows = quantized is not None or fp8 is not None
        assert reader is None or not coded_rows, "refused at start-up"
        assert quantized is None or fp8 is None, "refused at start-up"
        self.quantized, self.fp8 = quantized, fp8
        width = head_dim
        if quantized is not None:
            width, dtype = quantized.row_bytes, torch.uint8
        self.page_bytes = 2 * page_tokens * width * dtype.itemsize
        count = limit_bytes // self.page_bytes
        # [num_pages, 2 (keys, values), page_tokens, head_dim or row bytes]
        shape = count, 2, page_tokens, width
        self._arena: PinnedArena | None = None
        if reader is None:
            self.pages = large_buffer(count * self.page_bytes).view(dtype).view(shape)
        else:
            self._arena = PinnedArena(count * self.page_bytes, reader)
            if always:
                self._arena.cover_all()
            self.pages = self._arena.memory.view(dtype).view(shape)
        keys = self.pages[:, 0]
        self._keys = keys if fp8 is None else keys.view(fp8)
        self._fresh = 0
        # released pages and the GPU work that may still read them
        self._quarantined: deque[tuple[list[torch.cuda.Event], torch.Tensor]] = deque()
        self._num_quarantined = 0
        self._returned: list[torch.Tensor] = []
        self._num_returned = 0
        # Per page: owners besides the first one. Memory is committed where it is used.
        self._more_owners = torch.zeros(count, dtype=torch.int32)

    @property
    def page_tokens(self) -> int:
        return int(self.pages.shape[2])

    def keys(self, table: torch.Tensor) -> Keys:
        """The keys of some requests, in place.

        Args:
            table: int64 [requests, num_kv_heads, pages].
        """
        return Keys.paged(self._keys, table, quantized=self.quantized)

    def host_pages(self, table: torch.Tensor) -> HostPages:
        """The pages of some requests, to fetch from; see ``keys``."""
        return HostPages(self.pages, table, self.reads, self.quantized)

    @property
    def converts(self) -> bool:
        """Whether rows are read as other elements than the cache's."""
        return self.quantized is not None or self.fp8 is not None

    @property
    def num_free(self) -> int:
        """Number of pages without an owner."""
        returned = self._num_returned + self._num_quarantined
        return len(self.pages) - self._fresh + returned

    @property
    def reads(self) -> Reads | None:
        """Reads of a GPU that reads pages itself; None: tokens go through a staging
        buffer."""
        arena = self._arena
        return arena.reads if arena is not None and arena.complete else None

    def take(self, count: int) -> torch.Tensor:
        """Allocate pages.

        Returns:
            int64 [count], page ids.

        Raises:
            RuntimeError: fewer pages are free; none was allocated.

        Cost: waits for a GPU only if it still reads all remaining free pages, and for
            pinning if new pages are not pinned yet.
        """
        if count > self.num_free:
            raise RuntimeError(
                f"the host tier has {self.num_free} free pages, {count} are requested"
            )
        self._end_quarantine(count)
        parts, missing = [], count
        while missing and self._returned:
            last = self._returned.pop()
            if len(last) > missing:
                self._returned.append(last[missing:])
                last = last[:missing]
            parts.append(last)
            missing -= len(last)
        self._num_returned -= count - missing
        if self._arena is not None:
            self._arena.cover((self._fresh + missing) * self.page_bytes)
        parts.append(torch.arange(self._fresh, self._fresh + missing))
        self._fresh += missing
        return torch.cat(parts)

    def _end_quarantine(self, count: int) -> None:
        """Free pages whose reads are done; wait for reads if too few pages are free."""
        while self._quarantined:
            events, pages = self._quarantined[0]
            unfinished = [event for event in events if not event.query()]
            free = len(self.pages) - self._fresh + self._num_returned
            if unfinished and free >= count:
                return
            for event in unfinished:
                event.synchronize()
            self._quarantined.popleft()
            self._num_quarantined -= len(pages)
            self._put_back(pages)

    # Called between steps, too, but a step may have made the tensor.
    @torch.inference_mode()
    def share(self, pages: torch.Tensor) -> None:
        """Give pages one more owner; each owner releases them."""
        self._more_owners[pages] += 1

    @torch.inference_mode()
    def release(self, pages: torch.Tensor) -> None:
        """Free pages whose last owner gives them up.

        Only reads that a GPU has queued already may still use them.

        Args:
            pages: int64 [n], distinct.
        """
        is_shared = self._more_owners[pages] > 0
        self._more_owners[pages[is_shared]] -= 1
        pages = pages[~is_shared]
        if not len(pages):
            return
        events = self._arena.reads.so_far() if self._arena is not None else []
        if events:
            self._quarantined.append((events, pages))
            self._num_quarantined += len(pages)
        else:
            self._put_back(pages)

    def _put_back(self, pages: torch.Tensor) -> None:
        self._returned.append(pages)
        self._num_returned += len(pages)

    def close(self) -> None:
        """Release the arena; wait for a GPU that reads it. No fetch may follow."""
        if self._arena is not None:
            self._arena.close()

    def write(
        self, table: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store tokens of a request and layer; quantizes if the rows are quantized.

        Args:
            table: int64 [num_kv_heads, pages], the host pages of the layer.
            first: index of the first token.
            keys, values: [num_kv_heads, n, head_dim].
        """
        token = torch.arange(first, first + keys.shape[1])
        page, slot = table[:, token // self.page_tokens], token % self.page_tokens
        for plane, rows in enumerate((keys, values)):
            if self.quantized is not None:
                rows = self.quantized.quantize(rows)
            self.pages[page, plane, slot] = rows

    def read(
        self, table: torch.Tensor, tokens: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of stored keys and values: two [num_kv_heads, n, head_dim].

        ``tokens`` are numbers of rows if the tokens have another order. Quantized and
        fp8 rows become float32. See ``write`` for ``table``.
        """
        return self.read_keys(table, tokens), self._read(table, tokens, 1)

    def read_keys(
        self, table: torch.Tensor, tokens: range, order: RowOrder | None = None
    ) -> torch.Tensor:
        """A copy of stored keys: [num_kv_heads, n, head_dim]; see ``read``."""
        return self._read(table, tokens, 0, order)

    def elements(
        self,
        table: torch.Tensor,
        tokens: torch.Tensor,
        dtype: torch.dtype,
        order: RowOrder | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of some tokens as a cache holds them: fp8 elements stay elements.

        Args:
            table: see ``write``.
            tokens: int64 [n], in any order.
            dtype: of the cache.

        Returns:
            Two [num_kv_heads, n, head_dim], keys and values.
        """
        planes = [self._rows(table, tokens, plane, order) for plane in (0, 1)]
        if self.quantized is not None:
            planes = [self.quantized.dequantize(rows).to(dtype) for rows in planes]
        return planes[0], planes[1]

    def _rows(
        self,
        table: torch.Tensor,
        tokens: torch.Tensor,
        plane: int,
        order: RowOrder | None,
    ) -> torch.Tensor:
        """Keys (plane 0) or values (1) of some tokens, as they are stored."""
        size = self.page_tokens
        if order is None:
            return self.pages[table[:, tokens // size], plane, tokens % size]
        rows = order.rows_of(tokens)
        return self.pages[table.gather(1, rows // size), plane, rows % size]

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole pages, both int64 [n]."""
        self.pages[target] = self.pages[source]

    def copy_tokens(
        self,
        source: torch.Tensor,
        order: RowOrder | None,
        tokens: range,
        target: torch.Tensor,
    ) -> None:
        """Copy tokens of a layer to other pages, in the order of arrival.

        Args:
            source: the pages that have them, see ``write``.
            order: theirs.
            tokens: from the first token of a page on.
            target: int64 [num_kv_heads, pages]; the first page gets the first token.
        """
        taken = torch.arange(tokens.start, tokens.stop)
        to = taken - tokens.start
        page, slot = target[:, to // self.page_tokens], to % self.page_tokens
        for plane in (0, 1):
            self.pages[page, plane, slot] = self._rows(source, taken, plane, order)

    def reorder(self, table: torch.Tensor, rows: range, sources: torch.Tensor) -> None:
        """Change the order of tokens of a layer. No other thread may use their pages,
        and they may have no other owner. Waits for GPUs that still read host memory.

        Args:
            table: see ``write``.
            rows: where they are, whole pages.
            sources: int64 [num_kv_heads, len(rows)], the row from which each row gets
                its token: a permutation of ``rows``.
        """
        size, heads = self.page_tokens, len(table)
        pages = table[:, rows.start // size : rows.stop // size]
        assert not self._more_owners[pages].any(), "shared pages keep their order"
        if self._arena is not None:
            for event in self._arena.reads.so_far():
                event.synchronize()
        for head, source in zip(range(heads), sources - rows.start, strict=True):
            held = self.pages[pages[head]].transpose(0, 1).flatten(1, 2)
            ordered = held.index_select(1, source).unflatten(1, (-1, size))
            self.pages[pages[head]] = ordered.transpose(0, 1)

    def _read(
        self,
        table: torch.Tensor,
        tokens: range,
        plane: int,
        order: RowOrder | None = None,
    ) -> torch.Tensor:
        if order is not None:
            rows = self._rows(
                table, torch.arange(tokens.start, tokens.stop), plane, order
            )
        else:
            rows = self._run(table, tokens, plane)
        if self.fp8 is not None:
            return unscaled(rows, self.fp8)
        if self.quantized is None:
            return rows
        return self.quantized.dequantize(rows.contiguous())

    def _run(self, table: torch.Tensor, rows: range, plane: int) -> torch.Tensor:
        """Keys (plane 0) or values (1) of consecutive rows, as they are stored."""
        size = self.page_tokens
        first = rows.start // size
        listed = table[:, first : -(-rows.stop // size)]
        held = self.pages[:, plane][listed].flatten(1, 2)
        return held[:, rows.start - first * size : rows.stop - first * size]

    def check_integrity(self, owned: list[torch.Tensor]) -> None:
        """Check that each page is either free, or has as many owners as it should.

        Args:
            owned: the pages of each owner.
        """
        none = torch.empty(0, dtype=torch.int64)
        free = [*self._returned, *(pages for _, pages in self._quarantined)]
        used, owners = torch.cat([*owned, none]).unique(return_counts=True)
        expected = self._more_owners[used] + 1
        assert torch.equal(owners, expected), "a host page has other owners"
        surplus = self._more_owners[: self._fresh].sum()
        assert int(surplus) == int((owners - 1).sum()), "a page of nobody has owners"
        ids = torch.cat([used, *free])
        assert ids.unique().numel() == ids.numel(), "a host page is used and free"
        assert ids.numel() == self._fresh, "a host page is lost"


def tier_for(policy: Retriever, heap: Heap, share: float) -> HostTier:
    """Create the host tier of a worker by its policy's settings.

    Args:
        share: this worker's part of the policy's host memory.
    """
    limit = policy.host_memory_bytes or default_limit_bytes()
    head_dim, device = heap.layout.head_dim, heap.pages.device
    # A CPU that selects for itself needs no pinned memory.
    always = policy.device_selection is not None and device.type != "cpu"
    return HostTier(
        int(limit * share),
        policy.host_page_tokens,
        head_dim,
        heap.pages.dtype,
        device if always or policy.host_fetch == "direct" else None,
        policy.quantized_rows(head_dim),
        heap.fp8.dtype if heap.fp8 is not None else None,
        always,
    )


def default_limit_bytes() -> int:
    """Half of the memory that this process can take now."""
    return available_bytes() // 2
