"""Cases of selection by codes, for the torch version and for the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from vllm_kvplugins.ops import code_select as ops
from vllm_kvplugins.ops.code_select import HostRequests, HotTokens, KeyCodes
from vllm_kvplugins.ops.layout import PagedKV, PageLayout

SEED = 20261126
PAGE = 4  # tokens
HOST = torch.device("cpu")
Fetch = Callable[..., None]


@dataclass
class Case:
    """Random codes, queries and hot tokens of some requests."""

    queries: torch.Tensor
    width: torch.Tensor
    keys: KeyCodes
    host: HostRequests
    hot: HotTokens

    def on(self, device: torch.device) -> Case:
        """This case with its tensors on a device."""

        def moved(group: Any) -> Any:
            if not is_dataclass(group):
                return group.to(device) if isinstance(group, torch.Tensor) else group
            parts = {f.name: moved(getattr(group, f.name)) for f in fields(group)}
            return type(group)(**parts)

        return moved(self)

    def logits(self, request: int) -> torch.Tensor:
        """float64 [heads, group, length] of the codes, whose queries are exact."""
        table = self.host.table[request]
        codes = self.keys.codes[table].flatten(1, 2).double()
        keys = codes * self.keys.scales[table].flatten(1).double()[..., None]
        keys = keys[:, : int(self.host.lengths[request])]
        wide = self.queries[request].double() * self.width[request].double()[:, None]
        return wide @ keys.transpose(1, 2)


def make(
    lengths: list[int],
    counts: list[int],
    heads: int = 2,
    group: int = 3,
    dim: int = 8,
    ties: bool = False,
) -> Case:
    """Queries are whole numbers of which one is 127, so that their codes are exact."""
    rng = torch.Generator().manual_seed(SEED)
    requests, pages = len(lengths), -(-max(*lengths, 1) // PAGE)
    num_pages = requests * heads * pages + 3
    order = torch.randperm(num_pages, generator=rng)[: requests * heads * pages]
    shape = requests, heads, group, dim
    queries = torch.randint(-127, 128, shape, generator=rng).float()
    queries[..., 0] = 127
    low, high = (0, 2) if ties else (-127, 128)
    codes = torch.randint(low, high, (num_pages, PAGE, dim), generator=rng)
    scales = torch.rand(num_pages, PAGE, generator=rng) * 1e-4
    entries = requests + 2
    indices = torch.randperm(entries, generator=rng)[:requests]
    width = max(counts)
    token = torch.full((entries, heads, width + 1), 10**9)
    for request, count in enumerate(counts):
        for head in range(heads):
            some = torch.randperm(max(lengths[request], count), generator=rng)
            token[indices[request], head, :count] = some[:count]
    return Case(
        queries,
        torch.ones(requests, heads, dim),
        KeyCodes(codes.to(torch.int8), scales.fill_(1e-4) if ties else scales),
        HostRequests(order.view(requests, heads, pages), torch.tensor(lengths)),
        HotTokens(token, indices, torch.tensor(counts), width),
    )


CASES = {
    "one-token": make([1], [1], heads=1, group=1),
    "two-requests": make([9, 5], [4, 2]),
    "whole-pages": make([16, 8], [7, 8], heads=3, group=1, dim=64),
    "many-queries": make([40, 17], [9, 5], group=20, dim=96),
    "longer-than-a-tile": make([300, 129, 128], [40, 129, 1], dim=32),
    "no-token": make([0, 7], [0, 3]),
    "fewer-than-slots": make([3, 6], [3, 6]),
    "ties": make([60, 33], [21, 20], dim=2, ties=True),
}


def chosen(case: Case, hot: HotTokens, request: int, head: int) -> list[int]:
    """The hot tokens of a request and head, ascending."""
    count = int(case.hot.counts[request])
    entry = int(case.hot.slot_indices[request])
    return sorted(hot.token[entry, head, :count].tolist())


def voted(case: Case, scale: float = 0.2) -> torch.Tensor:
    return ops.votes_in_torch(case.queries, case.width, case.keys, case.host, scale)


def copied(hot: HotTokens) -> HotTokens:
    return replace(hot, token=hot.token.clone())


def fetched_heap(
    run: Fetch,
    layout: PageLayout,
    dtype: torch.dtype,
    device: torch.device = HOST,
) -> list[torch.Tensor]:
    """A heap before and after a fetch of some rows, and what it should be."""
    rng = torch.Generator().manual_seed(SEED)
    dim, size = layout.head_dim, layout.block_size
    heap = torch.randn(9, layout.page_elems, generator=rng).to(dtype)
    host = torch.randn(5, 2, PAGE, dim, generator=rng).to(dtype)
    before = heap.clone()
    place = torch.randperm(9 * size, generator=rng)[: 2 * 3 * 20].view(2, 3, 20)
    pages, slots = place // size, place % size
    source = torch.randint(5, (2, 3, 20), generator=rng) * 2 * PAGE
    source += torch.randint(PAGE, (2, 3, 20), generator=rng)
    rows = source.where(torch.rand(2, 3, 20, generator=rng) < 0.5, -1)
    rows[0, 1] = -1
    moved = [each.to(device) for each in (heap, rows, pages, slots)]
    heap, source = moved[0], host if device.type == "cpu" else host.pin_memory()
    run(PagedKV(heap, layout.to(device)), source, *moved[1:])
    heap = heap.cpu()
    expected = before.clone()
    flat = host.view(-1, dim)
    for at in (rows >= 0).nonzero().tolist():
        row, page, slot = (int(each[tuple(at)]) for each in (rows, pages, slots))
        span = slice(slot * dim, slot * dim + dim)
        expected[page, layout.k_offsets[span].long()] = flat[row]
        expected[page, layout.v_offsets[span].long()] = flat[row + PAGE]
    return [before, heap, expected]
