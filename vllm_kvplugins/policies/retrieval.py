"""Policies that keep all tokens in host memory and fetch some of them for each query.

Pages of a request, per layer and KV head::

    [ sinks | hot slots: selected by the newest query | window ] [ growing tail ]
               ^ rewritten at every step                moves to the host later

Sinks and window are always resident. The first ``skip_layers`` layers keep all tokens
on the device.

The tokens of a prompt attend to all earlier tokens, on the device or not. Only
generated tokens attend to a selection.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import Budget, PageAllocator, parse_bytes
from vllm_kvplugins.errors import coded
from vllm_kvplugins.index import (
    BruteForceIndex,
    DeviceSelection,
    KeyIndex,
    Keys,
    PageSelection,
    select,
)
from vllm_kvplugins.ops.quantized_rows import BITS, QuantizedRows
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import (
    BlockSpan,
    Compaction,
    DecodeCompaction,
    ResidencyPlan,
)
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView
from vllm_kvplugins.spans.chunk_means import ChunkMeans


def tokens_of_pages(pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` tokens of a list of pages.

    Args:
        pages: int64 [num_kv_heads, num_pages, page_size], token numbers, best page
            first; -1 in empty slots.

    Returns:
        int64 [num_kv_heads, count]; -1 after the last token.
    """
    flat = pages.flatten(1)
    filled = flat >= 0
    rank = (filled.cumsum(1) - 1).masked_fill(~filled, count).clamp(max=count)
    chosen = flat.new_full((len(flat), count + 1), -1)
    return chosen.scatter_(1, rank, flat)[:, :count]


class WholeFirstLayers(PageAllocator):
    """The first layers keep all pages; the others share the remaining pages evenly."""

    name: ClassVar[str] = "whole-first-layers"
    whole_layers: int

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        # A model without layers to manage is refused as such.
        if not num_layers or self.whole_layers < num_layers:
            return []
        return [
            coded(
                "KVP116",
                f"skip_layers {self.whole_layers} leaves none of the model's "
                f"{num_layers} layers to offload; give a smaller number",
            )
        ]

    def allocate(
        self,
        scores: torch.Tensor,
        pages_per_head: int,
        block_size: int,
        available: torch.Tensor,
    ) -> torch.Tensor:
        layers = available.shape[0]
        whole_layers = self.whole_layers
        counts = available.clone()
        whole_pages = int(available[:whole_layers, 0].sum())
        remaining = layers * pages_per_head - whole_pages
        per_layer, extra = divmod(remaining, layers - whole_layers)
        counts[whole_layers:] = per_layer
        counts[whole_layers : whole_layers + extra] += 1
        return counts


