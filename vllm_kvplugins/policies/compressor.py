"""Base class of policies that keep the tokens with the best scores."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from vllm_kvplugins.budgets import (
    ALLOCATORS,
    Budget,
    PageAllocator,
    Uniform,
    parse_allocator,
)
from vllm_kvplugins.errors import coded
from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.prompt_cuts import Blockwise, prompt_compactions
from vllm_kvplugins.plan.residency_plan import DecodeCompaction, ResidencyPlan
from vllm_kvplugins.policies.base import KVCachePolicy
from vllm_kvplugins.policies.capabilities import Trigger


class Compressor(KVCachePolicy):
    """A policy that keeps the tokens with the best scores after the prefill.

    With ``prefill_block`` it also evicts tokens during the prefill: a request then
    never holds more than the budget, one block and the last, partly filled page. The
    newest queries compute the scores each time, as they do at the end of the prompt.
    Evicted tokens do not come back.

    Subclasses write ``score``. The budget counts tokens per KV head, averaged over
    layers and heads; the allocator moves whole pages between them.

    Rounding: for a prompt of n tokens, the newest n % block_size tokens stay in their
    block, and the rest of the budget is rounded up to whole pages. On average,
    ``budget <= kept < budget + block_size`` tokens per KV head are kept, at least one
    page in addition to the newest tokens.
    """

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
            description="Tokens kept per KV head while generating; null: all generated "
            "tokens stay.",
        )
    )
    fold_blocks: int = Field(
        default=4,
        ge=1,
        description="Number of generated blocks between two compactions; used with "
        "decode_budget.",
    )

    prefill_block: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of the prompt between two compactions. Limits a prompt to "
        "budget + prefill_block tokens; null: one compaction, after the prompt.",
    )

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        size, prompt_tokens = geometry.block_size, lengths.prompt_tokens
        compactions = prompt_compactions(
            prompt_tokens,
            size,
            self._tokens(self.budget, prompt_tokens, geometry),
            self._blockwise,
            lengths.restored,
        )
        full_blocks = prompt_tokens // size
        held_blocks = full_blocks - (
            compactions[-1].retained.start if compactions else 0
        )
        decode_compaction = self._decode_compaction(
            full_blocks, held_blocks, prompt_tokens, geometry
        )
        return ResidencyPlan(size, compactions, decode_compaction)

    def max_prompt_blocks(self, tokens: int, geometry: Geometry) -> int | None:
        if self._blockwise is None:
            return None
        budget_tokens = self._tokens(self.budget, tokens, geometry)
        max_blocks = self._blockwise.max_blocks(budget_tokens, geometry.block_size)
        return min(max_blocks, -(-tokens // geometry.block_size))

    @property
    def _blockwise(self) -> Blockwise | None:
        if self.prefill_block is None:
            return None
        return Blockwise(self.prefill_block, self.min_new_tokens)

    def _tokens(self, budget: Budget, prompt_tokens: int, geometry: Geometry) -> int:
        tokens = budget.resolve(prompt_tokens, geometry.kv_bytes_per_token)
        return max(tokens, self.minimum_budget_tokens)

    def _decode_compaction(
        self,
        full_blocks: int,
        held_blocks: int,
        prompt_tokens: int,
        geometry: Geometry,
    ) -> DecodeCompaction | None:
        """Compactions while the request generates; None without a decode_budget."""
        if self.decode_budget is None:
            return None
        tokens = self._tokens(self.decode_budget, prompt_tokens, geometry)
        keep_blocks = -(-tokens // geometry.block_size)
        grow = max(keep_blocks + self.fold_blocks - held_blocks, 1)
        return DecodeCompaction(full_blocks + grow, self.fold_blocks, keep_blocks)

    @property
    def observed_steps(self) -> Trigger:
        """Steps to observe, for policies whose scores come from all queries so far.

        The steps of the prefill and, with a ``decode_budget``, all decode steps.
        """
        if self.decode_budget is None:
            return Trigger.PREFILL_CHUNK
        return Trigger.PREFILL_CHUNK | Trigger.DECODE_STEP

    def page_allocator(self) -> PageAllocator:
        return self.allocator

    def problems(self) -> list[str]:
        floor = self.minimum_budget_tokens
        reasons = []
        if not self.has_score:
            reasons.append(
                coded(
                    "KVP108",
                    f"{self.name} has no score(view), so it cannot choose tokens; add "
                    "one (docs/adding-a-policy.md)",
                )
            )
        for setting in ("budget", "decode_budget"):
            budget = getattr(self, setting)
            if budget and budget.tokens is not None and budget.tokens < floor:
                reasons.append(
                    f"{setting} {budget.tokens} is below the {floor} tokens that "
                    f"{self.name} always keeps (sinks and window); raise the budget, "
                    "or lower sinks or window"
                )
        minimum = self.min_new_tokens
        if self.prefill_block is not None and self.prefill_block < minimum:
            reasons.append(
                f"prefill_block {self.prefill_block} is below the {minimum} new tokens "
                f"that {self.name} needs to compute scores; raise it"
            )
        return reasons
