"""Policies that drop nothing: the cache lies in host memory, queries fetch from it.

Per (layer, KV head), in the pages that a request holds::

    [ sinks | hot: what the newest query asked for | window ] [ tail, growing ]
               ^ rewritten at every step                ages into the host tier

Sinks and window are always resident. The first ``skip_layers`` layers keep all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar

import torch
from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import Budget, PageAllocator, parse_bytes
from vllm_kvplugins.policies.base import (
    Geometry,
    KVCachePolicy,
    LayerView,
    Lengths,
    Retention,
    Trigger,
)
from vllm_kvplugins.residency.plan import (
    BlockSpan,
    Compaction,
    Fold,
    ResidencyPlan,
)


class TokenIndex(ABC):
    """What finds, among the offloaded tokens of one request and layer, those that
    a query wants. Tokens are numbered in the order in which they were inserted."""

    @abstractmethod
    def insert(self, keys: torch.Tensor, first: int) -> None:
        """Take in new tokens.

        Args:
            keys: [num_kv_heads, tokens, head_dim], all so far; storage may move
                between calls.
            first: number of the first new one.
        """

    @abstractmethod
    def select(
        self, queries: torch.Tensor, keys: torch.Tensor, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens to have resident for some queries.

        Args:
            queries: [num_q_heads, num_queries, head_dim], after RoPE.
            keys: [num_kv_heads, tokens, head_dim], as inserted.
            scale: softmax scale.
            count: how many, at most ``tokens``.

        Returns:
            int64 [num_kv_heads, count], distinct in each row, best first.
        """


class ExactScan(TokenIndex):
    """No index: all keys are scored."""

    def insert(self, keys: torch.Tensor, first: int) -> None:
        """Nothing to build."""

    def select(
        self, queries: torch.Tensor, keys: torch.Tensor, scale: float, count: int
    ) -> torch.Tensor:
        """The tokens that get most attention, summed over queries and group.

        The softmax runs over the offloaded tokens alone, per query head; sinks
        and window would scale all of a head's weights alike.

        Cost: O(num_q_heads * num_queries * tokens * head_dim).
        """
        heads = keys.shape[0]
        grouped = queries.reshape(heads, -1, queries.shape[-1])
        logits = torch.bmm(grouped, keys.transpose(1, 2)).to(torch.float32).mul_(scale)
        return logits.softmax(-1).sum(1).topk(count, dim=-1).indices


def tokens_of_pages(pages: torch.Tensor, count: int) -> torch.Tensor:
    """The first tokens of pages that are not full.

    Args:
        pages: int64 [num_kv_heads, num_pages, page_size], best page first, token
            numbers, -1 in empty slots; at least ``count`` tokens per head.

    Returns:
        int64 [num_kv_heads, count].
    """
    flat = pages.flatten(1)
    filled = flat >= 0
    rank = filled.cumsum(1) - 1
    assert int(rank[:, -1].min()) + 1 >= count, "pages hold too few tokens"
    chosen = filled & (rank < count)
    return flat[chosen].view(flat.shape[0], count)


class WholeFirstLayers(PageAllocator):
    """The first layers keep all pages, the others share the rest evenly."""

    name: ClassVar[str] = "whole-first-layers"
    whole_layers: int

    def problems(self, num_layers: int, num_kv_heads: int) -> list[str]:
        if self.whole_layers < num_layers:
            return []
        return [
            f"skip_layers {self.whole_layers} leaves none of the model's {num_layers} "
            "layers to offload; lower it"
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

    triggers: ClassVar[Trigger] = Trigger.PREFILL_END | Trigger.DECODE_STEP
    retention: ClassVar[Retention] = Retention.OFFLOAD

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

    host_memory: Annotated[int | None, BeforeValidator(parse_bytes)] = Field(
        default=None,
        ge=1,
        description='Most host memory for offloaded tokens ("8GiB"), all ranks '
        "together; null: half of what is free at start-up. Requests wait for it.",
    )

    @property
    def host_memory_bytes(self) -> int | None:
        return self.host_memory

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        offloaded = max(tokens - self.sinks - self.window, 0)
        layers = max(geometry.num_layers - self.skip_layers, 0)
        per_token = geometry.kv_bytes_per_token * layers // geometry.num_layers
        # what is generated is appended to arrays with a quarter of slack
        return offloaded * per_token * 5 // 4

    @abstractmethod
    def new_index(self, num_kv_heads: int, head_dim: int) -> TokenIndex:
        """An empty index, for one request and layer."""

    def selects(self, layer: int) -> bool:
        """Whether this layer selects for itself (an anchor layer)."""
        return (layer - self.skip_layers) % self.reuse_every == 0

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        prompt_tokens, size = lengths.prompt_tokens, geometry.block_size
        full = prompt_tokens // size
        hot = self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token)
        keep = -(-(self.sinks + hot + self.window) // size)
        fold = Fold(
            first_at_block=max(full, keep) + self.age_blocks,
            every_blocks=self.age_blocks,
            keep_blocks=keep,
            whole_layers=self.skip_layers,
            num_layers=geometry.num_layers,
        )
        if full <= keep:
            return ResidencyPlan(size, fold=fold)
        zone = BlockSpan(full - fold.zone_blocks(full), full)
        compaction = Compaction(prompt_tokens, BlockSpan(0, full), zone)
        return ResidencyPlan(size, (compaction,), fold)

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
