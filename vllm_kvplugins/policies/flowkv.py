"""FlowKV: what was compressed once is never compressed again."""

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
    """Turns as a request names them, or else as the chat template closes messages.

    Attributes:
        turn_end_token: the token that closes a message; None: unknown.
    """

    turn_end_token: int | None
    finds_in_prompt: ClassVar[bool] = True

    def turn_ends(
        self, prompt: Sequence[int], requested: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Ends of finished turns: of the system prompt, then of every second message.

        The last message is the current query. An answer ends before it, another one
        two messages earlier, and so on, up to the end of the system prompt if there is
        one (equation 10 compresses it first).
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

    Section 2.2, equations 10 to 12: at the end of a turn only its own query and
    answer are compressed, by any compressor; what earlier turns kept stays as it is.
    The current query is whole. Appendix D: the budget of a turn is what the ratio
    leaves after the turns before, ``B_new(t) = ratio * S_full(t) - S_preserved``, so
    that at each turn's end a share ``ratio`` of all tokens is resident.

    ``nested`` is the baseline of the paper (equations 7 to 9): at each turn's end
    everything kept so far is compressed again, to the same sizes.

    Differs from the paper: sizes are whole pages, so a turn that ends inside a block
    leaves up to a block of its newest tokens to the next turn; every turn keeps at
    least ``floor`` tokens, above the ratio where that leaves less; scores of a turn's
    tokens come from attention over all that is resident, as the base computes them.

    Turns end where the request says (``turn_ends``) or else after the answers that
    the chat template closed with ``turn_end_token``. A prompt without turns is one
    query and stays whole.

    Cost: a compaction of the base per turn, and moving what earlier turns kept.
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
        description="Tokens per KV head that every turn keeps, above the ratio if "
        "need be.",
    )
    nested: bool = Field(
        default=False,
        description="Compress everything again at each turn, to compare with.",
    )
    turn_end_token: int | None = Field(
        default=None,
        ge=0,
        description="Token that closes a message; null: the one that the chat template "
        "puts behind messages.",
    )

    @property
    def turns(self) -> MessageTurns:
        return MessageTurns(self.turn_end_token)

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        size = geometry.block_size
        least = -(-max(self.floor, self._base.minimum_budget_tokens) // size)
        compactions: list[Compaction] = []
        notes: list[str] = []
        start = stop = seen = 0  # the retained region so far, and the turns it is of
        if lengths.restored is not None:
            compactions.append(lengths.restored)
            retained_before, seen = (
                lengths.restored.retained,
                lengths.restored.at_tokens,
            )
            start, stop = retained_before.start, retained_before.stop
        for end in lengths.turn_ends:
            if end <= seen:
                continue
            full = end // size
            kept, new = stop - start, full - stop
            target = -(-(int(self.ratio * end) - end % size) // size)
            retained = max(target, kept + least)
            if retained >= kept + new:
                continue  # nothing would go: it competes at the end of the next turn
            compactions.append(
                Compaction(
                    at_tokens=end,
                    candidates=BlockSpan(start, full),
                    retained=BlockSpan(full - retained, full),
                    fixed_blocks=0 if self.nested else kept,
                )
            )
            start, stop = full - retained, full
            if target < kept + least:
                notes.append(
                    f"flowkv: ratio {self.ratio} leaves {target - kept} blocks for the "
                    f"turn that ends at token {end}; it keeps the floor of {least}"
                )
        return ResidencyPlan(size, tuple(compactions), notes=tuple(notes))
