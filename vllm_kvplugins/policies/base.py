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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Annotated, Any, ClassVar

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_kvplugins.budgets import (
    ALLOCATORS,
    Budget,
    PageAllocator,
    Uniform,
    parse_allocator,
)
from vllm_kvplugins.residency.plan import Compaction, Fold, ResidencyPlan
from vllm_kvplugins.residency.prompt_cuts import prompt_compactions
from vllm_kvplugins.rotary import Rotary


class Trigger(Flag):
    """When the engine calls a policy."""

    NEVER = 0
    PREFILL_END = auto()
    PREFILL_CHUNK = auto()
    DECODE_STEP = auto()
    PROBE = auto()


class Retention(Enum):
    """What becomes of slots that are not resident."""

    DROP = "drop"
    # They stay in host memory and come back when a query asks for them; such a
    # policy is a ``Retriever``.
    OFFLOAD = "offload"


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
    """Token counts of one request that both processes know.

    Attributes:
        turn_ends: token counts at which turns of the prompt end, ascending; see
            ``KVCachePolicy.turn_ends``.
        restored: the compaction behind the cache that a continued session starts
            from, the plan's first one then. Its ``candidates`` start at block 0,
            ``zone`` is the landing zone. No cut is planned, and no query awaited,
            up to its ``at_tokens``; so that is what is restored, or less where no
            cut can follow before that.
    """

    prompt_tokens: int
    turn_ends: tuple[int, ...] = ()
    restored: Compaction | None = None