class Retriever(KVCachePolicy):
    """Base class of policies that offload all tokens and fetch some for each query.

    Subclasses provide the index. The budget counts tokens per KV head and is equal for
    all heads of a layer. Pages that rounding leaves over become additional hot slots of
    the first layers that retrieve.
    """

    @property
    def retrieval(self) -> Retriever:
        return self

    budget: Annotated[Budget, BeforeValidator(Budget.parse)] = Field(
        default=Budget(tokens=256),
        description="Tokens fetched per KV head and step: a number of tokens (256), "
        'a share of the prompt (0.1), or bytes per request ("64MiB").',
    )
    sinks: int = Field(default=16, ge=0, description="First tokens; always resident.")
    window: int = Field(default=64, ge=1, description="Newest tokens; always resident.")
    skip_layers: int = Field(
        default=2,
        ge=0,
        description="Number of first layers that keep all tokens resident.",
    )
    age_blocks: int = Field(
        default=1,
        ge=1,
        description="Blocks to generate before the oldest tokens of the window "
        "move to the host.",
    )
    reuse_every: int = Field(
        default=1,
        ge=1,
        description="Select in every n-th layer only; the layers in between reuse its "
        "selection.",
    )
    prefetch: Literal["off", "step", "layer"] = Field(
        default="off",
        description="Select while the model computes, with the queries of the previous "
        "step (step) or of the previous layer (layer; finds few of the right tokens).",
    )
    mean_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens that a query does not select get attention through means: "
        "one more key and value on the device for this many consecutive tokens (64: "
        "1.6 % of the context, in addition to budget). 0: they get none.",
    )
    host_fetch: Literal["staged", "direct"] = Field(
        default="staged",
        description="How tokens reach a GPU: the host gathers and copies them "
        "(staged), or the GPU reads pinned host memory (direct).",
    )
    host_dtype: Literal["auto", "int8", "int4"] = Field(
        default="auto",
        description="How keys and values lie in host memory: as in the cache (auto), "
        "or quantized to 8 bits (int8: about half of bfloat16; loses little) or 4 bits "
        "(int4: less than a third; loses much). The host dequantizes what is fetched; "
        "not with host_fetch: direct.",
    )
    prefill_block: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of the prompt between two moves to the host. Limits what a "
        "prompt holds on the device to budget, sinks, window and this many tokens, and "
        "what the first skip_layers layers hold; null: one move, after the prompt.",
    )
    host_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Maximum host memory for offloaded tokens of all ranks ("8GiB"); '
        "null: half of the free memory at start-up. Requests wait when it is full.",
    )

    @property
    def host_memory_bytes(self) -> int | None:
        return self.host_memory

    def problems(self) -> list[str]:
        reasons = super().problems()
        if self.host_dtype != "auto" and self.host_fetch == "direct":
            reasons.append(
                coded(
                    "KVP141",
                    f"host_dtype {self.host_dtype!r} needs the host to dequantize what "
                    "a GPU fetches, and host_fetch is 'direct'; set host_fetch to "
                    "'staged' or host_dtype to 'auto'",
                )
            )
        return [*reasons, *self._mean_problems()]

    def _mean_problems(self) -> Iterator[str]:
        """Settings that do not go with means."""
        if not self.mean_tokens:
            return
        if self.prefetch != "off":
            yield coded(
                "KVP144",
                f"mean_tokens {self.mean_tokens} stands for what the query of the step "
                f"does not select, and prefetch {self.prefetch!r} selects with an "
                "earlier one; set prefetch to 'off' or mean_tokens to 0",
            )
        if self.page_selection is not None:
            yield coded(
                "KVP144",
                f"mean_tokens {self.mean_tokens} needs host memory in the order of the "
                "text, and fetch 'pages' puts similar tokens next to each other; set "
                "fetch to 'tokens' or mean_tokens to 0",
            )

    def quantized_rows(self, head_dim: int) -> QuantizedRows | None:
        """The format of keys and values in host memory; None: as in the cache."""
        if self.host_dtype == "auto":
            return None
        return QuantizedRows(head_dim, BITS[self.host_dtype])

    @property
    def index_share(self) -> float:
        """Maximum size of the index, relative to bfloat16 keys and values."""
        return 0.0

    @property
    def host_page_tokens(self) -> int:
        """Tokens per page of host memory."""
        pages = self.page_selection
        return 16 if pages is None else pages.page_tokens

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Keys and values as they lie in host memory, means, and the index."""
        stored = self.offloaded_bytes(tokens, geometry)
        if self.host_dtype != "auto":
            stored = self._quantized_bytes(stored, geometry)
        # Layers that reuse a selection have no index.
        layers = range(self.skip_layers, geometry.num_layers)
        selecting = sum(map(self.selects, layers))
        index = self.index_bytes(tokens, geometry)
        # The means of a session wait in host memory.
        means = self._mean_bytes(tokens, geometry)
        return stored + means + -(-index * selecting // max(len(layers), 1))

    def _quantized_bytes(self, cached_bytes: int, geometry: Geometry) -> int:
        """Bytes of tokens in host memory, from their bytes in the cache."""
        dim, element_bytes = geometry.head_dim, geometry.element_bytes
        assert dim is not None, "whoever plans host memory knows the size of rows"
        assert element_bytes is not None
        rows = self.quantized_rows(dim)
        assert rows is not None
        return rows.quantized_bytes(cached_bytes, element_bytes)

    def offloaded_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Bytes that the offloaded tokens of a request have in the cache, at most."""
        size = self.host_page_tokens
        offloaded = -(-max(tokens - self.sinks - self.window, 0) // size) * size
        layers = max(geometry.num_layers - self.skip_layers, 0)
        per_token = geometry.kv_bytes_per_token * layers // geometry.num_layers
        return offloaded * per_token

    def index_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Maximum size of a request's indices if every layer that offloads selects,
        whatever ``host_dtype`` is."""
        in_bfloat16 = 2 * self.offloaded_bytes(tokens, geometry)
        return int(in_bfloat16 // (geometry.element_bytes or 2) * self.index_share)

    @property
    def chunk_means(self) -> ChunkMeans | None:
        """How queries attend to tokens that they do not select; None: not at all."""
        return ChunkMeans(self.mean_tokens) if self.mean_tokens else None

    @property
    def device_selection(self) -> DeviceSelection | None:
        """How the device selects tokens itself; None: the host selects, with indices.

        The device then scores codes of all keys, and neither ``new_index`` nor
        ``select`` is called.
        """
        return None

    @property
    def page_selection(self) -> PageSelection | None:
        """How whole pages are fetched, which host memory holds in the order of the
        indices; None: single tokens.

        ``new_index`` and ``scan`` then return a ``PageIndex``, and ``select`` is not
        called. ``sinks`` must be a multiple of the tokens of a page.
        """
        return None

    def device_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Device memory outside vLLM's pool that a request uses with this many tokens,
        on all ranks: means, and codes if the device selects."""
        codes = self._code_bytes(self.offloaded_bytes(tokens, geometry), geometry)
        return codes + self._mean_bytes(tokens, geometry)

    def _mean_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Maximum size of the means of a request."""
        means = self.chunk_means
        if means is None:
            return 0
        offloaded = max(tokens - self.sinks - self.window, 0)
        layers = max(geometry.num_layers - self.skip_layers, 0)
        rows = geometry.all_rows * layers // geometry.num_layers
        entry = means.entry_bytes(self._mean_row_bytes(geometry))
        return int(rows * means.num_chunks(offloaded) * entry)

    def reserved_device_bytes(self, geometry: Geometry) -> int:
        """Device memory outside vLLM's pool that is set aside at start-up, on all
        ranks: for means, and for codes if the device selects.

        Every page of host memory has room for its codes and means, so that requests
        which fit in host memory also fit here.
        """
        held = self.host_memory or 0
        return self._code_bytes(held, geometry) + self._reserved_means(held, geometry)

    def _reserved_means(self, host_bytes: int, geometry: Geometry) -> int:
        """Bytes of the means of all tokens that host memory can hold."""
        means, row_bytes = self.chunk_means, geometry.row_bytes
        if means is None:
            return 0
        stored = row_bytes
        if self.host_dtype != "auto":
            stored = self._quantized_bytes(int(row_bytes), geometry)
        entry = means.entry_bytes(self._mean_row_bytes(geometry))
        return int(host_bytes / stored / means.chunk_tokens * entry)

    def _mean_row_bytes(self, geometry: Geometry) -> float:
        """Bytes of a mean key and value; those of an fp8 cache are bfloat16."""
        return geometry.row_bytes * (2 if geometry.element_bytes == 1 else 1)

    def _code_bytes(self, stored_bytes: int, geometry: Geometry) -> int:
        """Bytes of the codes of host pages with this many bytes."""
        if self.device_selection is None:
            return 0
        dim, element_bytes = geometry.head_dim, geometry.element_bytes
        assert dim is not None, "whoever plans device memory knows the size of keys"
        assert element_bytes is not None
        pages = stored_bytes // (2 * self.host_page_tokens * dim * element_bytes)
        return pages * self.device_selection.page_bytes(dim)

    @abstractmethod
    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        """An empty index for one request and layer."""

    @property
    def builds_lazily(self) -> bool:
        """Whether a request may generate before its indices are built."""
        return False

    def scan(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        """The index to use until the real one is built."""
        return BruteForceIndex(num_kv_heads, head_dim)

    def select(
        self,
        indices: Sequence[KeyIndex],
        queries: torch.Tensor,
        keys: Keys,
        scale: float,
        count: int,
    ) -> torch.Tensor:
        """Select the tokens to make resident, for all requests of a step.

        Args:
            indices: one per request.
            queries: [requests, num_kv_heads, group, head_dim], see ``KeyIndex.select``.
            keys: the appended keys of all requests.
            scale: softmax scale.
            count: tokens per KV head.

        Returns:
            int64 [requests, num_kv_heads, count], see ``KeyIndex.select``.
        """
        return select(indices, queries, keys, scale, count)

    def selects(self, layer: int) -> bool:
        """Whether this layer selects tokens itself, instead of reusing a selection."""
        return (layer - self.skip_layers) % self.reuse_every == 0

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        prompt_tokens, size = lengths.prompt_tokens, geometry.block_size
        full = prompt_tokens // size
        hot = self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token)
        if self.page_selection is not None:
            hot = max(hot, self.page_selection.page_tokens)
        keep = -(-(self.sinks + hot + self.window) // size)
        decoding = DecodeCompaction(
            first_at_block=max(full, keep) + self.age_blocks,
            interval_blocks=self.age_blocks,
            keep_blocks=keep,
            whole_layers=self.skip_layers,
            num_layers=geometry.num_layers,
        )
        restored = lengths.restored
        compactions = [] if restored is None else [restored]
        start = restored.retained.start if restored else 0
        # The budget may be a share of the prompt, and thus larger than in the session.
        while decoding.retained(decoding.first_at_block).start < start:
            decoding = replace(decoding, first_at_block=decoding.first_at_block + 1)
        done = restored.at_tokens // size if restored else 0
        for stop in self._prompt_stops(max(done, keep), full, size):
            retained = decoding.retained(stop)
            if retained.start > start:
                at_tokens = prompt_tokens if stop == full else stop * size
                candidates = BlockSpan(start, stop)
                compactions.append(Compaction(at_tokens, candidates, retained))
                start = retained.start
        return ResidencyPlan(size, tuple(compactions), decoding)

    def _prompt_stops(self, done: int, full: int, size: int) -> Iterator[int]:
        """Full blocks at each compaction of a prompt, the last one at its end.

        Args:
            done: full blocks before which nothing is compacted.
            full: full blocks of the prompt.
        """
        if self.prefill_block is not None:
            interval = max(self.prefill_block // size, 1)
            yield from range(done + interval, full, interval)
        if full > done:
            yield full

    def max_prompt_blocks(self, tokens: int, geometry: Geometry) -> int | None:
        if self.prefill_block is None:
            return None
        return self.plan(Lengths(tokens), geometry).peak_blocks(tokens)

    def score(self, view: LayerView) -> torch.Tensor:
        """Keep sinks and window; fill the hot slots with the newest other tokens.

        The first query replaces the tokens in the hot slots.
        """
        positions = view.positions
        scores = positions.to(torch.float32)
        stays = (positions >= 0) & (positions < self.sinks)
        stays |= positions > positions.max() - self.window
        return scores.masked_fill(stays, torch.inf)

    def offloaded(self, tokens: int, before_tail: int) -> range:
        """Positions that are in the host tier after a compaction.

        Args:
            tokens: number of tokens in the cache at the compaction.
            before_tail: number of them before the tail.
        """
        stop = max(min(tokens - self.window, before_tail), self.sinks)
        if self.page_selection is not None:
            # A page is fetched as a whole, so the others wait in the window.
            stop -= (stop - self.sinks) % self.page_selection.page_tokens
        return range(self.sinks, stop)

    def rewound(
        self, tokens: int, prompt_tokens: int, geometry: Geometry
    ) -> Compaction | None:
        """The last compaction of a cache that is taken back to an earlier token.

        What it holds follows from host memory: see ``kept_positions``. With
        ``prefill_block``, it is a compaction of the prompt's plan, if one is early
        enough. Otherwise, it frees fewer blocks than the compaction at the end of the
        prompt, which therefore runs, as if all of the prompt had been computed.

        Args:
            tokens: number of tokens that stay, fewer than the prompt has.
            prompt_tokens: of the request that continues.

        Returns:
            None: there would be nothing on the host, and recomputing takes little.
        """
        size, plan = geometry.block_size, self.plan(Lengths(prompt_tokens), geometry)
        done = plan.num_done(tokens)
        if done:
            last = plan.compaction(done - 1)
            candidates = BlockSpan(0, last.candidates.stop)
            return Compaction(last.at_tokens, candidates, last.retained)
        decoding = plan.decode_compaction
        assert decoding is not None
        at_end = decoding.retained(prompt_tokens // size)
        for stop in range(tokens // size, 0, -1):
            retained = decoding.retained(stop)
            if 0 < retained.start < at_end.start:
                return Compaction(stop * size, BlockSpan(0, stop), retained)
        return None

    def kept_positions(self, tokens: int, slots: int) -> torch.Tensor:
        """Positions that ``score`` keeps of ``tokens`` tokens in ``slots`` slots: sinks
        and the newest tokens; int64 [slots]."""
        newest = torch.arange(tokens - slots, tokens)
        newest[: self.sinks] = torch.arange(min(self.sinks, slots))
        return newest

    def page_allocator(self) -> PageAllocator:
        return WholeFirstLayers(whole_layers=self.skip_layers)
