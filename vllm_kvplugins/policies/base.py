"""The contract between a KV-cache policy and the engine.

A policy is a frozen pydantic model: its fields are its hyperparameters, and all
state is passed in. The engine asks it three questions:

* ``plan``: which blocks are resident after which token count (scheduler AND
  worker ask; pure and tensor-free);
* ``score``: how much each slot is worth (worker; torch);
* ``allocator``: how many pages each (layer, KV head) may keep.

Everything else (moving pages, freeing blocks, page tables) is the engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Annotated, ClassVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_kvplugins.budgets import (
    ALLOCATORS,
    Budget,
    PageAllocator,
    Uniform,
    parse_allocator,
)
from vllm_kvplugins.residency.plan import BlockSpan, Compaction, ResidencyPlan


class Trigger(Flag):
    """When the engine calls a policy."""

    NEVER = 0
    PREFILL_END = auto()


class Retention(Enum):
    """What becomes of slots that are not resident."""

    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the KV cache that a plan is made for.

    Attributes:
        block_size: tokens per block.
        num_layers: attention layers in the heap.
        num_kv_heads: KV heads per layer on this rank.
        kv_bytes_per_token: bytes of K and V of one token over all layers and
            all KV heads of all ranks.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of one request that both processes know."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class LayerView:
    """One request, one layer, read-only, all slots up to now.

    Attributes:
        layer: index of the layer, 0 first.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE, cache dtype.
        positions: int64 [num_kv_heads, num_slots], RoPE position of each slot.
        queries: [num_q_heads, num_queries, head_dim], after RoPE, newest last;
            ``num_queries`` is what the policy's ``queries_needed`` asked for.
        scale: softmax scale of the layer.
        load_values: reads the values when first asked; see ``values``.
    """

    layer: int
    keys: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor
    scale: float
    load_values: Callable[[], torch.Tensor] = field(repr=False)

    @property
    def values(self) -> torch.Tensor:
        """[num_kv_heads, num_slots, head_dim]; gathered from the pages anew at
        each access, so that policies that never look at values pay nothing."""
        return self.load_values()


class KVCachePolicy(BaseModel, ABC):
    """Base of all policies. Subclasses declare fields, a plan and a score."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: ClassVar[str]
    summary: ClassVar[str]
    triggers: ClassVar[Trigger]
    retention: ClassVar[Retention] = Retention.DROP

    @property
    def queries_needed(self) -> int:
        """Newest queries that ``score`` wants; 0 = none."""
        return 0

    @property
    def minimum_budget_tokens(self) -> int:
        """Smallest budget that leaves this policy anything to choose."""
        return 1

    @abstractmethod
    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        """Which blocks are resident when. Pure: same arguments, same plan."""

    def score(self, view: LayerView) -> torch.Tensor:
        """Worth of each slot of one layer; larger means keep.

        Returns:
            float32 [num_kv_heads, num_slots]. ``inf`` marks slots that must
            stay (a window, sinks), ``-inf`` slots that must go.
        """
        raise AssertionError(f"{self.name} has no compaction, so nothing to score")

    def page_allocator(self) -> PageAllocator:
        """How a compaction shares pages between layers and KV heads."""
        return Uniform()

    def problems(self) -> list[str]:
        """Contradictions between this policy's own settings, for the user."""
        return []


class Compressor(KVCachePolicy):
    """A policy that keeps the best-scoring tokens once the prompt is in.

    Subclasses write ``score``. The budget counts tokens per KV head, averaged
    over layers and heads; the allocator moves whole pages between them.

    Rounding: of a prompt of n tokens the n % block_size newest stay in their
    block untouched, and the rest of the budget is rounded up to whole pages,
    so ``budget <= kept < budget + block_size`` tokens per KV head on average
    (at least one page besides the newest tokens, whatever the budget).
    """

    triggers: ClassVar[Trigger] = Trigger.PREFILL_END

    budget: Annotated[Budget, BeforeValidator(Budget.parse)] = Field(
        default=Budget(tokens=512),
        description="Tokens kept per KV head: a number of tokens (512), a share "
        'of the prompt (0.25), or bytes per request ("64MiB").',
    )
    allocator: Annotated[PageAllocator, BeforeValidator(parse_allocator)] = Field(
        default=Uniform(),
        description="How pages are shared between layers and KV heads: "
        + ", ".join(sorted(ALLOCATORS))
        + ".",
    )

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        prompt_tokens, block_size = lengths.prompt_tokens, geometry.block_size
        full_blocks = prompt_tokens // block_size
        budget_tokens = max(
            self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token),
            self.minimum_budget_tokens,
        )
        tail_tokens = prompt_tokens - full_blocks * block_size
        zone_blocks = max(-(-(budget_tokens - tail_tokens) // block_size), 1)
        if zone_blocks >= full_blocks:
            return ResidencyPlan(block_size)
        return ResidencyPlan(
            block_size,
            (
                Compaction(
                    at_tokens=prompt_tokens,
                    candidates=BlockSpan(0, full_blocks),
                    zone=BlockSpan(full_blocks - zone_blocks, full_blocks),
                ),
            ),
            queries_needed=self.queries_needed,
        )

    def page_allocator(self) -> PageAllocator:
        return self.allocator

    def problems(self) -> list[str]:
        floor = self.minimum_budget_tokens
        if self.budget.tokens is not None and self.budget.tokens < floor:
            return [
                f"budget {self.budget.tokens} is below the {floor} tokens that "
                f"{self.name} always keeps (its sinks and window); raise the "
                "budget or shrink them"
            ]
        return []
