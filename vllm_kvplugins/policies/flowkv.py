"""FlowKV: compresses each turn of a conversation once, and never again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from vllm_kvplugins.plan.geometry import Geometry, Lengths
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan
from vllm_kvplugins.policies.capabilities import Turns
from vllm_kvplugins.policies.wrapper import Wrapper


@dataclass(frozen=True, slots=True)
class MessageTurns(Turns):
    """Turn ends from the request, or from the tokens that close messages.

    Attributes:
        turn_end_token: token with which the chat template closes a message; None if
            unknown.
    """

    turn_end_token: int | None
    finds_in_prompt: ClassVar[bool] = True

    def turn_ends(
        self, prompt: Sequence[int], requested: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Ends of the system prompt, if there is one, and of every finished answer.

        The last message is the current query. The message before it is an answer, and
        so is every second one before that. Equation 10 compresses the system prompt
        first.
        """
        if requested is not None:
            return tuple(requested)
        if self.turn_end_token is None:
            return ()
        message_ends = [
            index + 1
            for index, token in enumerate(prompt)
            if token == self.turn_end_token
        ]
        return tuple(message_ends[:-1][::-2][::-1])


class FlowKV(Wrapper):
    """Compress each turn once, when it is over (FlowKV, arXiv:2505.15347).

    Section 2.2, equations 10 to 12: at the end of a turn, a compressor compresses the
    query and the answer of this turn only. Tokens kept from earlier turns do not
    change, and the current query is not compressed. Appendix D: the budget of a turn is
    ``B_new(t) = ratio * S_full(t) - S_preserved``, so that at the end of each turn a
    share ``ratio`` of all tokens is resident.

    ``nested`` is the baseline of the paper (equations 7 to 9): at the end of each turn
    it compresses all kept tokens again, to the same sizes.

    Differs from the paper:

    - Sizes are whole pages. If a turn ends inside a block, up to a block of its newest
      tokens belongs to the next turn.
    - Every turn keeps at least ``floor`` tokens, even if that exceeds the ratio.
    - The scores of a turn's tokens come from attention over all resident tokens, as the
      compressor computes them.

    The request names the ends of turns (``turn_ends``). Otherwise turns end after the
    answers that the chat template closes with ``turn_end_token``. A prompt without
    turns is one query and is not compressed.

    Cost: one compaction by the compressor per turn, and a move of the tokens kept from
    earlier turns.
    """

    name: ClassVar[str] = "flowkv"
    summary: ClassVar[str] = (
        "compresses each turn of a conversation once, by any policy"
    )
    instead: ClassVar[str] = "flowkv sets what each turn keeps; use ratio and floor"

    ratio: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Share of all tokens that is kept at the end of each turn.",
    )
    floor: int = Field(
        default=32,
        ge=1,
        description="Minimum number of tokens per KV head that every turn keeps, even "
        "above the ratio.",
    )
    nested: bool = Field(
        default=False,
        description="Compress all kept tokens again at each turn (for comparison).",
    )
    turn_end_token: int | None = Field(
        default=None,
        ge=0,
        description="Token that closes a message; null: the token that the chat "
        "template puts after messages.",
    )

    @property
    def turns(self) -> MessageTurns:
        return MessageTurns(self.turn_end_token)

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        size = geometry.block_size
        min_blocks = -(-max(self.floor, self._base.minimum_budget_tokens) // size)
        compactions: list[Compaction] = []
        notes: list[str] = []
        start = stop = compressed_tokens = (
            0  # retained region, and the tokens it covers
        )
        if lengths.restored is not None:
            compactions.append(lengths.restored)
            compressed_tokens = lengths.restored.at_tokens
            region = lengths.restored.retained
            start, stop = region.start, region.stop
        for end in lengths.turn_ends:
            if end <= compressed_tokens:
                continue
            full = end // size
            kept, new = stop - start, full - stop
            target = -(-(int(self.ratio * end) - end % size) // size)
            retained = max(target, kept + min_blocks)
            if retained >= kept + new:
                continue  # Evicts nothing; the turn competes when the next one ends.
            compactions.append(
                Compaction(
                    at_tokens=end,
                    candidates=BlockSpan(start, full),
                    retained=BlockSpan(full - retained, full),
                    fixed_blocks=0 if self.nested else kept,
                )
            )
            start, stop = full - retained, full
            if target < kept + min_blocks:
                notes.append(
                    f"flowkv: ratio {self.ratio} leaves {target - kept} blocks for the "
                    f"turn that ends at token {end}; it keeps the floor of {min_blocks}"
                )
        return ResidencyPlan(size, tuple(compactions), notes=tuple(notes))
