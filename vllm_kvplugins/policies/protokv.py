"""ProtoKV: tokens that mean the same share their votes."""

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
    """Votes of the window, averaged over clusters around hybrid prototypes.

    ProtoKV (anonymous ACL submission), section 4 and algorithm 1: chunk means
    without their irregular tokens and hash buckets of the irregular tokens give
    the prototypes; every slot joins the nearest one by cosine; the mean vote of
    its cluster is its score.

    GQA (the paper's models have it, its equations do not): keys, prototypes and
    clusters are per KV head; votes are averaged over the queries' group, which
    commutes with the cluster mean.

    Where the paper leaves room, or differs:
      * Clustered are the slots before the window: equation 4 gives no votes to
        the window, which stays anyway.
      * k is ``slots // chunk_size``, at most ``max_chunks`` so that the cost
        grows linearly. As in line 2 of algorithm 1 chunks are ``n // k`` slots
        and the ``n % k`` last slots are in none: they can be neither irregular
        nor part of a prototype, but are assigned and scored.
      * The union of equation 16 runs to u, as in algorithm 1's line 14 (to r in
        the equation); empty chunks and buckets give no prototype.
      * ``p = 3u`` and ``u = 2**r`` are the paper's; its text gives no value for
        k, r, gamma and the window. Defaults here: window 32 (its budgets go
        down to 64), 16 buckets, chunks of 32 slots but at most 256 (then the
        assignment costs about as much as the votes).
      * Slots of a cluster tie, and the cluster at the budget's edge is cut: its
        lower slots stay. Line 21 of algorithm 1 leaves this open.
      * Ablations (section 5.5) change only how prototypes are made, and keep
        their number: ``chunk-only`` has k + u chunks and no irregular tokens,
        ``lsh-only`` hashes all tokens into k + u buckets.

    Cost: SnapKV's votes, and O(n * (k + u) * head_dim) per KV head for the
        assignment; float32 copies of one tile of slots at a time.
    """

    name: ClassVar[str] = "protokv"
    summary: ClassVar[str] = "window votes shared within clusters of similar keys"

    window: int = Field(default=32, ge=1, description="Newest queries that vote.")
    chunk_size: int = Field(default=32, ge=1, description="Tokens per chunk, at least.")
    max_chunks: int = Field(
        default=256, ge=1, description="Most chunks; longer prompts get longer ones."
    )
    hash_bits: int = Field(
        default=4,
        ge=1,
        le=12,
        description="r: 2^r buckets, and 3 * 2^r irregular tokens.",
    )
    gamma: float = Field(
        default=1.0,
        gt=0.0,
        description="Spread of the hash projections, per 1 / (typical key norm).",
    )
    seed: int = Field(default=0, ge=0, description="Of the hash projections.")
    ablation: Literal["none", "chunk-only", "lsh-only"] = Field(
        default="none", description="Leave out one kind of prototype (section 5.5)."
    )

    @property
    def queries_needed(self) -> int:
        return self.window

    @property
    def minimum_budget_tokens(self) -> int:
        return self.window + 1

    def score(self, view: LayerView) -> torch.Tensor:
        num_slots = view.keys.shape[1]
        votes = window_votes(view)
        prefix = slice(0, num_slots - view.queries.shape[1])
        valid = None if view.valid is None else view.valid[:, prefix]
        keys = valid_keys(view.keys[:, prefix], valid)
        prototypes = self.prototypes(keys, valid)
        scores, _ = assign_and_average(keys, prototypes, votes.mean(dim=1), valid)
        return mark_window(drop_invalid(scores, valid), num_slots)

    def prototypes(
        self, keys: torch.Tensor, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The set M of equation 16 for these keys.

        Args:
            keys: [num_kv_heads, num_slots, head_dim], the slots to cluster.
            valid: bool [num_kv_heads, num_slots], or None if all are; other
                slots have zero keys.

        Returns:
            [num_kv_heads, prototypes, head_dim], unit rows; regular ones first,
            zero rows for empty ones.
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
        chosen = keys.gather(1, slots.unsqueeze(2).expand(-1, -1, keys.shape[2]))
        return torch.cat([regular, self._hashed(chosen, buckets)], dim=1)

    def _hashed(self, keys: torch.Tensor, num_buckets: int) -> torch.Tensor:
        bits = (num_buckets - 1).bit_length()
        buckets = proto.hash_buckets(keys, bits, num_buckets, self.gamma, self.seed)
        return proto.bucket_prototypes(keys, buckets, num_buckets)
