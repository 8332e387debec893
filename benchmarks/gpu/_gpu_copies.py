"""Stages of ``gpu_smoke.py`` without an engine: page copies, host fetches, decode
attention.

Each stage compares with plain copies of the same number of bytes.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from vllm_kvplugins import ops
from vllm_kvplugins.engine.retrieval.host_tier import HostTier
from vllm_kvplugins.ops.layout import PageLayout

FETCHED = (32, 256, 2048)  # tokens per KV head
MIB = 1 << 20
Row = dict[str, Any]


def gather(device: torch.device, total: int = 256 * MIB) -> Iterator[Row]:
    """Bandwidth of gathering random 8 KiB pages, and of plain copies."""
    page = 8192
    arena = torch.ones(2 * total // page, page // 2, dtype=torch.bfloat16)
    ids = torch.randperm(len(arena))[: total // page].to(device)
    target = torch.empty(len(ids), page // 2, dtype=torch.bfloat16, device=device)
    plain = torch.empty_like(target)
    here = arena.to(device)
    copies: dict[str, Callable[[], Any]] = {
        "bulk copy on the device": lambda: ops.copy_pages(target, None, here, ids),
        "plain copy on the device": lambda: plain.copy_(here[: len(ids)]),
    }
    if device.type == "cuda":
        staged = arena[: len(ids)].pin_memory()
        copies["plain copy from pinned memory"] = lambda: plain.copy_(staged)
    compiled = ops.backend_in_use(device.type)
    for name, took in timed(copies, device).items():
        rate = round(total / statistics.median(took) / 2**30, 1)
        yield {"copy": name, "gib_per_s": rate, "ops": compiled}


def timed(
    copies: Mapping[str, Callable[[], Any]], device: torch.device
) -> dict[str, list[float]]:
    """Seconds of ten runs of each, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in copies}
    for turn in range(12):
        for name, copy in copies.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            copy()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 2:  # the first runs warm up
                times[name].append(time.perf_counter() - began)
    return times


def fetch(device: torch.device, sizes: Sequence[int] = FETCHED) -> Iterator[Row]:
    """Time to fetch tokens of one layer of one request with 8 KV heads; none is
    resident.

    Args:
        sizes: tokens per KV head, multiples of 16.
    """
    for tokens in sizes:
        ways: dict[str, Callable[[], Any]] = {}
        ways["staged"] = fetcher(device, "staged", tokens)
        try:
            ways["direct"] = fetcher(device, "direct", tokens)
        except RuntimeError as error:
            yield {"host_fetch": "direct", "problem": str(error)}
        for how, took in timed(ways, device).items():
            seconds, total = statistics.median(took), tokens * 8 * 2 * 128 * 2
            row: Row = {"host_fetch": how, "tokens_per_head": tokens}
            row |= {"ms": round(1000 * seconds, 3), "kib": total >> 10}
            yield row | {"gib_per_s": round(total / seconds / 2**30, 2)}


def fetcher(device: torch.device, how: str, tokens: int) -> Callable[[], torch.Tensor]:
    """A call that fetches different tokens each time and returns how many it copied."""
    heads, dim, size = 8, 128, 16
    held = 4 * tokens // size  # host pages per head
    page_bytes = 2 * size * dim * 2
    reader = device if how == "direct" else None
    tier = HostTier(heads * held * page_bytes, size, dim, torch.bfloat16, reader)
    table = tier.take(heads * held)[torch.randperm(heads * held)].view(1, heads, held)
    tier.pages.fill_(1)
    layout = ops.PageLayout.interleaved(size, dim).to(device)
    shape = heads * tokens // size, layout.page_elems
    heap = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    spots = torch.arange(heads * tokens).view(1, heads, tokens)
    order = torch.rand(1, heads, 4 * tokens).argsort(-1).split(tokens, -1)
    hot, *others = (part.contiguous() for part in order)
    turns = itertools.cycle([*others, hot.clone()])
    places = spots // size, spots % size, torch.tensor([tokens])
    hot_set, kv = ops.HotSet(hot, *places), ops.PagedKV(heap, layout)
    slot_index = torch.tensor([0])

    def run() -> torch.Tensor:
        # Made here, so that the tier lives as long as this function: without it, its
        # memory is unpinned.
        host = ops.HostPages(tier.pages, table, tier.reads)
        next_tokens = next(turns)
        return ops.fill_hot(kv, host, next_tokens, slot_index, hot_set)

    return run


