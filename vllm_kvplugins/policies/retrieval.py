"""Policies that drop nothing: the cache is in host memory, and queries fetch from it.

Per (layer, KV head), in the pages that a request holds::

    [ sinks | hot: selected by the newest query | window ] [ tail, growing ]
               ^ rewritten at every step                ages into the host tier

Sinks and window are always resident. The first ``skip_layers`` layers keep all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import Budget, PageAllocator, parse_bytes
from vllm_kvplugins.errors import coded
from vllm_kvplugins.index import BruteForceIndex, KeyIndex, Keys, select
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import (
    BlockSpan,
    Compaction,
    DecodeCompaction,
    ResidencyPlan,
)
from vllm_kvplugins.policies.base import KVCachePolicy, LayerView


def tokens_of_pages(pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first tokens of pages that are not full.

    Args:
        pages: int64 [num_kv_heads, num_pages, page_size], best page first, token
            numbers, -1 in empty slots.

    Returns:
        int64 [num_kv_heads, count], -1 behind the last.
    """
    flat = pages.flatten(1)
    filled = flat >= 0
    rank = (filled.cumsum(1) - 1).masked_fill(~filled, count).clamp(max=count)
    chosen = flat.new_full((len(flat), count + 1), -1)
    return chosen.scatter_(1, rank, flat)[:, :count]


class WholeFirstLayers(PageAllocator):
    """The first layers keep all pages, the others share the rest evenly."""

    name: ClassVar[str] = "whole-first-layers"
    whole_layers: int

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        if self.whole_layers < num_layers:
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
        whole = self.whole_layers
        counts = available.clone()
        left = layers * pages_per_head - int(available[:whole, 0].sum())
        each, more = divmod(left, layers - whole)
        counts[whole:] = each
        counts[whole : whole + more] += 1
        return counts


class Retriever(KVCachePolicy):
    """Base of policies that offload all and fetch what each query asks for.

    Subclasses say with which index. Budgets count tokens per KV head, equal for
    all heads of a layer; pages left over from rounding widen the hot zone of the
    first layers that retrieve.
    """

    @property
    def retrieval(self) -> Retriever:
        return self

    budget: Annotated[Budget, BeforeValidator(Budget.parse)] = Field(
        default=Budget(tokens=256),
        description="Tokens fetched per KV head and step: a number of tokens (256), "
        'a share of the prompt (0.1), or bytes per request ("64MiB").',
    )
    sinks: int = Field(default=16, ge=0, description="First tokens, always resident.")
    window: int = Field(default=64, ge=1, description="Newest tokens, always resident.")
    skip_layers: int = Field(
        default=2, ge=0, description="First layers, which keep everything resident."
    )
    age_blocks: int = Field(
        default=1,
        ge=1,
        description="Blocks generated before the oldest of the window go to the host.",
    )
    reuse_every: int = Field(
        default=1,
        ge=1,
        description="Select in every n-th layer only; those between reuse its choice.",
    )
    prefetch: Literal["off", "step", "layer"] = Field(
        default="off",
        description="Select while the model computes, with the queries of the step "
        "before (step), or of the layer before, which finds little (layer).",
    )
    host_fetch: Literal["staged", "direct"] = Field(
        default="staged",
        description="How tokens reach a GPU: gathered by the host and copied "
        "(staged), or read by the GPU out of pinned host memory (direct).",
    )
    host_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Most host memory for offloaded tokens ("8GiB"), all ranks '
        "together; null: half of the free memory at start-up. Requests wait for it.",
    )

    @property
    def host_memory_bytes(self) -> int | None:
        return self.host_memory

    # Bytes of the index relative to those of the keys and values, at most.
    index_share: ClassVar[float] = 0.0
    # Tokens per page of host memory.
    host_page_tokens: ClassVar[int] = 16

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        size = self.host_page_tokens
        offloaded = -(-max(tokens - self.sinks - self.window, 0) // size) * size
        layers = max(geometry.num_layers - self.skip_layers, 0)
        per_token = geometry.kv_bytes_per_token * layers // geometry.num_layers
        return int(offloaded * per_token * (1 + self.index_share))

    @abstractmethod
    def new_index(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        """An empty index, for one request and layer."""

    @property
    def builds_lazily(self) -> bool:
        """Whether a request may go on before its indices are built."""
        return False

    def scan(self, num_kv_heads: int, head_dim: int) -> KeyIndex:
        """The index to use while another one is being built."""
        return BruteForceIndex(num_kv_heads, head_dim)

    def select(
        self,
        indices: Sequence[KeyIndex],
        queries: torch.Tensor,
        keys: Keys,
        scale: float,
        count: int,
    ) -> torch.Tensor:
        """The tokens to make resident, for all requests of a step.

        Args:
            indices: one per request.
            queries: [requests, num_kv_heads, group, head_dim], see ``KeyIndex.select``.
            keys: the memory of all requests' appended keys.
            scale: softmax scale.
            count: tokens per KV head.

        Returns:
            int64 [requests, num_kv_heads, count], see ``KeyIndex.select``.
        """
        return select(indices, queries, keys, scale, count)

    def selects(self, layer: int) -> bool:
        """Whether this layer selects for itself (an anchor layer)."""
        return (layer - self.skip_layers) % self.reuse_every == 0

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        prompt_tokens, size = lengths.prompt_tokens, geometry.block_size
        full = prompt_tokens // size
        hot = self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token)
        keep = -(-(self.sinks + hot + self.window) // size)
        decoding = DecodeCompaction(
            first_at_block=max(full, keep) + self.age_blocks,
            interval_blocks=self.age_blocks,
            keep_blocks=keep,
            whole_layers=self.skip_layers,
            num_layers=geometry.num_layers,
        )
        restored = lengths.restored
        compactions = () if restored is None else (restored,)
        start = restored.retained.start if restored else 0
        # the budget may be a share of the prompt, and larger than before
        while decoding.retained(decoding.first_at_block).start < start:
            decoding = replace(decoding, first_at_block=decoding.first_at_block + 1)
        retained = decoding.retained(full)
        if full <= keep or (restored and retained.start <= start):
            return ResidencyPlan(size, compactions, decoding)
        compaction = Compaction(prompt_tokens, BlockSpan(start, full), retained)
        return ResidencyPlan(size, (*compactions, compaction), decoding)

    def score(self, view: LayerView) -> torch.Tensor:
        """Sinks and window stay; the newest others fill the hot zone until the
        first query asks for something else."""
        positions = view.positions
        scores = positions.to(torch.float32)
        stays = (positions >= 0) & (positions < self.sinks)
        stays |= positions > positions.max() - self.window
        return scores.masked_fill(stays, torch.inf)

    def offloaded(self, tokens: int, before_tail: int) -> range:
        """Positions that are in the host tier after a compaction.

        Args:
            tokens: in the cache by then.
            before_tail: of these, in front of the tail.
        """
        return range(
            self.sinks, max(min(tokens - self.window, before_tail), self.sinks)
        )

    def page_allocator(self) -> PageAllocator:
        return WholeFirstLayers(whole_layers=self.skip_layers)
