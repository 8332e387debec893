"""ProtoKV: tokens with similar keys share their votes."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from vllm_kvplugins.ops.clusters import assign_and_average, chunk_prototypes
from vllm_kvplugins.policies.base import LayerView
from vllm_kvplugins.policies.compressor import Compressor
from vllm_kvplugins.policies.votes import window_votes
from vllm_kvplugins.scoring import prototypes as proto
from vllm_kvplugins.scoring.attention_votes import (
    drop_invalid,
    mark_window,
    valid_keys,
)


class ProtoKV(Compressor):
    """Average the window's votes over clusters of similar keys.

    ProtoKV (anonymous ACL submission), section 4 and algorithm 1. There are two kinds
    of prototypes: means of chunks without their irregular tokens, and hash buckets of
    the irregular tokens. Every slot joins the nearest prototype by cosine similarity.
    The score of a slot is the mean vote of its cluster.

    GQA: keys, prototypes and clusters are per KV head, and votes are averaged over the
    queries of a group, which commutes with the cluster mean. The paper's models have
    GQA, but its equations do not cover it.

    Decisions where the paper is silent, and differences:

    - Only slots before the window are clustered. Equation 4 gives no votes to the
      window, and the window always stays.
    - k is ``slots // chunk_size``, at most ``max_chunks``, so that the cost grows
      linearly. As in line 2 of algorithm 1, a chunk has ``n // k`` slots. The last
      ``n % k`` slots are in no chunk: they are never irregular or part of a prototype,
      but they are assigned and scored.
    - The union of equation 16 runs to u, as in line 14 of algorithm 1; the equation
      says r. Empty chunks and buckets give no prototype.
    - ``p = 3u`` and ``u = 2**r`` are from the paper, which gives no value for k, r,
      gamma and the window. Defaults here: window 32 (the paper's budgets go down to
      64), 16 buckets, and chunks of 32 slots. With 256 chunks, the maximum, the
      assignment costs about as much as the votes.
    - Slots of a cluster have equal scores. If the budget ends within a cluster, its
      lower slots stay. Line 21 of algorithm 1 does not specify this.
    - Ablations (section 5.5) change how prototypes are computed, but not their number:
      ``chunk-only`` has k + u chunks and no irregular tokens, ``lsh-only`` hashes all
      tokens into k + u buckets.

    Cost: SnapKV's votes, and O(n * (k + u) * head_dim) per KV head for the assignment;
    float32 copies of one tile of slots at a time.
    """

    name: ClassVar[str] = "protokv"
    summary: ClassVar[str] = "averages the window's votes over clusters of similar keys"

    window: int = Field(
        default=32, ge=1, description="Number of newest queries that vote."
    )
    chunk_size: int = Field(
        default=32, ge=1, description="Minimum number of tokens per chunk."
    )
    max_chunks: int = Field(
        default=256,
        ge=1,
        description="Maximum number of chunks; long prompts get longer chunks.",
    )
    hash_bits: int = Field(
        default=4,
        ge=1,
        le=12,
        description="r: there are 2^r buckets and 3 * 2^r irregular tokens.",
    )
    gamma: float = Field(
        default=1.0,
        gt=0.0,
        description="Scale of the hash projections, times 1 / (typical key norm).",
    )
    seed: int = Field(
        default=0, ge=0, description="Random seed of the hash projections."
    )
    ablation: Literal["none", "chunk-only", "lsh-only"] = Field(
        default="none", description="Omit one kind of prototype (section 5.5)."
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
        num_slots = view.positions.shape[1]
        votes = window_votes(view)
        before_window = slice(0, num_slots - view.queries.shape[1])
        valid = None if view.valid is None else view.valid[:, before_window]
        keys = valid_keys(view.keys[:, before_window], valid)
        prototypes = self.prototypes(keys, valid)
        scores, _ = assign_and_average(keys, prototypes, votes.mean(dim=1), valid)
        return mark_window(drop_invalid(scores, valid), num_slots)

    def prototypes(
        self, keys: torch.Tensor, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The prototypes of these keys (set M of equation 16).

        Args:
            keys: [num_kv_heads, num_slots, head_dim], the slots to cluster.
            valid: bool [num_kv_heads, num_slots]; None if all slots are valid. Invalid
                slots must have zero keys.

        Returns:
            [num_kv_heads, prototypes, head_dim], unit rows, chunks first; zero rows for
            empty chunks and buckets.
        """
        num_slots = keys.shape[1]
        buckets = 2**self.hash_bits
        chunks = max(min(num_slots // self.chunk_size, self.max_chunks), 1)
        if self.ablation == "lsh-only":
            return self._hashed(keys, chunks + buckets)
        if self.ablation == "chunk-only":
            chunks, outliers = min(chunks + buckets, num_slots), 0
        else:
            outliers = 3 * buckets
        regular, slots = chunk_prototypes(keys, chunks, outliers, valid)
        if not outliers:
            return regular
        irregular = keys.gather(1, slots.unsqueeze(2).expand(-1, -1, keys.shape[2]))
        return torch.cat([regular, self._hashed(irregular, buckets)], dim=1)

    def _hashed(self, keys: torch.Tensor, num_buckets: int) -> torch.Tensor:
        bits = (num_buckets - 1).bit_length()
        buckets = proto.hash_buckets(keys, bits, num_buckets, self.gamma, self.seed)
        return proto.bucket_prototypes(keys, buckets, num_buckets)
