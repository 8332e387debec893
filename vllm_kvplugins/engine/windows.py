"""The newest queries of requests, which score their next compaction.

::

    step 7  [ a b b b ]        window of b: three of step 7, one of step 8
    step 8  [ a b ]            window of a: one of each

Without sessions a request's queries are kept once a compaction is near. With them
the newest ones are kept at all times: what its last tokens leave to be compacted is
due when the next request goes on, which does not compute these tokens again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.ops.device import on_device

# Queries kept beyond those that a compaction needs. The next request may leave out the
# newest tokens: steps in flight when an answer is cut short, a stop string, what a
# client that left has not heard.
SPARE_TOKENS = 8


def first_kept(computed_tokens: int, wanted: int) -> int:
    """First of the newest queries that a worker keeps for sessions.

    Args:
        computed_tokens: by the worker.
        wanted: newest queries that a compaction needs; at least 1.
    """
    return max(computed_tokens - wanted - SPARE_TOKENS, 0)


def first_saved(
    tokens: int, computed_tokens: int, wanted: int, known_from: int, compacted_at: int
) -> int:
    """First of the newest queries that a session keeps: all that its workers have.
    Pure, so that nobody has to ask them.

    Args:
        tokens: in the session.
        computed_tokens: by the workers, steps in flight included.
        wanted: newest queries that a compaction needs.
        known_from: position from which on the request's queries are known.
        compacted_at: token count of its last compaction, which has used up those
            before it.

    Returns:
        ``tokens`` if there are none.
    """
    if not wanted:
        return tokens
    kept = max(first_kept(computed_tokens, wanted), known_from, compacted_at)
    return min(kept, tokens)


class StepQueries:
    """Those of one step's queries that are kept, of all its rows.

    Attributes:
        queries: [num_layers, kept tokens, num_q_heads, head_dim]; None until the
            first layer has attended.

    Cost: one copy per layer, of what is kept.
    """

    __slots__ = ("_index", "_num_layers", "_tokens", "queries")

    def __init__(self, num_layers: int) -> None:
        self.queries: torch.Tensor | None = None
        self._num_layers = num_layers
        self._tokens: list[int] = []
        self._index: torch.Tensor | None = None

    @staticmethod
    def of(queries: torch.Tensor) -> StepQueries:
        """Queries of an earlier request, as they were saved."""
        step = StepQueries(queries.shape[0])
        step.queries = queries
        return step

    def __len__(self) -> int:
        return len(self._tokens)

    def want(self, first: int, count: int) -> int:
        """Keep some of the step's tokens.

        Returns:
            The place of the first among those that are kept.
        """
        place = len(self._tokens)
        self._tokens.extend(range(first, first + count))
        return place

    def put(self, layer: int, queries: torch.Tensor) -> None:
        """Take a layer's queries, [step tokens, num_q_heads, head_dim].

        They are copied: who computed them may write others to the same memory.
        """
        if self.queries is None:
            shape = (self._num_layers, len(self._tokens), *queries.shape[1:])
            self.queries = queries.new_empty(shape)
            self._index = on_device(self._tokens, queries.device)
        assert self._index is not None
        if len(queries) == len(self._tokens):
            # all of them, as while generating: twice as fast
            self.queries[layer] = queries
        else:
            torch.index_select(queries, 0, self._index, out=self.queries[layer])


@dataclass(slots=True, eq=False)
class Window:
    """The newest queries of one request, without a gap.

    Attributes:
        first: position of the oldest.
        stop: position behind the newest.
        parts: oldest first: the step, place of the first there, how many.
    """

    first: int
    stop: int
    parts: deque[tuple[StepQueries, int, int]] = field(default_factory=deque)

    @staticmethod
    def restored(queries: torch.Tensor, first: int, tokens: int) -> Window | None:
        """Of a request that goes on from the first ``tokens`` tokens of a session.

        Args:
            queries: [num_layers, n, num_q_heads, head_dim], saved ones.
            first: position of the first of them.

        Returns:
            None if all of them are of tokens that were cut off.
        """
        if tokens <= first:
            return None
        part = (StepQueries.of(queries), 0, tokens - first)
        return Window(first, tokens, deque([part]))

    def add(self, step: StepQueries, first: int, count: int) -> None:
        """Some of a step's tokens follow.

        Args:
            first: index of the first among the step's tokens.
        """
        self.parts.append((step, step.want(first, count), count))
        self.stop += count

    def drop_before(self, position: int) -> None:
        """Let go of steps that have only older queries."""
        while self.parts and self.first + self.parts[0][2] <= position:
            self.first += self.parts.popleft()[2]

    def has(self, first: int, stop: int) -> bool:
        """Whether ``take`` can be asked for these."""
        return self.first <= first < stop <= self.stop

    def take(self, first: int, stop: int) -> torch.Tensor:
        """Queries of positions ``first`` to ``stop``, oldest first.

        Returns:
            [num_layers, stop - first, num_q_heads, head_dim], a copy.
        """
        assert self.has(first, stop), f"queries {first} to {stop} are missing"
        found, position = [], self.first
        for step, place, count in self.parts:
            assert step.queries is not None, "the step has not run"
            start, end = max(first - position, 0), min(stop - position, count)
            if start < end:
                found.append(step.queries[:, place + start : place + end])
            position += count
        return torch.cat(found, dim=1)
