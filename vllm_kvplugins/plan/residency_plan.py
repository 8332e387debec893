"""The residency plan: which blocks of a request are resident, from counts alone.

Scheduler and worker are different processes and never message each other about
sizes. Both evaluate the same pure function of token counts; only the worker
knows WHICH tokens fill the resident blocks.

One compaction at token count ``at`` (here the end of a prompt)::

    blocks: [0 ........ zone.start) [zone.start ... zone.stop) [zone.stop ...
             freed, become null      retained region, rewritten    tail, untouched;
                                     with the kept tokens       decoding goes on
            |<------------- candidates ------------------>|

Blocks below the first retained region are freed but never modified, so what the
prefix cache knows about them stays true.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import attrgetter


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
        fixed_blocks: the retained region before this one, of so many blocks, moves
            here whole; only what came after it competes, for what is left.
    """

    at_tokens: int
    candidates: BlockSpan
    retained: BlockSpan
    fixed_blocks: int = 0

    def __post_init__(self) -> None:
        inside = self.candidates.start <= self.retained.start < self.retained.stop
        if not inside or self.retained.stop != self.candidates.stop:
            raise ValueError(
                f"retained region {self.retained} must be a non-empty tail of the "
                f"candidates {self.candidates}"
            )
        if not 0 <= self.fixed_blocks < len(self.retained):
            raise ValueError(
                f"retained region {self.retained} cannot hold {self.fixed_blocks} "
                "fixed blocks"
            )

    @property
    def freed(self) -> BlockSpan:
        return BlockSpan(self.candidates.start, self.retained.start)


_AT_TOKENS = attrgetter("at_tokens")


