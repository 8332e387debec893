"""R-KV: keeps tokens that are attended to and that no later token repeats."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field

from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.scoring.attention_votes import (
    drop_invalid,
    mark_window,
    pool_votes,
    valid_keys,
)

# Largest number of cosines in memory; 2**22 float32 are 16 MiB.
_MAX_COSINES = 1 << 22
# Slots of the first tile in the search for neighbors; each further tile has twice as
# many. Most keys have a neighbor among the newest slots, and leave the search early.
_FIRST_TILE = 64


class RKV(Compressor):
    """Importance minus redundancy (R-KV, arXiv:2505.24133).

    ``importance_share * I - (1 - importance_share) * R``, for each KV head:

    - I: attention of the newest ``window`` queries to the slots before them. The logits
      of a KV head are the maximum over its query heads; the softmax is averaged over
      the queries, then max-pooled.
    - R: softmax over all slots of the mean cosine of a slot's key to all other keys.
      Each key leaves out its ``retain`` newest neighbors with a cosine above
      ``threshold``, so of tokens that repeat each other the newest ones stay.

    Constants are those of the paper where it names them, else of the authors' code.

    Differs from the paper: the prompt competes for ``budget`` like any other, and
    generated tokens compete every ``fold_blocks`` blocks, if there is a
    ``decode_budget``. A key without neighbors leaves nothing out; in the authors' code
    it leaves out the first token. Learned attention sinks take no part in I, because
    its softmax is over the slots before the window only.

    Cost: the neighbors of a key are searched from the newest slot backwards, until it
    has ``retain``. Keys that have none are compared with all others: at most
    ``2 * slots**2 * head_dim`` operations per KV head, those of the prompt's attention
    divided by the number of query heads per KV head. Memory: 16 MiB of cosines, a few
    times, and float32 keys of one KV head.
    """

    name: ClassVar[str] = "r-kv"
    summary: ClassVar[str] = (
        "keeps tokens that the last queries attend to and that no later token repeats"
    )

    window: int = Field(
        default=8, ge=1, description="Number of newest queries that vote."
    )
    kernel_size: int = Field(
        default=7, ge=1, description="Width of the max pooling; odd."
    )
    importance_share: float = Field(
        default=0.1,
        ge=0.0,
        le=1.0,
        description="Weight of attention in the score; the rest weighs redundancy.",
    )
    threshold: float = Field(
        default=0.5,
        ge=0.0,
        le=1.0,
        description="Keys with a larger cosine are neighbors.",
    )
    retain: int = Field(
        default=1,
        ge=0,
        description="Newest neighbors of a key that do not count as redundant to it.",
    )

    @property
    def queries_needed(self) -> int:
        return self.window

    @property
    def minimum_budget_tokens(self) -> int:
        return self.window + 1

    @property
    def scores_heads_separately(self) -> bool:
        return True

    def score(self, view: LayerView) -> torch.Tensor:
        keys = valid_keys(view.keys, view.valid)
        num_slots = keys.shape[1]
        scores = torch.empty(keys.shape[:2], dtype=torch.float32, device=keys.device)
        prefix = num_slots - view.queries.shape[1]
        for head in range(keys.shape[0]):
            valid = None if view.valid is None else view.valid[head]
            importance = self._importance(view, keys[head], head, valid)
            redundancy = self._redundancy(keys[head], valid)
            redundancy.mul_(1 - self.importance_share)
            scores[head] = -redundancy
            scores[head, :prefix] += self.importance_share * importance
        scores = drop_invalid(scores, view.valid)
        return mark_window(scores[:, :prefix], num_slots)

    def _importance(
        self,
        view: LayerView,
        keys: torch.Tensor,
        head: int,
        valid: torch.Tensor | None,
    ) -> torch.Tensor:
        """Pooled attention to the slots before the window.

        Args:
            keys: [num_slots, head_dim] of one KV head, 0 where there is no token.
            valid: bool [num_slots]; None: all.

        Returns:
            float32 [num_slots - window].
        """
        window = view.queries.shape[1]
        prefix = keys.shape[0] - window
        group = view.queries.shape[0] // view.positions.shape[0]
        queries = view.queries[head * group : (head + 1) * group].flatten(0, 1)
        logits = (queries @ keys[:prefix].T).to(torch.float32).mul_(view.scale)
        logits = view.rules.cap(logits).view(group, window, prefix).amax(0)
        if valid is not None:
            logits.masked_fill_(~valid[:prefix], -torch.inf)
        votes = logits.softmax(-1).mean(0, keepdim=True)
        return pool_votes(votes, self.kernel_size, "max")[0]

    def _redundancy(
        self, keys: torch.Tensor, valid: torch.Tensor | None
    ) -> torch.Tensor:
        """Softmax over slots of the mean cosine to the other keys.

        Args:
            keys: [num_slots, head_dim] of one KV head, 0 where there is no token.
            valid: bool [num_slots]; None: all.

        Returns:
            float32 [num_slots]; 0 where there is no token.
        """
        unit = F.normalize(keys.to(torch.float32), dim=-1)
        sums = unit @ unit.sum(0) - unit.square().sum(-1)
        sums -= newest_neighbors(unit, self.threshold, self.retain)
        if valid is None:
            return (sums / keys.shape[0]).softmax(0)
        means = sums / valid.sum()
        return means.masked_fill(~valid, -torch.inf).softmax(0)

    def problems(self) -> list[str]:
        reasons = super().problems()
        if self.kernel_size % 2 == 0:
            reasons.append(f"kernel_size {self.kernel_size} must be odd")
        return reasons

    @property
    def remarks(self) -> list[str]:
        if self.decode_budget is not None:
            return []
        return [
            "r-kv is made for long answers, and without decode_budget all generated "
            "tokens stay; set decode_budget to compress them too"
        ]


def newest_neighbors(unit: torch.Tensor, threshold: float, retain: int) -> torch.Tensor:
    """Cosines of each key to those for which it is among the newest neighbors.

    Args:
        unit: float32 [num_slots, dim], keys of length 1 or 0, oldest first.
        threshold: two keys are neighbors if their cosine is larger; at least 0.
        retain: number of newest neighbors of each key that count.

    Returns:
        float32 [num_slots]: entry j is the sum of the cosines of all keys i that have
        j among their ``retain`` newest neighbors.

    Cost: see :class:`RKV`. Waits for the device once per tile.
    """
    num_slots = unit.shape[0]
    sums = unit.new_zeros(num_slots)
    rows = torch.arange(num_slots, device=unit.device)
    missing = torch.full_like(rows, retain, dtype=torch.int32)
    stop, width = num_slots if retain else 0, _FIRST_TILE
    while stop and rows.numel():
        start = max(stop - max(min(width, _MAX_COSINES // rows.numel()), 1), 0)
        cosines = unit[rows] @ unit[start:stop].T
        inside = (rows >= start) & (rows < stop)
        cosines[inside, rows[inside] - start] = 0  # a key is no neighbor of its own
        found = cosines.amax(1) > threshold
        cosines = cosines[found]
        near = cosines > threshold
        # How many neighbors of the row are as new or newer, within this tile.
        rank = near.flip(1).cumsum(1, dtype=torch.int32).flip(1)
        newest = near & (rank <= missing[found, None])
        sums[start:stop] = (cosines * newest).sum(0)
        missing[found] -= newest.sum(1, dtype=torch.int32)
        unfinished = missing > 0
        rows, missing = rows[unfinished], missing[unfinished]
        stop, width = start, 2 * width
    return sums
