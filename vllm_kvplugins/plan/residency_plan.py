"""The residency plan: which blocks of a request are resident, from token counts alone.

Scheduler and worker are different processes and send each other no messages about
sizes. Both evaluate the same pure function of token counts. Only the worker knows
which tokens fill the resident blocks.

One compaction at token count ``at_tokens``, here the end of a prompt::

    blocks  [0 ... retained.start) [retained.start ... retained.stop) [retained.stop ...
             freed, become null     retained region, rewritten         tail, unchanged;
                                    with the kept tokens               decoding appends
            |<------------------- candidates ------------------->|

Blocks below the first retained region are freed but never modified, so their entries
in the prefix cache stay valid.

With a shared prefix, the first blocks are neither candidates nor freed: requests with
the same prefix hold the same blocks, through vLLM's prefix cache::

    blocks  [0 ... shared) [shared ... retained.start) [retained.start ...
             stays held      freed                       as above

A policy plans the tokens behind the prefix, as if they were the whole request.
``ResidencyPlan.behind`` moves this plan behind the prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
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
        at_tokens: runs when exactly this many tokens are computed.
        candidates: the blocks whose tokens compete for the retained region.
        retained: the retained region, the last blocks of ``candidates``. The kept
            tokens move here; all other blocks of ``candidates`` are freed.
        fixed_blocks: how many first blocks of ``candidates`` move here whole: the
            previous retained region, and any blocks behind it. Only later tokens then
            compete, for the remaining blocks. 0: all candidates compete.
        shared_blocks: blocks of the shared prefix, in front of all candidates. They
            stay in place.
        whole_tokens: positions [start, stop) of tokens that stay, whatever their
            scores. The retained region has room for those among the candidates.
    """

    at_tokens: int
    candidates: BlockSpan
    retained: BlockSpan
    fixed_blocks: int = 0
    shared_blocks: int = 0
    whole_tokens: tuple[int, int] = (0, 0)

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
        if not 0 <= self.shared_blocks <= self.candidates.start:
            raise ValueError(
                f"candidates {self.candidates} overlap the {self.shared_blocks} blocks "
                "of the shared prefix"
            )

    @property
    def freed(self) -> BlockSpan:
        """Blocks that go back to vLLM's pool."""
        return BlockSpan(self.candidates.start, self.retained.start)

    @property
    def dropped_blocks(self) -> int:
        """Number of blocks of the request that are free after it, earlier ones too."""
        return self.retained.start - self.shared_blocks

    def moved(self, blocks: int, block_size: int) -> Compaction:
        """The same compaction where the shared prefix is longer by some blocks.

        Args:
            blocks: negative to make the prefix shorter.
        """
        spans = (self.candidates, self.retained)
        candidates, retained = (
            BlockSpan(span.start + blocks, span.stop + blocks) for span in spans
        )
        moved_tokens = blocks * block_size
        first, stop = self.whole_tokens
        whole = (first + moved_tokens, stop + moved_tokens) if first < stop else (0, 0)
        return Compaction(
            self.at_tokens + moved_tokens,
            candidates,
            retained,
            self.fixed_blocks,
            self.shared_blocks + blocks,
            whole,
        )


_AT_TOKENS = attrgetter("at_tokens")


