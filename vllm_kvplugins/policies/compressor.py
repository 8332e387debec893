"""The base of policies that keep the best-scoring tokens of a budget."""

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
    """A policy that keeps the best-scoring tokens once the prompt is in.

    With ``prefill_block`` also while it is read: what is held then never exceeds
    budget and block, and the last, partial page. Each time the newest queries
    score, as they do at the prompt's end; what went does not come back.

    Subclasses write ``score``. The budget counts tokens per KV head, averaged
    over layers and heads; the allocator moves whole pages between them.

    Rounding: of a prompt of n tokens the n % block_size newest stay in their
    block untouched, and the rest of the budget is rounded up to whole pages,
    so ``budget <= kept < budget + block_size`` tokens per KV head on average
    (at least one page besides the newest tokens, for any budget).
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
            description="Tokens kept per KV head while generating; null: what is "
            "generated stays.",
        )
    )
    fold_blocks: int = Field(
        default=4,
        ge=1,
        description="With decode_budget: blocks generated between compactions.",
    )

    prefill_block: int | None = Field(
        default=None,
        ge=1,
        description="Tokens read between compactions of the prompt, which bound what "
        "it holds to budget + prefill_block; null: one compaction, at its end.",
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
        """Compactions while the request generates; None: there are none."""
        if self.decode_budget is None:
            return None
        tokens = self._tokens(self.decode_budget, prompt_tokens, geometry)
        keep_blocks = -(-tokens // geometry.block_size)
        grow = max(keep_blocks + self.fold_blocks - held_blocks, 1)
        return DecodeCompaction(full_blocks + grow, self.fold_blocks, keep_blocks)

    @property
    def observed_steps(self) -> Trigger:
        """The steps that count if tokens are scored by all queries so far.

        Those of the prompt and, with a ``decode_budget``, those that generate.
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
                    f"{self.name} always keeps (its sinks and window); raise the "
                    "budget or shrink them"
                )
        least = self.min_new_tokens
        if self.prefill_block is not None and self.prefill_block < least:
            reasons.append(
                f"prefill_block {self.prefill_block} is below the {least} new tokens "
                f"by which {self.name} scores what it holds; raise it"
            )
        return reasons
