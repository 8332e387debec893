"""Where a prompt is compacted to a budget, from token counts alone.

A prompt is compacted once, at its end, or block by block while it is read. Block by
block, a request never holds more than the budget and one block::

    budget 2, block 3    read   [. . . . .]                     5 held
                         keep         [. .]                     2 held
                         read         [. . . . .]               5 held
                         keep               [. .]               2 held, and so on
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction


@dataclass(frozen=True, slots=True)
class WholeQuestion:
    """A question that compactions inside of its turn keep whole.

    Attributes:
        start: position of its first token.
        stop: position behind its last token.
        turn_end: number of tokens up to which compactions keep it.
    """

    start: int
    stop: int
    turn_end: int


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Compactions while a prompt is read.

    Attributes:
        interval_tokens: new tokens between two compactions; rounded down to whole
            blocks, at least one block.
        min_new_tokens: smallest number of new tokens that can score the held tokens.
            If a compaction would leave fewer tokens to the end of the prompt, it runs
            earlier.
    """

    interval_tokens: int
    min_new_tokens: int = 1

    def max_blocks(self, budget_tokens: int, block_size: int) -> int:
        """Largest number of held blocks for any prompt, with the partial one."""
        return -(-budget_tokens // block_size) + self.interval_blocks(block_size) + 1

    def interval_blocks(self, block_size: int) -> int:
        """Whole blocks between two compactions."""
        return max(self.interval_tokens // block_size, 1)

    def grid(
        self,
        tokens: int,
        block_size: int,
        budget_tokens: int,
        restored: Compaction | None = None,
        questions: Sequence[WholeQuestion] = (),
    ) -> Iterator[Compaction]:
        """The compactions of the first ``tokens`` tokens, without one at their end.

        The first runs when budget and interval are full, each later one an interval
        behind. Their places do not depend on the length of the prompt, so later
        requests cannot move them. One that would free nothing, because a question stays
        whole, is left out.

        Args:
            restored: one of these compactions, which has run; yields only later ones.
            questions: take room beside the budget while they stay whole; ascending.
        """
        keep = -(-budget_tokens // block_size)
        interval = self.interval_blocks(block_size)
        start, first = 0, keep + interval
        if restored:
            start, first = restored.retained.start, restored.retained.stop + interval
        for stop in range(first, tokens // block_size + 1, interval):
            at_tokens = stop * block_size
            whole = _whole_at(at_tokens, questions)
            retained = keep + -(-(whole[1] - whole[0]) // block_size)
            if retained >= stop - start:
                continue
            region = BlockSpan(stop - retained, stop)
            yield Compaction(
                at_tokens, BlockSpan(start, stop), region, whole_tokens=whole
            )
            start = region.start

    def cuts(
        self,
        prompt_tokens: int,
        block_size: int,
        budget_tokens: int,
        restored: Compaction | None = None,
    ) -> Iterator[Compaction]:
        """The compactions before the one at the prompt's end; there may be none."""
        keep = -(-budget_tokens // block_size)
        interval = self.interval_blocks(block_size)
        min_new = min(self.min_new_tokens, interval * block_size)
        start, done = (
            (restored.retained.start, restored.at_tokens) if restored else (0, 0)
        )
        # A restored region may be larger than this budget. The first cut then waits
        # only for its queries.
        first = max(start + keep + interval, -(-(done + min_new) // block_size))
        full = prompt_tokens // block_size
        stops = list(range(first, full, interval))
        if stops and prompt_tokens - stops[-1] * block_size < min_new:
            before = stops[-2] if stops[1:] else max(start + keep, done // block_size)
            earlier = (prompt_tokens - min_new) // block_size
            stops[-1:] = [earlier] if earlier > before else []
        for stop in stops:
            kept = BlockSpan(stop - keep, stop)
            yield Compaction(stop * block_size, BlockSpan(start, stop), kept)
            start = stop - keep


def _whole_at(at_tokens: int, questions: Sequence[WholeQuestion]) -> tuple[int, int]:
    """Positions of the tokens that a compaction at ``at_tokens`` keeps whole."""
    for question in questions:
        if question.start < at_tokens <= question.turn_end:
            return question.start, min(question.stop, at_tokens)
    return 0, 0


def prompt_compactions(
    prompt_tokens: int,
    block_size: int,
    budget_tokens: int,
    blockwise: Blockwise | None = None,
    restored: Compaction | None = None,
) -> tuple[Compaction, ...]:
    """The compactions of a request up to the end of its prompt.

    The last one, at the end of the prompt, leaves ``budget_tokens``. The tokens in the
    partial block count towards the budget; the rest is rounded up to whole blocks.

    Args:
        blockwise: compactions before the end of the prompt; None: there are none.
        restored: the last compaction of the session that the request continues. It
            comes first in the result; only later compactions are planned.
    """
    compactions = [] if restored is None else [restored]
    if restored and prompt_tokens <= restored.at_tokens:
        return tuple(compactions)
    if blockwise is not None:
        compactions += blockwise.cuts(
            prompt_tokens, block_size, budget_tokens, restored
        )
    full, tail = divmod(prompt_tokens, block_size)
    start = compactions[-1].retained.start if compactions else 0
    retained = max(-(-(budget_tokens - tail) // block_size), 1)
    if retained < full - start:
        kept = BlockSpan(full - retained, full)
        compactions.append(Compaction(prompt_tokens, BlockSpan(start, full), kept))
    return tuple(compactions)