@dataclass(frozen=True, slots=True)
class DecodeCompaction:
    """Compactions while a request generates.

    Whenever ``interval_blocks`` new blocks are full, the request compacts them and the
    retained region into the newest blocks. Most layers keep ``keep_blocks``;
    ``whole_layers`` of the ``num_layers`` layers keep everything.

    Attributes:
        first_at_block: number of full blocks at the first compaction.
        shared_blocks: of the shared prefix, see :class:`Compaction`; they count in
            ``first_at_block``, but not in what is kept.
    """

    first_at_block: int
    interval_blocks: int
    keep_blocks: int
    whole_layers: int = 0
    num_layers: int = 1
    shared_blocks: int = 0

    def __post_init__(self) -> None:
        if min(self.interval_blocks, self.keep_blocks) < 1:
            raise ValueError(
                "a decode-time compaction needs an interval and a retained region of "
                f"at least one block, got {self.interval_blocks} and "
                f"{self.keep_blocks}"
            )
        if self.first_at_block - self.shared_blocks <= self.keep_blocks:
            raise ValueError(
                f"a compaction at block {self.first_at_block} that keeps "
                f"{self.keep_blocks} blocks frees nothing"
            )
        if not 0 <= self.whole_layers < self.num_layers:
            raise ValueError(
                f"{self.whole_layers} of {self.num_layers} layers cannot stay whole"
            )

    def retained(self, stop: int) -> BlockSpan:
        """The retained region of a compaction of the first ``stop`` blocks.

        All layers share the pages of its blocks: layers that keep everything use more
        than their part, the others less.
        """
        compacted = (self.num_layers - self.whole_layers) * self.keep_blocks
        whole = self.whole_layers * (stop - self.shared_blocks)
        size = -(-(compacted + whole) // self.num_layers)
        return BlockSpan(max(stop - size, self.shared_blocks), stop)


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """All compactions of one request, in the order in which they run.

    Attributes:
        block_size: tokens per block.
        compactions: strictly increasing in ``at_tokens``; the candidates of each start
            at the first block that is still held. Empty: all blocks stay resident.
        decode_compaction: compactions after ``compactions``, while the request
            generates; None: the request grows.
        notes: messages for the user, logged once per request.
        shared_blocks: blocks of the shared prefix; 0: there is none.
    """

    block_size: int
    compactions: tuple[Compaction, ...] = ()
    decode_compaction: DecodeCompaction | None = None
    notes: tuple[str, ...] = ()
    shared_blocks: int = 0

    def __post_init__(self) -> None:
        previous_at, first_held, last_region = 0, self.shared_blocks, 0
        for part in (*self.compactions, self.decode_compaction):
            if part is not None and part.shared_blocks != self.shared_blocks:
                raise ValueError(
                    f"{part} has another shared prefix than the plan, which has "
                    f"{self.shared_blocks} blocks"
                )
        for compaction in self.compactions:
            if compaction.at_tokens <= previous_at:
                raise ValueError(
                    f"compactions must advance, got {compaction.at_tokens} after "
                    f"{previous_at} tokens"
                )
            if compaction.candidates.stop * self.block_size > compaction.at_tokens:
                raise ValueError(
                    f"candidates {compaction.candidates} extend beyond the "
                    f"{compaction.at_tokens} computed tokens"
                )
            if compaction.candidates.start != first_held:
                raise ValueError(
                    f"candidates {compaction.candidates} do not start at block "
                    f"{first_held}, the first block that is still held"
                )
            if 0 < compaction.fixed_blocks < last_region:
                raise ValueError(
                    f"{compaction.fixed_blocks} fixed blocks are a part of the "
                    f"previous retained region of {last_region} blocks, which stays "
                    "whole or competes whole"
                )
            previous_at, first_held = compaction.at_tokens, compaction.retained.start
            last_region = len(compaction.retained)
        decoding = self.decode_compaction
        if decoding and decoding.first_at_block * self.block_size <= previous_at:
            raise ValueError(
                f"the first decode-time compaction, at block "
                f"{decoding.first_at_block}, is not after the last compaction of the "
                f"prompt at {previous_at} tokens"
            )

    def behind(self, shared_blocks: int) -> ResidencyPlan:
        """This plan behind a shared prefix, as the plan of the whole request."""
        decoding = self.decode_compaction
        if decoding is not None:
            decoding = replace(
                decoding,
                first_at_block=decoding.first_at_block + shared_blocks,
                shared_blocks=decoding.shared_blocks + shared_blocks,
            )
        return replace(
            self,
            compactions=tuple(
                each.moved(shared_blocks, self.block_size) for each in self.compactions
            ),
            decode_compaction=decoding,
            shared_blocks=self.shared_blocks + shared_blocks,
        )

    @property
    def shared_tokens(self) -> int:
        """Number of tokens in the blocks of the shared prefix."""
        return self.shared_blocks * self.block_size

    # -- the sequence of compactions ------------------------------------------

    def compaction(self, index: int) -> Compaction:
        """Compaction number ``index``; unlimited with decode-time compactions."""
        if index < len(self.compactions):
            return self.compactions[index]
        decoding = self.decode_compaction
        assert decoding is not None, f"there is no compaction {index}"
        step = index - len(self.compactions)
        stop = decoding.first_at_block + step * decoding.interval_blocks
        if step:
            start = decoding.retained(stop - decoding.interval_blocks).start
        elif self.compactions:
            start = self.compactions[-1].retained.start
        else:
            start = self.shared_blocks
        return Compaction(
            stop * self.block_size,
            BlockSpan(start, stop),
            decoding.retained(stop),
            shared_blocks=self.shared_blocks,
        )

    def num_done(self, computed_tokens: int) -> int:
        """Number of compactions that have run at ``computed_tokens``."""
        done = bisect_right(self.compactions, computed_tokens, key=_AT_TOKENS)
        decoding = self.decode_compaction
        if decoding is not None:
            blocks = computed_tokens // self.block_size
            past = blocks - decoding.first_at_block
            if past >= 0:
                done += past // decoding.interval_blocks + 1
        return done

    @property
    def is_static(self) -> bool:
        """Whether no compaction ever runs."""
        return not self.compactions and self.decode_compaction is None

    # -- chunks and queries ---------------------------------------------------

    def clip_chunk(
        self,
        computed_tokens: int,
        proposed_tokens: int,
        known_tokens: int | None = None,
    ) -> int:
        """``proposed_tokens``, or fewer if the next compaction comes before.

        Args:
            known_tokens: how many of the proposed tokens are not drafts; None: all. A
                chunk with drafts ends before the compaction, because they may be
                rejected.
        """
        cut = self.next_cut(computed_tokens)
        if cut is None:
            return proposed_tokens
        room = cut - computed_tokens
        if known_tokens is not None and known_tokens < min(room, proposed_tokens):
            room -= 1
        return min(proposed_tokens, room)

    def next_cut(self, computed_tokens: int) -> int | None:
        """Token count of the first compaction after ``computed_tokens``, if any."""
        index = self.num_done(computed_tokens)
        if index >= len(self.compactions) and self.decode_compaction is None:
            return None
        return self.compaction(index).at_tokens

    def due(self, before_tokens: int, after_tokens: int) -> Compaction | None:
        """The compaction at the end of a step between two token counts, if any."""
        index = self.num_done(before_tokens)
        if self.num_done(after_tokens) == index:
            return None
        compaction = self.compaction(index)
        assert after_tokens == compaction.at_tokens, "a chunk crosses a compaction"
        return compaction

    def window_start(self, cut: int, num_queries: int) -> int:
        """Position of the first query that the compaction at ``cut`` needs.

        The compaction needs the newest ``num_queries`` queries, without those before
        the previous compaction and without those of the shared prefix.
        """
        done = self.num_done(cut - 1)
        previous = self.compaction(done - 1).at_tokens if done else self.shared_tokens
        return max(cut - num_queries, previous)

    def can_start_at(
        self, tokens: int, compacted_at: int, num_queries: int, first_query: int
    ) -> int:
        """How many of ``tokens`` restored tokens a request can start from.

        It cannot skip the next compaction. If the session lacks a query that the next
        compaction needs, the request must compute all tokens of the query window.

        Args:
            compacted_at: tokens at the last compaction of the restored cache; fewer
                cannot be restored.
            num_queries: number of queries that a compaction needs.
            first_query: position of the first restored query.

        Returns:
            At least ``compacted_at``, or 0: the cache cannot be restored.
        """
        cut = self.next_cut(compacted_at)
        if cut is not None:
            window_start = self.window_start(cut, num_queries)
            tokens = min(tokens, cut if first_query <= window_start else window_start)
        return tokens if tokens >= compacted_at else 0

    @property
    def exact_prefix_blocks(self) -> int | None:
        """Number of first blocks that no compaction rewrites; None: all of them.

        Only these may enter the prefix cache or come from it.
        """
        return None if self.is_static else self.compaction(0).retained.start

    # -- sizes ----------------------------------------------------------------

    def resident_blocks(self, computed_tokens: int) -> int:
        """Number of held blocks after computing ``computed_tokens``."""
        total = -(-computed_tokens // self.block_size)
        return total - self.dropped_blocks(self.num_done(computed_tokens))

    def dropped_blocks(self, num_compactions: int) -> int:
        """Number of blocks that are free after the first ``num_compactions``."""
        if not num_compactions:
            return 0
        return self.compaction(num_compactions - 1).dropped_blocks

    def peak_blocks(
        self,
        total_tokens: int,
        since: int = 0,
        slots_ahead: int = 0,
        max_slots: int | None = None,
    ) -> int:
        """Largest number of held blocks at any count up to ``total_tokens``.

        Args:
            since: number of compactions before the request's first step; 1 if it
                continues a compacted session.
            slots_ahead: slots that a request has beyond its computed tokens, which
                drafts of speculative decoding need.
            max_slots: slots that a request has at most; None: no limit.
        """

        def blocks_at(tokens: int) -> int:
            slots = tokens + slots_ahead
            if max_slots is not None:
                slots = min(slots, max_slots)
            return -(-slots // self.block_size)

        done = self.num_done(total_tokens)
        block_counts = [blocks_at(total_tokens) - self.dropped_blocks(done)]
        for index in range(since, done):
            # Just before a compaction frees, all its candidates are still held.
            blocks = blocks_at(self.compaction(index).at_tokens)
            block_counts.append(blocks - self.dropped_blocks(index))
        return max(block_counts)
