"""The residency plan: which blocks of a request are resident, from counts alone.

Scheduler and worker are different processes and never message each other about
sizes. Both evaluate the same pure function of token counts; only the worker
knows WHICH tokens fill the resident blocks.

One compaction at token count ``at`` (here the end of a prompt)::

    blocks: [0 ........ zone.start) [zone.start ... zone.stop) [zone.stop ...
             freed, become null      landing zone, rewritten    tail, untouched;
                                     with the kept tokens       decoding goes on
            |<------------- candidates ------------------>|

Blocks below the first landing zone are freed but never modified, so what the
prefix cache knows about them stays true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Half-open interval of a request's logical block indices."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"not a block span: [{self.start}, {self.stop})")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Compaction:
    """One compaction of a request.

    Attributes:
        at_tokens: runs when exactly this many tokens have been computed.
        candidates: the blocks whose tokens compete for a place.
        zone: the last blocks of ``candidates``; the survivors move here and
            the rest of ``candidates`` is freed.
    """

    at_tokens: int
    candidates: BlockSpan
    zone: BlockSpan

    def __post_init__(self) -> None:
        inside = self.candidates.start < self.zone.start < self.zone.stop
        if not inside or self.zone.stop != self.candidates.stop:
            raise ValueError(
                f"landing zone {self.zone} must be a proper, non-empty tail of the "
                f"candidates {self.candidates}"
            )

    @property
    def freed(self) -> BlockSpan:
        return BlockSpan(self.candidates.start, self.zone.start)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """All compactions of one request, in the order in which they run.

    Attributes:
        block_size: tokens per block.
        compactions: strictly increasing in ``at_tokens``; empty = all resident.
        queries_needed: how many of the newest queries the policy scores with;
            the scheduler never cuts a prefill chunk inside them.
    """

    block_size: int
    compactions: tuple[Compaction, ...] = ()
    queries_needed: int = 0

    def __post_init__(self) -> None:
        previous_at = 0
        for compaction in self.compactions:
            if compaction.at_tokens <= previous_at:
                raise ValueError(
                    f"compactions must advance, got {compaction.at_tokens} after "
                    f"{previous_at} tokens"
                )
            if compaction.candidates.stop * self.block_size > compaction.at_tokens:
                raise ValueError(
                    f"candidates {compaction.candidates} reach past the "
                    f"{compaction.at_tokens} computed tokens"
                )
            previous_at = compaction.at_tokens

    # -- what the scheduler asks ---------------------------------------------

    def clip_chunk(self, computed_tokens: int, proposed_tokens: int) -> int:
        """Largest chunk <= ``proposed_tokens`` that respects the next cut.

        A chunk ends at the next compaction at the latest, and never leaves
        fewer than ``queries_needed`` tokens before it: the chunk that reaches
        the compaction must hold all the queries that score it.

        Returns:
            Tokens to schedule now; 0 means wait for a larger token budget.
        """
        cut = self.next_cut(computed_tokens)
        if cut is None:
            return proposed_tokens
        chunk = min(proposed_tokens, cut - computed_tokens)
        left = cut - computed_tokens - chunk
        if 0 < left < self.queries_needed:
            chunk -= self.queries_needed - left
        return max(chunk, 0)

    def next_cut(self, computed_tokens: int) -> int | None:
        """Token count of the first compaction past ``computed_tokens``."""
        for compaction in self.compactions:
            if compaction.at_tokens > computed_tokens:
                return compaction.at_tokens
        return None

    def due(self, before_tokens: int, after_tokens: int) -> Compaction | None:
        """The compaction that a step from ``before`` to ``after`` completes."""
        cut = self.next_cut(before_tokens)
        if cut is None or after_tokens < cut:
            return None
        assert after_tokens == cut, "a chunk ran past a compaction"
        return next(c for c in self.compactions if c.at_tokens == cut)

    def done(self, computed_tokens: int) -> tuple[Compaction, ...]:
        """The compactions that have run at ``computed_tokens``."""
        return tuple(c for c in self.compactions if c.at_tokens <= computed_tokens)

    @property
    def exact_prefix_blocks(self) -> int | None:
        """Leading blocks that no compaction ever rewrites; None = all of them.

        Only these may be hashed for the prefix cache or taken from it.
        """
        return self.compactions[0].zone.start if self.compactions else None

    # -- sizes ----------------------------------------------------------------

    def resident_blocks(self, computed_tokens: int) -> int:
        """Blocks that a request holds after computing ``computed_tokens``."""
        total = -(-computed_tokens // self.block_size)
        return total - sum(len(c.freed) for c in self.done(computed_tokens))

    def peak_blocks(self, total_tokens: int) -> int:
        """Most blocks held at any count up to ``total_tokens``."""
        counts = [c.at_tokens for c in self.compactions if c.at_tokens <= total_tokens]
        # Just before a compaction frees, all its candidates are still held.
        before = [
            self.resident_blocks(at) + len(self.done(at)[-1].freed) for at in counts
        ]
        return max([*before, self.resident_blocks(total_tokens)])
