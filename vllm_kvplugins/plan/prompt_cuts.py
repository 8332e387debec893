"""Where a prompt is compacted to a budget, from counts alone.

Once, at its end; or block by block while it is read, so that never more is held
than the budget and a block::

    budget 2, every 3    read   [. . . . .]                     5 held
                         keep         [. .]                     2
                         read         [. . . . .]               5
                         keep               [. .]               2, and so on
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_kvplugins.plan.residency_plan import BlockSpan, Compaction


@dataclass(frozen=True, slots=True)
class Blockwise:
    """Compactions while a prompt is read.

    Attributes:
        every_tokens: a prompt is compacted whenever so many tokens have come on
            top of its budget; rounded down to whole blocks, but one at least.
        least_tokens: fewest new tokens that can score the held tokens. Where a block
            would leave fewer to the end of the prompt, it ends earlier.
    """

    every_tokens: int
    least_tokens: int = 1

    def most_blocks(self, budget_tokens: int, block_size: int) -> int:
        """Blocks held at most, the partial one included; however long the prompt."""
        return -(-budget_tokens // block_size) + self.every_blocks(block_size) + 1

    def every_blocks(self, block_size: int) -> int:
        """Whole blocks that come between two compactions."""
        return max(self.every_tokens // block_size, 1)

    def grid(
        self,
        tokens: int,
        block_size: int,
        budget_tokens: int,
        restored: Compaction | None = None,
    ) -> Iterator[Compaction]:
        """The compactions of the first ``tokens`` tokens, and none at their end.

        They are where the budget and a block are full, at any prompt length: what is
        read later, by whichever request, moves none of them.

        Args:
            restored: one of them, which has run; only those behind it follow.
        """
        keep = -(-budget_tokens // block_size)
        every = self.every_blocks(block_size)
        start = restored.retained.start if restored else 0
        for stop in range(start + keep + every, tokens // block_size + 1, every):
            retained = BlockSpan(stop - keep, stop)
            yield Compaction(stop * block_size, BlockSpan(start, stop), retained)
            start = retained.start

    def cuts(
        self,
        prompt_tokens: int,
        block_size: int,
        budget_tokens: int,
        restored: Compaction | None = None,
    ) -> Iterator[Compaction]:
        """The compactions before the one at the prompt's end, which may be none."""
        keep = -(-budget_tokens // block_size)
        every = self.every_blocks(block_size)
        least = min(self.least_tokens, every * block_size)
        start, done = (
            (restored.retained.start, restored.at_tokens) if restored else (0, 0)
        )
        # what was restored may hold more than this leaves, so the first cut waits
        # for its queries only
        first = max(start + keep + every, -(-(done + least) // block_size))
        full = prompt_tokens // block_size
        stops = list(range(first, full, every))
        if stops and prompt_tokens - stops[-1] * block_size < least:
            before = stops[-2] if stops[1:] else max(start + keep, done // block_size)
            earlier = (prompt_tokens - least) // block_size
            stops[-1:] = [earlier] if earlier > before else []
        for stop in stops:
            kept = BlockSpan(stop - keep, stop)
            yield Compaction(stop * block_size, BlockSpan(start, stop), kept)
            start = stop - keep


def prompt_compactions(
    prompt_tokens: int,
    block_size: int,
    budget_tokens: int,
    blockwise: Blockwise | None = None,
    restored: Compaction | None = None,
) -> tuple[Compaction, ...]:
    """The compactions of a request until its prompt is in.

    The last one, at the end of the prompt, leaves ``budget_tokens``: the tail in
    its partial block counts, the rest is rounded up to whole blocks.

    Args:
        blockwise: None: there is no other.
        restored: the compaction behind the cache that the request starts from; it
            comes first, and only what follows it is planned.
    """
    found = [] if restored is None else [restored]
    if restored and prompt_tokens <= restored.at_tokens:
        return tuple(found)
    if blockwise is not None:
        found += blockwise.cuts(prompt_tokens, block_size, budget_tokens, restored)
    full, tail = divmod(prompt_tokens, block_size)
    start = found[-1].retained.start if found else 0
    retained = max(-(-(budget_tokens - tail) // block_size), 1)
    if retained < full - start:
        kept = BlockSpan(full - retained, full)
        found.append(Compaction(prompt_tokens, BlockSpan(start, full), kept))
    return tuple(found)