@dataclass(frozen=True, slots=True)
class DecodeCompaction:
    """Compactions that go on while a request generates.

    Whenever ``every_blocks`` new blocks are full, they and the retained region are
    folded into the newest ``zone_blocks`` blocks: ``keep_blocks`` for most layers,
    and everything for ``whole_layers`` of ``num_layers``.

    Attributes:
        first_at_block: full blocks at the first fold.
    """

    first_at_block: int
    every_blocks: int
    keep_blocks: int
    whole_layers: int = 0
    num_layers: int = 1

    def __post_init__(self) -> None:
        if min(self.every_blocks, self.keep_blocks) < 1:
            raise ValueError(
                f"a fold keeps and takes at least one block, got {self.keep_blocks} "
                f"and {self.every_blocks}"
            )
        if self.first_at_block <= self.keep_blocks:
            raise ValueError(
                f"a fold at block {self.first_at_block} has nothing to free beyond "
                f"{self.keep_blocks} blocks"
            )
        if not 0 <= self.whole_layers < self.num_layers:
            raise ValueError(
                f"{self.whole_layers} of {self.num_layers} layers cannot stay whole"
            )

    def retained_blocks(self, stop: int) -> int:
        """Blocks whose pages hold what stays of the first ``stop`` ones."""
        some = (self.num_layers - self.whole_layers) * self.keep_blocks
        return -(-(some + self.whole_layers * stop) // self.num_layers)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """All compactions of one request, in the order in which they run.

    Attributes:
        block_size: tokens per block.
        compactions: strictly increasing in ``at_tokens``, each one's candidates
            from the first block on that is still held; empty = all resident.
        fold: what happens during generation, after ``compactions``; None = the
            request grows.
        notes: what the user should know about it; logged once per request.
    """

    block_size: int
    compactions: tuple[Compaction, ...] = ()
    fold: DecodeCompaction | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        previous_at = first_held = 0
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
            if compaction.candidates.start != first_held:
                raise ValueError(
                    f"candidates {compaction.candidates} do not start at block "
                    f"{first_held}, the first one that is still held"
                )
            previous_at, first_held = compaction.at_tokens, compaction.retained.start
        if self.fold and self.fold.first_at_block * self.block_size <= previous_at:
            raise ValueError(
                f"the first fold, at block {self.fold.first_at_block}, is before "
                f"the last compaction at {previous_at} tokens"
            )

    # -- the sequence of compactions ------------------------------------------

    def compaction(self, index: int) -> Compaction:
        """The ``index``-th compaction; with a fold there is no last one."""
        if index < len(self.compactions):
            return self.compactions[index]
        assert self.fold is not None, f"there is no compaction {index}"
        step = index - len(self.compactions)
        stop = self.fold.first_at_block + step * self.fold.every_blocks
        if step:
            before = stop - self.fold.every_blocks
            start = before - self.fold.retained_blocks(before)
        else:
            start = self.compactions[-1].retained.start if self.compactions else 0
        return Compaction(
            stop * self.block_size,
            BlockSpan(start, stop),
            BlockSpan(stop - self.fold.retained_blocks(stop), stop),
        )

    def num_done(self, computed_tokens: int) -> int:
        """How many compactions have run at ``computed_tokens``."""
        done = bisect_right(self.compactions, computed_tokens, key=_AT_TOKENS)
        if self.fold is not None:
            blocks = computed_tokens // self.block_size
            past = blocks - self.fold.first_at_block
            if past >= 0:
                done += past // self.fold.every_blocks + 1
        return done

    @property
    def is_static(self) -> bool:
        """Whether no compaction ever runs."""
        return not self.compactions and self.fold is None

    # -- what the scheduler asks ---------------------------------------------

    def clip_chunk(self, computed_tokens: int, proposed_tokens: int) -> int:
        """Largest chunk <= ``proposed_tokens``: one ends at the next compaction."""
        cut = self.next_cut(computed_tokens)
        return (
            proposed_tokens
            if cut is None
            else min(proposed_tokens, cut - computed_tokens)
        )

    def next_cut(self, computed_tokens: int) -> int | None:
        """Token count of the first compaction past ``computed_tokens``."""
        index = self.num_done(computed_tokens)
        if index >= len(self.compactions) and self.fold is None:
            return None
        return self.compaction(index).at_tokens

    def due(self, before_tokens: int, after_tokens: int) -> Compaction | None:
        """The compaction that a step from ``before`` to ``after`` completes."""
        index = self.num_done(before_tokens)
        if self.num_done(after_tokens) == index:
            return None
        compaction = self.compaction(index)
        assert after_tokens == compaction.at_tokens, "a chunk ran past a compaction"
        return compaction

    def window_start(self, cut: int, wanted: int) -> int:
        """First of the newest ``wanted`` tokens before the compaction at ``cut``;
        none that the compaction before that has seen."""
        done = self.num_done(cut - 1)
        previous = self.compaction(done - 1).at_tokens if done else 0
        return max(cut - wanted, previous)

    def can_start_at(
        self, tokens: int, compacted_at: int, wanted: int, first_query: int
    ) -> int:
        """From how many of ``tokens`` restored ones a request can go on: from none
        behind the next compaction, and from none that it needs as a query, if the
        oldest query that it needs is not restored with them.

        Args:
            compacted_at: of the restored cache, without which it makes no sense.
            wanted: queries that a compaction needs.
            first_query: position from which on queries are restored.

        Returns:
            At least ``compacted_at``; 0 = from none.
        """
        cut = self.next_cut(compacted_at)
        if cut is not None:
            opens = self.window_start(cut, wanted)
            tokens = min(tokens, cut if first_query <= opens else opens)
        return tokens if tokens >= compacted_at else 0

    @property
    def exact_prefix_blocks(self) -> int | None:
        """Leading blocks that no compaction ever rewrites; None = all of them.

        Only these may be hashed for the prefix cache or taken from it.
        """
        return None if self.is_static else self.compaction(0).retained.start

    # -- sizes ----------------------------------------------------------------

    def resident_blocks(self, computed_tokens: int) -> int:
        """Blocks that a request holds after computing ``computed_tokens``."""
        total = -(-computed_tokens // self.block_size)
        done = self.num_done(computed_tokens)
        return total - (self.compaction(done - 1).retained.start if done else 0)

    def peak_blocks(self, total_tokens: int, since: int = 0) -> int:
        """Most blocks held at any count up to ``total_tokens``.

        Args:
            since: compactions that had run before the request began: 1 for one that
                continues a session.
        """
        held = [self.resident_blocks(total_tokens)]
        for index in range(since, self.num_done(total_tokens)):
            compaction = self.compaction(index)
            # Just before a compaction frees, all its candidates are still held.
            blocks = -(-compaction.at_tokens // self.block_size)
            held.append(blocks - compaction.candidates.start)
        return max(held)
