"""FlowKV: compresses each turn of a conversation once, and never again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import pairwise
from typing import ClassVar, NamedTuple

from pydantic import Field

from vllm_kvplugins.plan.geometry import Geometry, Lengths, ToolLoop
from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction, ResidencyPlan
from vllm_kvplugins.policies.capabilities import Turns
from vllm_kvplugins.policies.wrapper import Wrapper


@dataclass(frozen=True, slots=True)
class MessageTurns(Turns):
    """Turns from the request, or from the tokens that close and open messages.

    Attributes:
        turn_end_token: token with which the chat template closes a message; None if
            unknown.
        user_opening: tokens with which a user's message opens; empty if unknown: then
            users and assistants take turns.
        tool_opening: tokens with which the result of a tool opens. They may begin with
            those of a user.
        loop_tokens: see ``Turns``.
    """

    turn_end_token: int | None
    user_opening: tuple[int, ...] = ()
    tool_opening: tuple[int, ...] = ()
    loop_tokens: int | None = None
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
        if not self.user_opening:
            # The last message is the current query, and the one before it an answer.
            return tuple(self._message_ends(prompt)[:-1][::-2][::-1])
        messages = self._messages(prompt)
        return tuple(
            message.end
            for message, after in pairwise(messages)
            if after.sender is _Sender.USER and message.sender is not _Sender.USER
        )

    def tool_loops(
        self,
        prompt: Sequence[int],
        turn_ends: Sequence[int],
        requested: Sequence[int] | None,
    ) -> tuple[ToolLoop, ...]:
        """Loops from the request, or from the messages that tokens show.

        A message that no token closes, such as a begun answer, finishes no round.
        """
        if self.loop_tokens is None:
            return ()
        if requested is None:
            if self.turn_end_token is None or not self.user_opening:
                return ()
            if len(prompt) <= self.loop_tokens:
                return ()  # None is long enough; reading the tokens again takes time.
            requested = [
                message.end
                for message, after in pairwise(self._messages(prompt)[:-1])
                if (message.sender, after.sender) in _PARTS_END
            ]
        return ToolLoop.of_ends(turn_ends, requested)

    def _messages(self, prompt: Sequence[int]) -> list[_Message]:
        """The messages of a prompt; the last one, which no token closes, has no end."""
        ends = self._message_ends(prompt)
        first = self._sender(prompt, range(ends[0] if ends else 0))
        # White space may separate messages, as one token.
        others = [self._sender(prompt, (end, end + 1)) for end in ends]
        messages = zip((*ends, len(prompt)), (first, *others), strict=True)
        return [_Message(*message) for message in messages]

    def _message_ends(self, prompt: Sequence[int]) -> list[int]:
        closing = self.turn_end_token
        return [index + 1 for index, token in enumerate(prompt) if token == closing]

    def _sender(self, prompt: Sequence[int], starts: Iterable[int]) -> _Sender:
        """Who sent the message that opens at one of some tokens."""
        user, tool = self.user_opening, self.tool_opening
        is_longer = len(tool) > len(user)
        senders = set()
        for start in starts:
            is_tool = bool(tool) and _opens(prompt, start, tool)
            if _opens(prompt, start, user) and not (is_tool and is_longer):
                return _Sender.USER
            senders.add(_Sender.TOOL if is_tool else _Sender.MODEL)
        return _Sender.TOOL if _Sender.TOOL in senders else _Sender.MODEL


class _Sender(Enum):
    USER = auto()
    TOOL = auto()
    MODEL = auto()  # or instructions


class _Message(NamedTuple):
    """One message of a prompt.

    Attributes:
        end: number of tokens up to its end.
    """

    end: int
    sender: _Sender


# Senders of a message and of the next one, between which a part of a loop ends: the
# question, or a round whose results the model has answered.
_PARTS_END = (
    (_Sender.USER, _Sender.MODEL),
    (_Sender.TOOL, _Sender.MODEL),
)


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
    - Long tool loops are compressed before their turn ends, see below.

    A turn is a question with everything up to the next question: tool calls, their
    results, answers. The front end finds the turns of chats from the roles of their
    messages. Other requests name the ends of their turns (``turn_ends``), or the tokens
    of messages show them. A prompt without turns is one query and is not compressed.

    A round of a tool loop is a message of the model and the results of its calls. It is
    finished when the model has answered the results. Where more than ``loop_tokens``
    tokens of finished rounds have come since the question, or since the last
    compaction, they are compressed as a turn is. The question moves to the kept tokens
    whole, and stays there: ``ratio`` counts the tokens besides it. The newest round,
    whose results the model is about to read, stays complete, with the call before it.

    Cost: one compaction by the compressor per turn and per ``loop_tokens`` tokens of a
    loop, and a move of the tokens kept from earlier turns.
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
    loop_tokens: int | None = Field(
        default=4096,
        ge=1,
        description="Compress the finished rounds of a tool loop, before its turn "
        "ends, when they have more tokens than this; null: only when the turn ends.",
    )
    nested: bool = Field(
        default=False,
        description="Compress all kept tokens again at each turn (for comparison). "
        "Tool loops are then compressed only when their turn ends.",
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
        # A question could not stay whole while everything before it is compressed.
        loop_tokens = None if self.nested else self.loop_tokens
        return MessageTurns(
            self.turn_end_token, self.user_opening, self.tool_opening, loop_tokens
        )

    def plan(self, lengths: Lengths, geometry: Geometry) -> ResidencyPlan:
        size, restored = geometry.block_size, lengths.restored
        min_blocks = -(-max(self.floor, self._base.minimum_budget_tokens) // size)
        compactions: list[Compaction] = []
        notes: list[str] = []
        # Blocks of the retained region, and of questions in it that stay whole.
        start = stop = exact = 0
        for cut in self._cuts(lengths):
            if restored is not None and cut.end > restored.at_tokens:
                # What is restored may come from other turns than this request names.
                start, stop = restored.retained.start, restored.retained.stop
                compactions, notes, restored = [restored], [], None
            full = cut.end // size
            # The question moves to the region with all blocks in front of it.
            whole = max(stop, -(-cut.question_end // size))
            fixed, new = whole - start, full - whole
            exact_now = (
                exact + whole - max(stop, min(cut.question_start // size, whole))
            )
            budget = int(self.ratio * (cut.end - exact_now * size)) - cut.end % size
            target = exact_now - (-budget // size)
            retained = max(target, fixed + min_blocks)
            if retained >= fixed + new:
                continue  # Evicts nothing; the part competes when the next one ends.
            compactions.append(
                Compaction(
                    at_tokens=cut.end,
                    candidates=BlockSpan(start, full),
                    retained=BlockSpan(full - retained, full),
                    fixed_blocks=0 if self.nested else fixed,
                )
            )
            start, stop, exact = full - retained, full, exact_now
            if target < fixed + min_blocks:
                notes.append(
                    f"flowkv: ratio {self.ratio} leaves {max(target - fixed, 0)} "
                    f"blocks for {cut.what} of {new} blocks; it keeps the floor of "
                    f"{min_blocks}"
                )
        if restored is not None:
            compactions, notes = [restored], []
        return ResidencyPlan(size, tuple(compactions), notes=tuple(notes))

    def _cuts(self, lengths: Lengths) -> Iterator[_Cut]:
        """Where a request may be compacted, in order."""
        loop_tokens = self.turns.loop_tokens
        questions = {
            end: loop.question_end
            for loop in lengths.loops
            for end in loop.cuts(loop_tokens)
        }
        turn_ends, turn_start = set(lengths.turn_ends), 0
        for end in sorted({*turn_ends, *questions}):
            if end in turn_ends:
                yield _Cut(end, "a turn")
                turn_start = end
            else:
                yield _Cut(end, "rounds of a tool loop", turn_start, questions[end])


class _Cut(NamedTuple):
    """Where a request may be compacted.

    Attributes:
        end: number of tokens.
        what: what ends there.
        question_start: first token of the question that is live there; 0 if none is.
        question_end: number of tokens up to its end.
    """

    end: int
    what: str
    question_start: int = 0
    question_end: int = 0
