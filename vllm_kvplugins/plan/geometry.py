"""Inputs of a plan: the shape of the cache, and the token counts of a request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from vllm_kvplugins.plan.residency_plan import Compaction


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of a KV cache.

    Attributes:
        block_size: tokens per block.
        num_layers: attention layers in the heap.
        num_kv_heads: KV heads per layer on this rank.
        kv_bytes_per_token: bytes of keys and values of one token, over all layers and
            the KV heads of all ranks.
        head_dim: elements of a key, or of a value, of one KV head. Only the sizes of
            quantized tokens (``host_dtype``), of codes on a device and of spans depend
            on it.
        element_bytes: bytes of such an element; as ``head_dim``.
    """

    block_size: int
    num_layers: int
    num_kv_heads: int
    kv_bytes_per_token: int
    head_dim: int | None = None
    element_bytes: int | None = None

    @property
    def row_bytes(self) -> float:
        """Bytes of the key and value of one token in one layer and KV head.

        Without ``head_dim`` it assumes that this rank has all KV heads.
        """
        if self.head_dim is None or self.element_bytes is None:
            return self.kv_bytes_per_token / (self.num_layers * self.num_kv_heads)
        return 2.0 * self.head_dim * self.element_bytes

    @property
    def all_rows(self) -> int:
        """Layers times KV heads, those of all ranks."""
        return round(self.kv_bytes_per_token / self.row_bytes)

    @property
    def rank_share(self) -> float:
        """This rank's part of the cache. Needs ``head_dim`` and ``element_bytes``."""
        assert self.head_dim is not None
        assert self.element_bytes is not None
        rows = 2 * self.num_layers * self.num_kv_heads
        return rows * self.head_dim * self.element_bytes / self.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """A turn in which the model called tools, as token counts.

    A round is a message of the model and the results of its calls. It is finished when
    the model has answered these results.

    Attributes:
        question_end: where the turn's question ends; 0 if it is part of the shared
            prefix.
        round_ends: where the results of the finished rounds end, ascending.
    """

    question_end: int
    round_ends: tuple[int, ...]

    @staticmethod
    def of_ends(
        turn_ends: Sequence[int], loop_ends: Sequence[int]
    ) -> tuple[ToolLoop, ...]:
        """The loops of a prompt.

        Args:
            turn_ends: token counts at which turns end, ascending.
            loop_ends: ascending; of each turn with a loop the end of its question, then
                the ends of its finished rounds.
        """
        turns = groupby(loop_ends, key=lambda end: bisect_left(turn_ends, end))
        of_turns = [tuple(ends) for _, ends in turns]
        return tuple(ToolLoop(ends[0], ends[1:]) for ends in of_turns if len(ends) > 1)

    def cuts(self, max_tokens: int | None) -> tuple[int, ...]:
        """Ends of rounds that are more than ``max_tokens`` behind the previous cut.

        The first is counted from the end of the question. A later round adds cuts and
        moves none.

        Args:
            max_tokens: None: there are no cuts.
        """
        cuts: list[int] = []
        previous = self.question_end
        for end in self.round_ends:
            if max_tokens is not None and end - previous > max_tokens:
                cuts.append(end)
                previous = end
        return tuple(cuts)

    def behind(self, tokens: int) -> ToolLoop:
        """The counts of the tokens behind the first ``tokens``."""
        ends = tuple(end - tokens for end in self.round_ends if end > tokens)
        return ToolLoop(max(self.question_end - tokens, 0), ends)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of one request that scheduler and worker both know.

    Attributes:
        turn_ends: token counts at which turns of the prompt end, ascending; see the
            policy's ``turn_ends``.
        restored: the last compaction of the session that the request continues, with
            ``candidates`` from the shared prefix on; None: no session, or one that was
            never compacted. It is the first compaction of the plan. At least its
            ``at_tokens`` tokens are restored.
        shared_blocks: blocks of the prefix that other requests share. A policy's
            ``plan`` always gets 0: the counts are then those of the tokens behind the
            prefix, and the plan is moved behind it (``KVCachePolicy.plan_request``).
        loops: turns with calls of tools; see the policy's ``tool_loops``.
    """

    prompt_tokens: int
    turn_ends: tuple[int, ...] = ()
    restored: Compaction | None = None
    shared_blocks: int = 0
    loops: tuple[ToolLoop, ...] = ()

    def behind_prefix(self, block_size: int) -> Lengths:
        """The counts of the tokens behind the shared prefix."""
        tokens = self.shared_blocks * block_size
        restored = self.restored
        if restored is not None:
            restored = restored.moved(-self.shared_blocks, block_size)
        ends = tuple(end - tokens for end in self.turn_ends if end > tokens)
        loops = tuple(
            behind for loop in self.loops if (behind := loop.behind(tokens)).round_ends
        )
        return Lengths(self.prompt_tokens - tokens, ends, restored, loops=loops)
