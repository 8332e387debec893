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
    """Turn ends from the request, or from the tokens that close and open messages.

    Attributes:
        turn_end_token: token with which the chat template closes a message; None if
            unknown.
        user_opening: tokens with which a user's message opens; empty if unknown: then
            users and assistants take turns.
        tool_opening: tokens with which the result of a tool opens. They may begin with
            those of a user.
    """

    turn_end_token: int | None
    user_opening: tuple[int, ...] = ()
    tool_opening: tuple[int, ...] = ()
    finds_in_prompt: ClassVar[bool] = True

    def turn_ends(
        self, prompt: Sequence[int], requested: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Ends of the preamble, if there is one, and of every finished turn.

        A turn ends where a user's message follows another message. Tool calls and their
        results belong to the turn. Equation 10 compresses the preamble, which is the
        system prompt, first.
        """
        if requested is not None:
            return tuple(requested)
        if self.turn_end_token is None:
            return ()
        ends = [
            index + 1
            for index, token in enumerate(prompt)
            if token == self.turn_end_token
        ]
        if not self.user_opening:
            # The last message is the current query, and the one before it an answer.
            return tuple(ends[:-1][::-2][::-1])
        first = range(ends[0] if ends else 0)
        is_question = [any(self._is_question(prompt, start) for start in first)]
        is_question += [
            # White space may separate messages, as one token.
            self._is_question(prompt, end) or self._is_question(prompt, end + 1)
            for end in ends
        ]
        return tuple(
            end
            for end, before, after in zip(
                ends, is_question, is_question[1:], strict=False
            )
            if after and not before
        )

    def _is_question(self, prompt: Sequence[int], start: int) -> bool:
        """Whether a user's message opens at a token."""
        user, tool = self.user_opening, self.tool_opening
        is_tool = len(tool) > len(user) and _opens(prompt, start, tool)
        return not is_tool and _opens(prompt, start, user)


def _opens(prompt: Sequence[int], start: int, opening: tuple[int, ...]) -> bool:
    return tuple(prompt[start : start + len(opening)]) == opening


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

    A turn is a question with everything up to the next question: tool calls, their
    results, answers. The front end finds the turns of chats from the roles of their
    messages. Other requests name the ends of their turns (``turn_ends``), or the tokens
    of messages show them. A prompt without turns is one query and is not compressed.

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
        description="Token that closes a message, in prompts that are not chats; null: "
        "the token that the chat template puts after messages.",
    )
    user_opening: tuple[int, ...] = Field(
        default=(),
        description="Tokens that open a user's message after turn_end_token; by "
        "default those of the chat template. If only turn_end_token is set, messages "
        "of users and assistants alternate.",
    )
    tool_opening: tuple[int, ...] = Field(
        default=(),
        description="Tokens that open the result of a tool after turn_end_token; by "
        "default those of the chat template.",
    )

    @property
    def turns(self) -> MessageTurns:
        return MessageTurns(self.turn_end_token, self.user_opening, self.tool_opening)

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
                    f"flowkv: ratio {self.ratio} leaves {target - kept} blocks for a "
                    f"turn of {new} blocks; it keeps the floor of {min_blocks}"
                )
        return ResidencyPlan(size, tuple(compactions), notes=tuple(notes))
