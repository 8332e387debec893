"""The newest queries of requests, which score their next compaction.

::

    step 7  [ a b b b ]        window of b: three of step 7, one of step 8
    step 8  [ a b ]            window of a: one of each

Without sessions, the worker keeps a request's queries once a compaction is near. With
sessions it keeps the newest queries at all times: the request that continues the
session may start with a compaction, and it does not compute these tokens again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from vllm_kvplugins.ops.device import on_device

# Queries kept beyond those that a compaction needs. The next request may omit the
# newest tokens: steps in flight when an answer was cut short, a stop string, or tokens
# that a disconnected client never received.
SPARE_TOKENS = 8


def first_kept(computed_tokens: int, num_queries: int) -> int:
    """First of the newest queries that a worker keeps for sessions.

    Args:
        computed_tokens: by the worker.
        num_queries: newest queries that a compaction needs; at least 1.
    """
    return max(computed_tokens - num_queries - SPARE_TOKENS, 0)


def first_saved(
    tokens: int,
    computed_tokens: int,
    num_queries: int,
    known_from: int,
    compacted_at: int,
) -> int:
    """First of the newest queries that a session keeps: all that its workers have.

    A pure function, so that the scheduler need not ask the workers.

    Args:
        tokens: in the session.
        computed_tokens: by the workers, steps in flight included.
        num_queries: newest queries that a compaction needs.
        known_from: first position whose query the request's workers have seen.
        compacted_at: token count of its last compaction, which used up all earlier
            queries.

    Returns:
        A position; ``tokens`` if the session keeps no queries.
    """
    if not num_queries:
        return tokens
    kept = max(first_kept(computed_tokens, num_queries), known_from, compacted_at)
    return min(kept, tokens)


class StepQueries:
    """The queries of one step that are kept, of all its rows.

    Attributes:
        queries: [num_layers, kept tokens, num_q_heads, head_dim]; None until the
            first layer has attended.

    Cost: one copy of the kept queries per layer.
    """

    __slots__ = ("_index", "_keeps_all", "_num_layers", "_tokens", "queries")

    def __init__(self, num_layers: int) -> None:
        self.queries: torch.Tensor | None = None
        self._num_layers = num_layers
        self._tokens: list[int] = []
        self._index: torch.Tensor | None = None
        self._keeps_all = False

    @staticmethod
    def of(queries: torch.Tensor) -> StepQueries:
        """Queries that a session saved."""
        step = StepQueries(queries.shape[0])
        step.queries = queries
        return step

    def __len__(self) -> int:
        return len(self._tokens)

    def keep(self, first: int, count: int) -> int:
        """Keep the queries of some of the step's tokens.

        Returns:
            Index of the first among the kept queries.
        """
        place = len(self._tokens)
        self._tokens.extend(range(first, first + count))
        return place

    def put(self, layer: int, queries: torch.Tensor) -> None:
        """Copy a layer's kept queries out of [step tokens, num_q_heads, head_dim].

        The model may overwrite its own tensor in the next layer.
        """
        if self.queries is None:
            shape = (self._num_layers, len(self._tokens), *queries.shape[1:])
            self.queries = queries.new_empty(shape)
            self._index = on_device(self._tokens, queries.device)
            self._keeps_all = self._tokens == list(range(len(queries)))
        assert self._index is not None
        if self._keeps_all:
            # All queries are kept, as in decode steps: twice as fast.
            self.queries[layer] = queries
        else:
            torch.index_select(queries, 0, self._index, out=self.queries[layer])


@dataclass(slots=True, eq=False)
class Window:
    """The newest queries of one request, without a gap.

    Attributes:
        first: position of the oldest.
        stop: position behind the newest.
        parts: oldest first: the step, index of the first kept query in it, and how
            many follow.
        draft_tokens: how many of the newest queries are those of drafts.
    """

    first: int
    stop: int
    parts: deque[tuple[StepQueries, int, int]] = field(default_factory=deque)
    draft_tokens: int = 0

    @staticmethod
    def restored(queries: torch.Tensor, first: int, tokens: int) -> Window | None:
        """The window of a request that continues the first tokens of a session.

        Args:
            queries: [num_layers, n, num_q_heads, head_dim], saved by the session.
            first: position of the first saved query.
            tokens: how many tokens of the session the request continues.

        Returns:
            None if the request continues none of the tokens with saved queries.
        """
        if tokens <= first:
            return None
        part = (StepQueries.of(queries), 0, tokens - first)
        return Window(first, tokens, deque([part]))

    @property
    def num_bytes(self) -> int:
        """Bytes of its queries. Steps whose queries are shared with other requests
        count by this request's share."""
        if not self.parts or self.parts[0][0].queries is None:
            return 0
        per_token = self.parts[0][0].queries[:, :1].nbytes
        return (self.stop - self.first) * int(per_token)

    def add(
        self, step: StepQueries, first: int, count: int, draft_tokens: int = 0
    ) -> None:
        """Append the queries of some of a step's tokens.

        Args:
            first: index of the first among the step's tokens.
            draft_tokens: how many of these tokens, the newest, are drafts.
        """
        self.parts.append((step, step.keep(first, count), count))
        self.stop += count
        self.draft_tokens = draft_tokens

    def drop_before(self, position: int) -> None:
        """Drop steps that hold only older queries."""
        while self.parts and self.first + self.parts[0][2] <= position:
            self.first += self.parts.popleft()[2]

    def drop_rejected(self, position: int) -> None:
        """Drop the queries of rejected drafts.

        Args:
            position: where the next step starts. Before the drafts of the last step,
                the request is being recomputed, and nothing is dropped.
        """
        if position < self.stop - self.draft_tokens:
            return
        while self.parts and self.stop > position:
            step, place, count = self.parts.pop()
            left = max(count - (self.stop - position), 0)
            self.stop -= count - left
            if left:
                self.parts.append((step, place, left))

    def has(self, first: int, stop: int) -> bool:
        """Whether the window holds the queries of these positions."""
        return self.first <= first < stop <= self.stop

    def take(self, first: int, stop: int) -> torch.Tensor:
        """Queries of positions ``first`` to ``stop``, oldest first.

        Returns:
            [num_layers, stop - first, num_q_heads, head_dim], a copy.
        """
        assert self.has(first, stop), f"queries {first} to {stop} are missing"
        parts, position = [], self.first
        for step, place, count in self.parts:
            assert step.queries is not None, "the step has not run"
            start, end = max(first - position, 0), min(stop - position, count)
            if start < end:
                parts.append(step.queries[:, place + start : place + end])
            position += count
        return torch.cat(parts, dim=1)