# Text to token ids, without special tokens.
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens that run through the model behind a request's cache, to be looked at.

    They attend to the cache and to each other and leave nothing behind.

    Attributes:
        token_ids: what runs.
        about: positions that the policy asks about; the engine ignores it.
    """

    token_ids: Sequence[int]
    about: range


@dataclass(frozen=True, slots=True)
class ProbeOccasion:
    """What a policy knows when it writes its probes, just before a compaction.

    Attributes:
        prompt: the request's prompt.
        tokens: tokens in the cache so far, the position of a probe's first one.
        room: most tokens that one probe may have.
        encode: the model's tokenizer.
    """

    prompt: Sequence[int]
    tokens: int
    room: int
    encode: Encode


@dataclass(frozen=True, slots=True)
class LayerView:
    """One request, one layer, read-only, all slots up to now.

    In ``score`` slots are in order of position, newest last; KV heads with fewer
    slots than others start with invalid ones. In ``observe`` they are as they
    lie in the cache; a probe's own come last.

    Attributes:
        layer: index of the layer, 0 first.
        keys: [num_kv_heads, num_slots, head_dim], after RoPE, cache dtype.
        positions: int64 [num_kv_heads, num_slots], RoPE position of each slot,
            -1 where there is none.
        valid: bool [num_kv_heads, num_slots], whether there is a token; None
            when all are. Invalid keys and values hold anything.
        queries: [num_q_heads, num_queries, head_dim], after RoPE, newest last;
            in ``score`` as many as ``queries_needed`` asks for (fewer when the
            compaction before was closer), in ``observe`` those of the step.
            They belong to the newest slots.
        query_positions: int64 [num_queries].
        scale: softmax scale of the layer.
        rotary: the model's RoPE; None if it has none that policies can undo.
        observed: what ``observe`` last returned for this layer, or None; a
            compaction's first probe starts from None.
        budget_tokens: in ``score``, tokens that stay per KV head on average; 0
            in ``observe``.
        load_values: reads the values when first asked; see ``values``.
        probe: in ``observe``, the probe whose tokens the queries are; else None.
    """

    layer: int
    keys: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor | None
    queries: torch.Tensor
    query_positions: torch.Tensor
    scale: float
    rotary: Rotary | None
    observed: Any
    budget_tokens: int
    load_values: Callable[[], torch.Tensor] = field(repr=False)
    probe: Probe | None = None

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
    # Whether it keeps the best-scoring tokens of a budget, which others may set.
    compresses: ClassVar[bool] = False
    # Whether ``view.rotary`` must be there; the engine refuses other models.
    needs_rotary: ClassVar[bool] = False

    @property
    def queries_needed(self) -> int:
        """Newest queries that ``score`` wants; 0 = none."""
        return 0

    @property
    def observes(self) -> Trigger:
        """Steps after which the engine calls ``observe``."""
        return Trigger.NEVER

    @property
    def observes_steps(self) -> bool:
        """Whether what it observed depends on every token so far."""
        return bool(self.observes & (Trigger.PREFILL_CHUNK | Trigger.DECODE_STEP))

    @property
    def needs_tokenizer(self) -> bool:
        """Whether ``probe_room`` and ``probes`` encode text."""
        return False

    @property
    def minimum_budget_tokens(self) -> int:
        """Smallest budget that leaves this policy anything to choose."""
        return 1

    @property
    def needs_turns(self) -> bool:
        """Whether ``turn_ends`` has anything to say."""
        return False

    def turn_ends(
        self, prompt: Sequence[int], asked: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Where turns of a prompt end, for ``plan``. Pure, like ``plan``.

        Args:
            prompt: token ids.
            asked: what the request says about it, if anything; checked.

        Returns:
            Token counts, ascending, none beyond the prompt.
        """
        return ()

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

    def observe(self, view: LayerView) -> Any:
        """Look at a step without changing anything; see ``observes``.

        Called once per layer when the step's tokens have attended.

        Returns:
            The new ``view.observed``, for ``score`` and the next ``observe``;
            dropped with the request.
        """
        raise AssertionError(f"{self.name} observes nothing")

    def pack_observed(self, observed: Any) -> dict[str, torch.Tensor]:
        """What ``observe`` returned, as tensors of its own, to be stored."""
        return {"observed": observed.clone()}

    def unpack_observed(self, packed: dict[str, torch.Tensor]) -> Any:
        """The same as ``observe`` returned it; may not change ``packed`` later."""
        return packed["observed"].clone()

    def probe_room(self, encode: Encode) -> int:
        """Fewest tokens that a probe must have; the engine keeps so many
        positions of the model free. Asked if ``observes`` has PROBE."""
        raise AssertionError(f"{self.name} does not probe")

    def probes(self, occasion: ProbeOccasion) -> Sequence[Probe]:
        """What to run before a compaction, if ``observes`` has PROBE.

        Each probe is a forward pass of its own, after which ``observe`` has
        been called for every layer. Their time is part of the compaction's.
        """
        raise AssertionError(f"{self.name} does not probe")

    @property
    def host_memory_bytes(self) -> int | None:
        """Most host memory for what is offloaded; None: the engine decides."""
        return None

    def host_bytes(self, tokens: int, geometry: Geometry) -> int:
        """Most host memory of a request that ends with so many tokens."""
        return 0

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
    compresses: ClassVar[bool] = True

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

    decode_budget: Annotated[Budget | None, BeforeValidator(Budget.parse_optional)] = (
        Field(
            default=None,
            description="Tokens kept per KV head while generating; null: what is "
            "generated stays.",
        )
    )
    fold_blocks: int = Field(
        default=4,
        ge=1,
        description="With decode_budget: blocks generated between compactions.",
    )

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        size, prompt_tokens = geometry.block_size, lengths.prompt_tokens
        budget_tokens = max(
            self.budget.resolve(prompt_tokens, geometry.kv_bytes_per_token),
            self.minimum_budget_tokens,
        )
        compactions = prompt_compactions(
            prompt_tokens, size, budget_tokens, lengths.restored
        )
        full_blocks = prompt_tokens // size
        held_blocks = full_blocks - (compactions[-1].zone.start if compactions else 0)
        fold = self._fold(full_blocks, held_blocks, lengths, geometry)
        return ResidencyPlan(size, compactions, fold)

    def _fold(
        self,
        full_blocks: int,
        held_blocks: int,
        lengths: Lengths,
        geometry: Geometry,
    ) -> Fold | None:
        """Compactions while generating, from the block at which they are due."""
        if self.decode_budget is None:
            return None
        tokens = max(
            self.decode_budget.resolve(
                lengths.prompt_tokens, geometry.kv_bytes_per_token
            ),
            self.minimum_budget_tokens,
        )
        keep_blocks = -(-tokens // geometry.block_size)
        grow = max(keep_blocks + self.fold_blocks - held_blocks, 1)
        return Fold(full_blocks + grow, self.fold_blocks, keep_blocks)

    def page_allocator(self) -> PageAllocator:
        return self.allocator

    def problems(self) -> list[str]:
        floor = self.minimum_budget_tokens
        found = []
        for setting in ("budget", "decode_budget"):
            budget = getattr(self, setting)
            if budget and budget.tokens is not None and budget.tokens < floor:
                found.append(
                    f"{setting} {budget.tokens} is below the {floor} tokens that "
                    f"{self.name} always keeps (its sinks and window); raise the "
                    "budget or shrink them"
                )
        return found