class DecodeCase:
    """Decode attention with Llama-3.1-8B's shape.

    8 KV heads of 4 query heads, head_dim 128, bfloat16, pages of 16 tokens.

    Args:
        rows: requests.
        tokens: per (request, KV head), a multiple of 16.
        parts: number of disjoint sets of pages, so that no call reads cached data.
    """

    heads, group, dim, size = 8, 4, 128, 16

    def __init__(
        self, device: torch.device, rows: int, tokens: int, parts: int
    ) -> None:
        self.rows, self.tokens = rows, tokens
        self.layout = PageLayout.interleaved(self.size, self.dim).to(device)
        sequences, per = rows * self.heads, tokens // self.size
        shape = parts * sequences * per, self.layout.page_elems
        self.heap = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.kv = ops.PagedKV(self.heap, self.layout)
        pages = torch.randperm(shape[0], device=device).int()
        self.tables = list(pages.view(parts, sequences, per))
        blocks = torch.randperm(len(pages) // self.heads, device=device).int()
        self.blocks = list(blocks.view(parts, rows, per))
        self.lengths = torch.full((sequences,), tokens, device=device).int()
        query_shape = rows, self.heads * self.group, self.dim
        self.queries = torch.randn(query_shape, device=device).bfloat16()
        self.out = torch.empty_like(self.queries)
        self.start = torch.arange(sequences + 1, device=device).int()
        self.scale = self.dim**-0.5
        self.read_bytes = sequences * tokens * 2 * self.dim * 2

    def triton(self, part: int) -> None:
        """This package's kernel."""
        from vllm_kvplugins.ops.triton.paged_attention import NewTokens, attend_paged

        place = self.kv, self.tables[part], self.lengths, self.scale
        attend_paged(NewTokens(self.queries), *place, out=self.out)

    def flash(self, part: int) -> None:
        """FlashAttention as this package calls it: one sequence per KV head."""
        slots = self.heap.view(-1, self.size, 1, 2 * self.dim)
        flat = (self.rows * self.heads, self.group, self.dim)
        self._flash(slots, flat, self.tables[part])

    def stock(self, part: int) -> None:
        """FlashAttention as vLLM calls it: one sequence per request."""
        slots = self.heap.view(-1, self.heads, self.size, 2 * self.dim).transpose(1, 2)
        flat = (self.rows, self.heads * self.group, self.dim)
        self._flash(slots, flat, self.blocks[part])

    def _flash(
        self, slots: torch.Tensor, flat: tuple[int, int, int], table: torch.Tensor
    ) -> None:
        """Call FlashAttention with vLLM's maximum number of splits for CUDA graphs."""
        from vllm.v1.attention.backends import fa_utils

        keys, values = slots.split(self.dim, dim=-1)
        fa_utils.flash_attn_varlen_func(
            q=self.queries.view(flat),
            k=keys,
            v=values,
            out=self.out.view(flat),
            cu_seqlens_q=self.start[: len(table) + 1],
            max_seqlen_q=1,
            seqused_k=self.lengths[: len(table)],
            max_seqlen_k=self.tokens,
            softmax_scale=self.scale,
            causal=True,
            block_table=table,
            num_splits=32,
            fa_version=fa_utils.get_flash_attn_version(),
        )


def attention(
    device: torch.device, rows: int = 8, tokens: int = 2048, parts: int = 8
) -> Iterator[Row]:
    """Bandwidth of one layer's decode attention, and of a memory copy.

    A request with a budget of ``tokens`` reads this amount per layer, independent of
    its length. A copied byte counts twice (read and written).
    """
    case = DecodeCase(device, rows, tokens, parts)
    source = case.heap.view(parts, -1)
    target = torch.empty_like(source)
    calls: dict[str, tuple[Callable[[int], Any], int]] = {
        "plain copy": (
            lambda part: target[part].copy_(source[part]),
            2 * source[0].nbytes,
        ),
        "triton": (case.triton, case.read_bytes),
        "flash": (case.flash, case.read_bytes),
        "flash, as vLLM calls it": (case.stock, case.read_bytes),
    }
    copied = 0.0
    for name, (call, moved_bytes) in calls.items():
        try:
            took = replayed(call, parts, device)
        except Exception as error:  # an unsupported kernel must not stop the others
            yield {"kernel": name, "problem": f"{type(error).__name__}: {error}"}
            continue
        rate = moved_bytes / statistics.median(took)
        copied = copied or rate
        yield {
            "kernel": name,
            "requests": rows,
            "tokens": tokens,
            "us": round(1e6 * statistics.median(took), 2),
            "us_range": [round(1e6 * min(took), 2), round(1e6 * max(took), 2)],
            "gb_per_s": round(rate / 1e9, 1),
            "of_the_copy": round(rate / copied, 3),
        }


def replayed(
    call: Callable[[int], Any], parts: int, device: torch.device
) -> list[float]:
    """Seconds per call, 20 times: all parts in one CUDA graph, without launch
    overhead."""
    if device.type != "cuda":
        return [sum(timed({"": lambda: call(0)}, device)[""]) / 10]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles the kernel and allocates its memory
        for _ in range(2):
            call(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for part in range(parts):
            call(part)
    took = []
    for turn in range(23):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        if turn >= 3:
            took.append(began.elapsed_time(ended) / 1e3 / parts)
    return took
